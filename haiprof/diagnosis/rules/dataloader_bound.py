"""The training thread waits for batches."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import loader_cause
from haiprof.diagnosis.rule_inputs import RuleInputs, median, usual_share
from haiprof.diagnosis.steal import explain_by_steal
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    DATALOADER_WARNING_RATIO,
    MIN_STEPS,
)
from haiprof.run_analysis.records import number

RULE = "dataloader_bound"


def dataloader_bound(inputs: RuleInputs) -> Judgement:
    """Fires where waiting for the loader takes a tenth of the step or more."""
    share = usual_share(inputs, "dataloader")
    if share is None:
        return Abstention(rule=RULE, why="no torch DataLoader ran in a training step")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    if share < DATALOADER_WARNING_RATIO:
        return None
    lost = max(inputs.stolen.values(), default=0.0)
    if share - lost < DATALOADER_WARNING_RATIO:
        return Abstention(rule=RULE, why=explain_by_steal(ratio_text(share), lost))
    enough = inputs.steps.height >= CRITICAL_MIN_STEPS
    why = loader_cause(inputs, share)
    return Finding(
        rule=RULE,
        title=f"dataloader-bound: training waits for batches {ratio_text(share)} of a step"
        + (f", {why.title}" if why else ""),
        evidence=(*_evidence(inputs, share), *(why.evidence if why else ())),
        remedy=why.remedy if why else _REMEDY,
        confidence=0.9 if enough else 0.6,
        lost_ratio=share,
        missing=(
            *(() if enough else (f"more steps: {inputs.steps.height} were judged",)),
            *(why.missing if why else ("why: how the loader was made, its CPU use",)),
        ),
        cause=why.slug if why else None,
        explains=("jitter/dataloader", "jitter/all_phases", "gpu_waits_for_host"),
    )


_REMEDY = (
    "give the DataLoader more workers (num_workers, persistent_workers=True), or do less per "
    "sample in the dataset: decode and tokenize once, ahead of training"
)


def _evidence(inputs: RuleInputs, share: float) -> tuple[Evidence, ...]:
    waits = inputs.steps["dataloader_host_ns"]
    first = number(inputs.first_steps["dataloader_host_ns"].max())
    return (
        Evidence(name="share of the step", value=share, unit="ratio"),
        Evidence(name="mean wait per step", value=number(waits.mean()), unit="ns"),
        Evidence(name="median wait per step", value=median(waits), unit="ns"),
        Evidence(name="first batch", value=first, unit="ns"),
    )
