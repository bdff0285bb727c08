"""Only deterministic algorithms are allowed, which is slower."""

from __future__ import annotations

from haiprof.diagnosis.finding import Abstention, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import PRICES, UNKNOWN, lost_ratio, price_evidence
from haiprof.diagnosis.thresholds import COSTLY_WARNING_RATIO, MIN_STEPS

RULE = "deterministic_mode"


def deterministic_mode(inputs: RuleInputs) -> Judgement:
    """Fires where torch or cuDNN may use deterministic algorithms only.

    On CPUs it costs next to nothing where no index operation is used; there it is silent below a
    twentieth of the step by the least price measured. cuDNN's own switch concerns GPUs alone.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    names = ("deterministic", *(("cudnn_deterministic",) if inputs.uses_gpu else ()))
    on = {name for each in inputs.settings.values() for name in names if each.flags.get(name)}
    if not on:
        return None
    price = PRICES["deterministic"]
    lost = None if inputs.uses_gpu else lost_ratio(inputs, price)
    if lost is not None and lost < COSTLY_WARNING_RATIO:
        return None
    return Finding(
        rule=RULE,
        title="deterministic algorithms only: " + " and ".join(_TITLES[n] for n in sorted(on)),
        evidence=() if inputs.uses_gpu else price_evidence(inputs, price),
        remedy="leave it off where runs need not repeat to the bit; with it, "
        "torch.utils.deterministic.fill_uninitialized_memory = False saves filling new tensors",
        confidence=0.6,
        severity="info",
        lost_ratio=lost,
        phases=price.phases,
        missing=(UNKNOWN,) if lost is None else (),
    )


_TITLES = {
    "deterministic": "torch.use_deterministic_algorithms",
    "cudnn_deterministic": "torch.backends.cudnn.deterministic",
}
