"""Facts of a traced window that compare ranks: slow kernels and slow links."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import rate_text
from haiprof.diagnosis.gpu_functions import (
    ABNORMAL,
    RANKS,
    SLOW,
    communication_report,
    gpu_compute_report,
    memory_report,
)
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import FAR_MIN_RANKS
from haiprof.diagnosis.verdict import Abstention, Finding, Judgement, evidence_rows

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

_NO_GRIDS = "whether it got larger inputs: kernels' grids are not in the traces"


def _of_gpus(
    judge: Callable[[Patterns], Finding | str | None],
) -> Callable[[RuleInputs], Judgement]:
    """Makes a rule of a function on traces of GPUs, which may also say why it cannot judge."""

    @wraps(judge)
    def rule(inputs: RuleInputs) -> Judgement:
        patterns = inputs.traces.of_gpus()
        found = patterns if isinstance(patterns, str) else judge(patterns)
        return Abstention(rule=judge.__name__, why=found) if isinstance(found, str) else found

    return rule


def _lacks_ranks(patterns: Patterns) -> str:
    """Why no rank can be called slow; empty where there are enough to compare with."""
    count = int(patterns.totals["has_gpu"].sum())
    return f"GPU traces of {count} ranks; it takes {FAR_MIN_RANKS}" * (count < FAR_MIN_RANKS)


@_of_gpus
def slow_kernels(patterns: Patterns) -> Finding | str | None:
    """One rank's GPU takes longer for the same kernels."""
    if why := _lacks_ranks(patterns):
        return why
    report = gpu_compute_report(patterns)
    slow = report.tables[RANKS].filter(pl.col("is_slow")).sort("pace_ratio", descending=True)
    if slow.is_empty():
        return None
    rank, pace, window = slow.select("rank", "pace_ratio", "window_ns").row(0)
    own = report.tables[ABNORMAL].filter(pl.col("rank") == rank)
    excess = int(own["excess_ns"].sum())
    # Grids tell larger inputs from a slow GPU: ranks with those are not called slow.
    has_grids = patterns.functions["median_block_count"].count() > 0
    return Finding(
        rule="slow_kernels",
        title=f"rank {rank} computes slowly: its kernels take {pace:.2f} times the others' time",
        evidence=evidence_rows(
            ("time of its kernels by the others' time", pace, ""),
            ("kernels that are slow there", own.height, "count"),
            ("what that costs", excess, "ns"),
            ("the same, share of the window", excess / window, "ratio"),
        ),
        remedy=f"look at the GPU of rank {rank}: clock, power cap, temperature, throttling "
        "(`haiprof verdict rank RUN RANK`), other processes on it; else use another GPU",
        confidence=0.8,
        missing=() if has_grids else (_NO_GRIDS,),
        rank=rank,
        scope="window",
    )


@_of_gpus
def slow_link(patterns: Patterns) -> Finding | str | None:
    """One rank's transfers are slower than the others': its link, or its bus to the host."""
    if why := _lacks_ranks(patterns):
        return why
    rates = ("bandwidth_bytes_per_s", "others_bandwidth_bytes_per_s")
    talk = communication_report(patterns).tables[ABNORMAL]
    copies = memory_report(patterns).tables[ABNORMAL].filter(pl.col("why") == SLOW)
    copies = copies.drop_nulls(rates)
    if talk.is_empty() and copies.is_empty():
        return None
    found, what = (talk, "type") if len(talk) else (copies, "name")
    rank, name, own, usual, share = found.select("rank", what, *rates, "bottleneck_ratio").row(0)
    return Finding(
        rule="slow_link",
        title=f"rank {rank} transfers slowly: {name} at {rate_text(own)}, elsewhere "
        f"{rate_text(usual)}",
        evidence=evidence_rows(
            (f"bandwidth of rank {rank}", own, "bytes/s"),
            ("the ranks' median", usual, "bytes/s"),
            ("its transfers, share of the window", share, "ratio"),
        ),
        remedy="check the rank's links: nvidia-smi nvlink -s, PCIe width, the port's error "
        "counters (`haiprof verdict overview` shows them), and who else uses them"
        if len(talk)
        else "check the rank's PCIe generation and width (nvidia-smi -q -d PERFORMANCE), and that "
        "its process runs on the NUMA node of its GPU",
        confidence=0.7,
        missing=("which link: NVLink, PCIe or network",) if len(talk) else (),
        rank=rank,
        scope="window",
    )
