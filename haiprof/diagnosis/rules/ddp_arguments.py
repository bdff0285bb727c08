"""DistributedDataParallel reduces gradients more often, or looks for more, than it must."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import (
    RuleInputs,
    median,
    own_backward_ns,
    typical_rank,
    usual_split,
)
from haiprof.diagnosis.setting_prices import (
    MODEL,
    PRICES,
    UNKNOWN,
    lost_ratio,
    price_evidence,
    touched_ratio,
)
from haiprof.diagnosis.thresholds import MIN_STEPS, NO_SYNC_MISSED_RATIO
from haiprof.run_analysis.settings import RankSettings

RULE = "ddp_arguments"


def ddp_arguments(inputs: RuleInputs) -> Judgement:
    """Fires where gradients are accumulated without no_sync, or unused parameters are looked for.

    One look a second falls into no_sync with a known chance, where it is used: it is missing where
    none of so many looks found it. Source: Li et al., PyTorch Distributed (VLDB 2020), section 3.2.
    """
    wrapped = [each for each in inputs.settings.values() if _is_alone(each)]
    if not wrapped or len(inputs.world) < 2:
        return Abstention(rule=RULE, why="no DistributedDataParallel of several ranks")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    count = median(inputs.steps["micro_step_count"]) or 1.0
    if count >= 2 and all(_is_never_unsynchronised(inputs, each, count) for each in wrapped):
        return _no_sync(inputs, count)
    ddp = [model.ddp for each in wrapped for model in each.models if model.ddp]
    if any(each.get("find_unused_parameters") is True for each in ddp) and not any(
        each.get("static_graph") is True for each in ddp
    ):
        return _find_unused(inputs)
    return None


def _is_alone(settings: RankSettings) -> bool:
    """One wrapped model and one optimizer: several have backward passes of their own."""
    wrapped = [model for model in settings.models if model.ddp is not None]
    return len(wrapped) == 1 and len(settings.optimizers) == 1


def _is_never_unsynchronised(inputs: RuleInputs, settings: RankSettings, count: float) -> bool:
    looks = settings.looks
    if not looks.look_count or looks.no_sync_count != 0:
        return False
    inside = touched_ratio(inputs, MODEL) * (count - 1) / count
    return (1 - inside) ** looks.look_count <= NO_SYNC_MISSED_RATIO


def _no_sync(inputs: RuleInputs, count: float) -> Finding:
    steps = inputs.of_rank(typical_rank(inputs))
    split = usual_split(steps)
    backward, whole = split["backward"], sum(value or 0.0 for value in split.values())
    own = None if backward is None else own_backward_ns(inputs, backward, "host")
    spare = None if own is None or backward is None else (backward - own) * (count - 1) / count
    return Finding(
        rule=RULE,
        cause="no_sync",
        title=f"gradients of {count:.0f} micro-steps are accumulated, and reduced after each one",
        evidence=(
            Evidence(name="backward passes of a step", value=count, unit="count"),
            Evidence(name="waiting and reducing that no_sync spares", value=spare, unit="ns"),
        ),
        remedy="all but the last backward of a step under `with model.no_sync():`, its forward too",
        confidence=0.8,
        severity="info",
        lost_ratio=None if spare is None or not whole else spare / whole,
        phases=("backward",),
        missing=(UNKNOWN,) if spare is None else (),
    )


def _find_unused(inputs: RuleInputs) -> Finding:
    price = PRICES["find_unused_parameters"]
    lost = None if inputs.uses_gpu else lost_ratio(inputs, price)
    return Finding(
        rule=RULE,
        cause="find_unused_parameters",
        title="find_unused_parameters=True: the graph is walked after each forward"
        + (f", at least {ratio_text(lost)} of the step" if lost else ""),
        evidence=() if inputs.uses_gpu else price_evidence(inputs, price),
        remedy="leave it out where every parameter gets a gradient in every step; where the unused "
        "ones are always the same, static_graph=True does without",
        confidence=0.5,
        severity="info",
        lost_ratio=lost,
        phases=price.phases,
        missing=(UNKNOWN,) if lost is None else (),
    )
