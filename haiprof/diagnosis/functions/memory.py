"""P6, GPU memory operations: copies and sets that computation does not hide."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import ranks_text, rate_text, ratio_text
from haiprof.diagnosis.functions.distance import FUNCTION, differs, with_distance
from haiprof.diagnosis.functions.report import (
    ABNORMAL,
    FUNCTIONS,
    FunctionReport,
    over_ranks,
    too_few_ranks,
)
from haiprof.diagnosis.thresholds import ABNORMAL_RATIO
from haiprof.trace_analysis.kernel_names import MEMORY

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

TITLE = "GPU memory operations"
_RATE = "bandwidth_bytes_per_s"
LONG, SLOW = "above 1 %", "slower than elsewhere"


def memory_report(patterns: Patterns) -> FunctionReport:
    """Copies and sets.

    Args:
        patterns: Of all ranks.

    Returns:
        Tables: `functions`, with `bottleneck_ratio` as a mean over all ranks and
        `bandwidth_bytes_per_s` over those that do it; `abnormal`, operations of a rank with `why`:
        `above 1 %` of the window, or `slower than elsewhere`: bandwidth or cost off the other
        ranks', with `others_median_ns` and `others_bandwidth_bytes_per_s`.

        Source: PerfTracker (seed 001), GPU memory operations.
    """
    functions = patterns.functions.filter(pl.col("kind") == MEMORY)
    abnormal = _abnormal(functions)
    missing = () if functions.height else ("no copy or set on a GPU in any trace",)
    return FunctionReport(
        kind=MEMORY,
        title=TITLE,
        tables={ABNORMAL: abnormal, FUNCTIONS: _operations(functions, len(patterns.ranks))},
        facts={"slow": sorted(set(abnormal.filter(pl.col("why") == SLOW)["rank"].to_list()))},
        meaning=tuple(_meaning(abnormal)),
        missing=missing or too_few_ranks(patterns.totals.height),
    )


def _abnormal(functions: pl.DataFrame) -> pl.DataFrame:
    judged = with_distance(functions, FUNCTION, ("bottleneck_ratio", "median_ns", _RATE))
    off = differs("median_ns", high=True) & differs(_RATE, high=False).fill_null(value=True)
    weighs = pl.col("share_ratio") >= ABNORMAL_RATIO
    slow = (pl.col("is_far") & off & weighs).fill_null(value=False)
    long = pl.col("bottleneck_ratio") > ABNORMAL_RATIO
    return (
        judged.with_columns(why=pl.when(slow).then(pl.lit(SLOW)).when(long).then(pl.lit(LONG)))
        .drop_nulls("why")
        .select(
            "rank", "name", "why", "bottleneck_ratio", "count", "median_ns", _RATE,
            others_median_ns="median_ns_median",
            others_bandwidth_bytes_per_s=f"{_RATE}_median",
        )
        .sort(pl.col("why") == SLOW, "bottleneck_ratio", "rank", "name",
              descending=[True, True, False, False])
    )  # fmt: skip


def _operations(functions: pl.DataFrame, ranks: int) -> pl.DataFrame:
    """Operations over all ranks, the one that bounds most first."""
    found = functions.group_by("name").agg(
        pl.len().cast(pl.Int64).alias("rank_count"),
        pl.col("count").sum(),
        pl.col("median_ns").median(),
        over_ranks("bottleneck_ratio", ranks),
        pl.col(_RATE).mean(),
    )
    return found.sort(-pl.col("bottleneck_ratio"), "name")


def _meaning(abnormal: pl.DataFrame) -> list[str]:
    lines = []
    for rank, name, own, usual in (
        abnormal.filter(pl.col("why") == SLOW)
        .select("rank", "name", _RATE, "others_bandwidth_bytes_per_s")
        .rows()[:3]
    ):
        pace = (
            f"at {rate_text(own)}, elsewhere at {rate_text(usual)}" if own and usual else "slowly"
        )
        lines.append(
            f"rank {rank}: {name} runs {pace}. Look at its PCIe width and generation, its NUMA "
            f"node, and who else uses the bus"
        )
    long = abnormal.filter(pl.col("why") == LONG).group_by("name", maintain_order=True)
    for (name, *_), rows in long:
        ranks = sorted(rows["rank"].to_list())
        mean = rows["bottleneck_ratio"].mean()
        advice = _advice(str(name))
        lines.append(
            f"{name} costs {ratio_text(mean if isinstance(mean, float) else None)} of the time on "
            f"{ranks_text(ranks)}, hidden by nothing{advice}"
        )
    return lines


def _advice(name: str) -> str:
    if "Pageable" in name:
        return ": pin the memory (pin_memory=True) and copy with non_blocking=True"
    return ": copy ahead on a stream of its own" if "HtoD" in name or "DtoH" in name else ""
