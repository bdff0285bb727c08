"""One rank's GPU takes longer for the same kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.functions.gpu_compute import gpu_compute_report
from haiprof.diagnosis.functions.report import ABNORMAL, RANKS
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import FAR_MIN_RANKS

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

RULE = "slow_kernels"
_NO_GRIDS = "whether it got larger inputs: kernels' grids are not in the traces"


def slow_kernels(inputs: RuleInputs) -> Judgement:
    """Fires where a rank's kernels take far longer than the other ranks'."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    count = int(patterns.totals["has_gpu"].sum())
    if count < FAR_MIN_RANKS:
        return Abstention(rule=RULE, why=f"GPU traces of {count} ranks; it takes {FAR_MIN_RANKS}")
    report = gpu_compute_report(patterns)
    slow = report.tables[RANKS].filter(pl.col("is_slow")).sort("pace_ratio", descending=True)
    if slow.is_empty():
        return None
    rank, pace, window = slow.select("rank", "pace_ratio", "window_ns").row(0)
    own = report.tables[ABNORMAL].filter(pl.col("rank") == rank)
    excess = int(own["excess_ns"].sum())
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time",
        evidence=(
            Evidence(name="time of its kernels by the others' time", value=pace, unit=""),
            Evidence(name="kernels that are slow there", value=own.height, unit="count"),
            Evidence(name="what that costs", value=excess, unit="ns"),
            Evidence(name="the same, share of the window", value=excess / window, unit="ratio"),
        ),
        remedy=f"look at the GPU of rank {rank}: clock, power cap, temperature, throttling "
        "(`haiprof rank RUN RANK`), other processes on it; else move the rank to another GPU",
        confidence=0.8,
        missing=_missing(patterns),
        rank=rank,
        scope="window",
    )


def _missing(patterns: Patterns) -> tuple[str, ...]:
    """Grids tell larger inputs from a slow GPU: ranks with those are not called slow."""
    known = patterns.functions["median_block_count"].count() > 0
    return () if known else (_NO_GRIDS,)
