"""Training stands still while checkpoints are saved."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    MIN_STEPS,
    SAVE_MAIN_RATIO,
    SAVE_WARNING_RATIO,
)
from haiprof.run_analysis.phases import SAVE_PHASE

RULE = "checkpoint_stalls"


def checkpoint_stalls(inputs: RuleInputs) -> Judgement:
    """Fires where one rank's saves take a tenth of the time from its first step to its last."""
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    saves = inputs.pauses.filter(pl.col("phase") == SAVE_PHASE)
    if saves.is_empty():
        return None
    by_rank = saves.group_by("rank").agg(
        pl.len(), pl.col("duration_ns").sum(), longest=pl.col("duration_ns").max()
    )
    rank, count, spent, longest = by_rank.sort(-pl.col("duration_ns"), "rank").row(0)
    begin, end = inputs.window_ns
    share = spent / max(end - begin, 1)
    if share < SAVE_WARNING_RATIO:
        return None
    other = float(inputs.of_rank(rank)["other_host_ns"].sum())
    outside = ("outside_the_model",) if spent >= SAVE_MAIN_RATIO * other else ()
    return Finding(
        rule=RULE,
        title=f"checkpoints stop training {ratio_text(share)} of the time: {count} saves of "
        f"{duration_text(spent / count)}",
        evidence=(
            Evidence(name=f"saves of rank {rank}, of the time", value=share, unit="ratio"),
            Evidence(name="saves", value=float(count), unit="count"),
            Evidence(name="mean save", value=spent / count, unit="ns"),
            Evidence(name="longest save", value=float(longest), unit="ns"),
        ),
        remedy="save less often, or beside training: torch.distributed.checkpoint.async_save, or "
        "copy the state to the CPU and write it from another thread; write to a local disk first",
        confidence=0.9,
        lost_ratio=min(share, 1.0),
        rank=rank if len(inputs.world) > 1 else None,
        explains=(*outside, "jitter", "ranks_uneven"),
    )
