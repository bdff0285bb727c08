"""The training thread waits for batches."""

from __future__ import annotations

from haiprof.diagnosis.facts import Facts, median, median_share
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    DATALOADER_CRITICAL_RATIO,
    DATALOADER_WARNING_RATIO,
    MIN_STEPS,
)
from haiprof.units import ratio_text

RULE = "dataloader_bound"


def dataloader_bound(facts: Facts) -> Judgement:
    """Fires where waiting for the loader takes a tenth of the step or more."""
    share = median_share(facts, "dataloader")
    if share is None:
        return Abstention(rule=RULE, why="no torch DataLoader ran in a training step")
    if facts.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    if share < DATALOADER_WARNING_RATIO:
        return None
    enough = facts.steps.height >= CRITICAL_MIN_STEPS
    critical = share >= DATALOADER_CRITICAL_RATIO and enough
    waits = facts.steps["dataloader_host_ns"]
    mean = waits.mean()
    return Finding(
        rule=RULE,
        severity="critical" if critical else "warning",
        title=f"dataloader-bound: training waits for batches {ratio_text(share)} of a step",
        evidence=(
            Evidence(name="share of the step", value=share, unit="ratio"),
            Evidence(name="mean wait per step", value=_number(mean), unit="ns"),
            Evidence(name="median wait per step", value=median(waits), unit="ns"),
            Evidence(
                name="first batch", value=_number(facts.first_steps["dataloader_host_ns"].max()),
                unit="ns",
            ),
            Evidence(name="median step", value=median(facts.steps["step_ns"]), unit="ns"),
        ),
        remedy="give the DataLoader more workers (num_workers, persistent_workers=True), or do "
        "less per sample in the dataset: decode and tokenize once, ahead of training",
        confidence=0.9 if enough else 0.6,
        missing=() if enough else (f"more steps: {facts.steps.height} were judged",),
    )  # fmt: skip


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None
