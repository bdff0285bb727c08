"""FSDP shards the model as one unit, so that all parameters are gathered at once."""

from __future__ import annotations

from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.setting_prices import UNKNOWN
from haiprof.diagnosis.thresholds import LOOP_MIN_TENSORS, MIN_STEPS

RULE = "fsdp_units"


def fsdp_units(inputs: RuleInputs) -> Judgement:
    """A note where a model of many tensors is one unit: nothing is gathered while it computes.

    Source: Zhao et al., PyTorch FSDP (VLDB 2023), section 3.2 and 3.3: parameters of a unit are
    gathered before it computes, the next unit's meanwhile.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if len(inputs.world) < 2:
        return Abstention(rule=RULE, why="one rank")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    whole = [
        model
        for settings in inputs.settings.values()
        for model in settings.models
        if model.fsdp_unit_count == 1 and (model.tensor_count or 0) >= LOOP_MIN_TENSORS
    ]
    if not whole:
        return None
    count = float(whole[0].tensor_count or 0)
    return Finding(
        rule=RULE,
        title=f"FSDP has the whole of {whole[0].name} as one unit: all parameters are gathered "
        "before forward, and nothing computes meanwhile",
        evidence=(
            Evidence(name="units", value=1.0, unit="count"),
            Evidence(name="parameters, each a tensor", value=count, unit="count"),
        ),
        remedy="a unit for each block: fully_shard(block) for every layer before the model itself, "
        "or FullyShardedDataParallel(auto_wrap_policy=...); it also takes less memory",
        confidence=0.6,
        severity="info",
        missing=(UNKNOWN,),
    )
