"""The step is spent outside forward, backward, optimizer and dataloader."""

from __future__ import annotations

from haiprof.diagnosis.facts import Facts, median_share
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    MIN_STEPS,
    OTHER_CRITICAL_RATIO,
    OTHER_WARNING_RATIO,
    SAVE_MAIN_RATIO,
)
from haiprof.units import ratio_text

RULE = "outside_the_model"


def outside_the_model(facts: Facts) -> Judgement:
    """Fires where a third of the step or more is in none of the four phases."""
    share = median_share(facts, "other")
    if share is None or facts.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    if share < OTHER_WARNING_RATIO:
        return None
    other_ns = float(facts.steps["other_host_ns"].sum())
    saves = facts.save_ns >= SAVE_MAIN_RATIO * other_ns
    enough = facts.steps.height >= CRITICAL_MIN_STEPS
    what = "mostly in saving checkpoints" if saves else "in no phase of training"
    return Finding(
        rule=RULE,
        severity="critical" if share >= OTHER_CRITICAL_RATIO and enough else "warning",
        title=f"outside the model: {ratio_text(share)} of a training step, {what}",
        evidence=(
            Evidence(name="other, share of the step", value=share, unit="ratio"),
            Evidence(name="other, mean per step", value=other_ns / facts.steps.height, unit="ns"),
            Evidence(name="checkpoint saves, all steps", value=facts.save_ns, unit="ns"),
        ),
        remedy="save less often, or on another thread (torch.distributed.checkpoint.async_save)"
        if saves
        else "look between the phases: .item() and printing every step, metrics, logging, a loss "
        "outside the model, batches made by hand; haiprof rank shows the slowest steps",
        confidence=0.8 if enough else 0.5,
        missing=("which code it is: a torch.profiler window with stacks would say",),
    )
