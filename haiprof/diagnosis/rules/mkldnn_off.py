"""Convolutions on CPUs run without oneDNN."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import PRICES, lost_ratio, price_evidence
from haiprof.diagnosis.thresholds import MIN_STEPS

RULE = "mkldnn_off"


def mkldnn_off(inputs: RuleInputs) -> Judgement:
    """Fires where torch.backends.mkldnn is switched off and the model has convolutions.

    Matrix products in float32 are MKL's or OpenBLAS' either way: without convolutions it is silent.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.uses_gpu or inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why="the ranks use a GPU, or there are too few steps")
    off = [each for each in inputs.settings.values() if each.flags.get("mkldnn") is False]
    layers = [name for each in off for model in each.models for name in model.layers]
    if not any(name.startswith("Conv") for name in layers):
        return None
    price = PRICES["mkldnn_convolutions"]
    lost = lost_ratio(inputs, price)
    return Finding(
        rule=RULE,
        title="oneDNN is switched off: convolutions take at least "
        f"{price.least:.1f}x as long, {ratio_text(lost)} of the step",
        evidence=price_evidence(inputs, price),
        remedy="remove torch.backends.mkldnn.enabled = False (or mkldnn.flags(enabled=False))",
        confidence=0.7,
        lost_ratio=lost,
        phases=price.phases,
    )
