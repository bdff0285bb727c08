"""The optimizer updates parameters one by one on a GPU, where one call could update all."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_share
from haiprof.diagnosis.setting_prices import UNKNOWN
from haiprof.diagnosis.thresholds import COSTLY_WARNING_RATIO, LOOP_MIN_TENSORS, MIN_STEPS
from haiprof.run_analysis.settings import OptimizerSettings

RULE = "optimizer_loop"


def optimizer_loop(inputs: RuleInputs) -> Judgement:
    """Fires where foreach was switched off on a GPU, and the optimizer takes part of the step.

    Left alone, torch takes foreach there by itself; on CPUs the loop is what it takes, and no
    finding. Source: torch.optim, "Algorithms" (fused, then foreach, then for-loop by speed).
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if not inputs.uses_gpu or inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why="the ranks use no GPU, or there are too few steps")
    loops = [o for each in inputs.settings.values() for o in each.optimizers if _loops(o)]
    share = usual_share(inputs, "optimizer")
    if not loops or share is None or share < COSTLY_WARNING_RATIO:
        return None
    most = max(loops, key=lambda optimizer: optimizer.tensor_count or 0)
    return Finding(
        rule=RULE,
        title=f"{most.name} updates {most.tensor_count} tensors one by one (foreach=False), "
        f"{ratio_text(share)} of the step",
        evidence=(
            Evidence(name="tensors", value=float(most.tensor_count or 0), unit="count"),
            Evidence(name="optimizer, share of the step", value=share, unit="ratio"),
        ),
        remedy="leave foreach out, or pass fused=True",
        confidence=0.7,
        severity="info",
        missing=(UNKNOWN,),
    )


def _loops(optimizer: OptimizerSettings) -> bool:
    many = (optimizer.tensor_count or 0) >= LOOP_MIN_TENSORS
    return (
        many
        and optimizer.foreach is False
        and not optimizer.fused
        and ("cuda" in optimizer.devices)
    )
