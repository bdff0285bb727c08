"""Kernel breakdown: each kernel's calls and time, the longest of them, and one across ranks."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.classify import MEMORY, with_kind
from haiprof.trace_analysis.temporal import Steps, gpu_events
from haiprof.trace_format.kineto.rank_trace import Trace

OTHERS = "others"
TOP_KERNELS = 10
"""How many of each kind pictures show; the rest are one part."""
_GROUP = ["device", "kind"]
DURATION_STATISTICS = {
    "count": pl.len().cast(pl.Int64),
    "sum_ns": pl.col("dur_ns").sum(),
    "min_ns": pl.col("dur_ns").min(),
    "max_ns": pl.col("dur_ns").max(),
    "mean_ns": pl.col("dur_ns").mean(),
    "std_ns": pl.col("dur_ns").std(),
}
"""Of a group of events; the sample's deviation, which is null of a single event."""


def kernels(
    trace: Trace,
    *,
    steps: Steps = None,
    num_kernels: int | None = None,
    duration_ratio: float | None = None,
    include_memory: bool = True,
) -> pl.DataFrame:
    """Each kernel's count and time.

    Source: the second frame of HTA get_gpu_kernel_breakdown. HTA's mean, min and max are the
    sum, and its deviation 0, as soon as a limit takes effect (D2); its duration_ratio cuts at
    a quantile of the running sum, not at a share of the time (D4).
    """
    gpu = with_kind(gpu_events(trace, steps)).select(*_GROUP, "name", "dur_ns")
    if not include_memory:
        gpu = gpu.filter(pl.col("kind") != MEMORY)
    return limit_kernels(gpu, num_kernels=num_kernels, duration_ratio=duration_ratio)


def limit_kernels(
    gpu: pl.DataFrame, *, num_kernels: int | None, duration_ratio: float | None
) -> pl.DataFrame:
    """GPU events by name; those with the least time as one row `others`.

    As `kernels`.
    """
    by_name = gpu.group_by(*_GROUP, "name").agg("dur_ns", longest_ns=pl.col("dur_ns").sum())
    marked = _mark_kept_rows(by_name, num_kernels, duration_ratio).explode("dur_ns")
    found = marked.group_by(*_GROUP, "is_kept", own=pl.when("is_kept").then("name")).agg(
        **DURATION_STATISTICS, name_count=pl.col("name").n_unique().cast(pl.Int64)
    )
    return _with_shares(found)


def _mark_kept_rows(
    by_name: pl.DataFrame, num_kernels: int | None, duration_ratio: float | None
) -> pl.DataFrame:
    """With `is_kept`: whether a kernel has a row of its own."""
    text, sum_ns = pl.col("name").cast(pl.String), pl.col("longest_ns")
    ordered = by_name.with_columns(text=text).sort(*_GROUP, -sum_ns, "text")
    keep = pl.lit(True)
    if num_kernels is not None:
        keep = keep & (sum_ns.cum_count().over(_GROUP) <= num_kernels)
    if duration_ratio is not None:
        before = (sum_ns.cum_sum() - sum_ns).over(_GROUP)
        keep = keep & (before < duration_ratio * sum_ns.sum().over(_GROUP))
    return ordered.with_columns(is_kept=keep)


def _with_shares(found: pl.DataFrame) -> pl.DataFrame:
    whole = pl.col("sum_ns").sum().over(_GROUP)
    return (
        found.with_columns(
            name=pl.col("own").cast(pl.String).fill_null(OTHERS),
            kind_ratio=pl.when(whole > 0).then(pl.col("sum_ns") / whole),
        )
        .sort(*_GROUP, -pl.col("is_kept").cast(pl.Int8), -pl.col("sum_ns"), "name")
        .select(*_GROUP, "name", *DURATION_STATISTICS, "kind_ratio", "name_count")
    )


def across_ranks(breakdown: pl.DataFrame) -> pl.DataFrame:
    """The same kernel on every rank: which one is slow at it, and what that costs."""
    per_rank = breakdown.group_by("kind", "name", "rank").agg(
        pl.col("count", "sum_ns").sum(),
    ).with_columns(mean_ns=pl.col("sum_ns") / pl.col("count")).sort("rank")  # fmt: skip
    mean = pl.col("mean_ns")
    slowest, fastest = mean.arg_max(), mean.arg_min()
    found = per_rank.group_by("kind", "name").agg(
        mean.mean(),
        rank_count=pl.len().cast(pl.Int64),
        count=pl.col("count").sum(),
        sum_ns=pl.col("sum_ns").sum(),
        std_ns=mean.std(),
        slowest_rank=pl.col("rank").get(slowest),
        slowest_mean_ns=mean.max(),
        slowest_count=pl.col("count").get(slowest),
        fastest_rank=pl.col("rank").get(fastest),
        fastest_mean_ns=mean.min(),
        others_median_ns=mean.sort().head(pl.len() - 1).median(),
    )
    others = pl.col("others_median_ns")
    above = pl.col("slowest_mean_ns") - others
    return found.select(
        "kind", "name", "rank_count", "count", "sum_ns", "mean_ns", "std_ns",
        "slowest_rank", "slowest_mean_ns", "fastest_rank", "fastest_mean_ns", "others_median_ns",
        distance_ratio=pl.when(others > 0).then(above / others),
        excess_ns=above * pl.col("slowest_count"),
    ).sort(-pl.col("excess_ns"), "kind", "name", nulls_last=True)  # fmt: skip
