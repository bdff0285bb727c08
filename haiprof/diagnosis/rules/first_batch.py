"""Training starts late: the first batch takes long."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, median
from haiprof.diagnosis.thresholds import CRITICAL_MIN_STEPS, FIRST_BATCH_RATIO

RULE = "first_batch"
CORES_FULL = "cores_full"


def first_batch(inputs: RuleInputs) -> Judgement:
    """Fires where the first wait for the loader is a tenth of the time in training steps.

    Beside others that take the cores it lasts as much longer as all else: what would be less than a
    tenth without that wait is theirs.
    """
    waits = inputs.first_steps.select("rank", ns="dataloader_host_ns").drop_nulls()
    if waits.is_empty():
        return Abstention(rule=RULE, why="no torch DataLoader ran in a training step")
    if inputs.steps.height < CRITICAL_MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {CRITICAL_MIN_STEPS} steps")
    rank, first = waits.sort(-pl.col("ns"), "rank").row(0)
    share = first / max(inputs.training_ns, 1.0)
    usual = median(inputs.steps["dataloader_host_ns"])
    if share < FIRST_BATCH_RATIO:
        return None
    alone = share * (1.0 - inputs.core_waits.get(rank, 0.0))
    return Finding(
        rule=RULE,
        cause=CORES_FULL if alone < FIRST_BATCH_RATIO else None,
        title=f"the first batch took {duration_text(first)}, {ratio_text(share)} of the time "
        "recorded",
        evidence=(
            Evidence(name=f"first batch, rank {rank}", value=float(first), unit="ns"),
            Evidence(name="usual wait for a batch", value=usual, unit="ns"),
            Evidence(name="training steps, all", value=inputs.training_ns, unit="ns"),
        ),
        remedy="look at what happens once: files that are opened or listed in the dataset's "
        "__init__ or in the first __getitem__ of each worker, a shuffle buffer that fills, "
        "spawned workers that import the whole script; cache the list of files",
        confidence=0.8,
        lost_ratio=share,
        severity="info",
        missing=("whether the run goes on: of a long one it is a small part",),
    )
