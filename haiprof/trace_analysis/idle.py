"""Idle-time breakdown: why a GPU's streams were idle between kernels."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.temporal import Steps, gpu_events, with_launch
from haiprof.trace_format.kineto.rank_trace import Trace

HOST_WAIT, KERNEL_WAIT, OTHER, UNKNOWN = "host_wait", "kernel_wait", "other", "unknown"
IDLE_CATEGORIES = (HOST_WAIT, KERNEL_WAIT, OTHER, UNKNOWN)

CONSECUTIVE_KERNEL_DELAY_NS = 30_000
"""HTA documents its default of 30 in ns but compares it with us (D9): its results mean 30 us."""

_STREAM = ["device", "stream"]
_STATISTICS = {
    "count": pl.len().cast(pl.Int64),
    "mean_ns": pl.col("gap_ns").mean(),
    "std_ns": pl.col("gap_ns").std(),
    "min_ns": pl.col("gap_ns").min(),
    "q25_ns": pl.col("gap_ns").quantile(0.25, "linear"),
    "median_ns": pl.col("gap_ns").median(),
    "q75_ns": pl.col("gap_ns").quantile(0.75, "linear"),
    "max_ns": pl.col("gap_ns").max(),
}


def idle_breakdown(
    trace: Trace,
    *,
    steps: Steps = None,
    streams: list[int] | None = None,
    consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS,
) -> pl.DataFrame:
    """The idle time of each stream by what it waited for.

    One row per device, stream and category: `device`, `stream`, `idle_category`, `idle_ns`,
    `idle_ratio` (of the stream's idle time; null where it has none), `before_launch_ns` (the
    part before the launch call began: what a faster host can save), `count` of idle
    intervals and their `mean_ns`, `std_ns`, `min_ns`, `q25_ns`, `median_ns`, `q75_ns` and
    `max_ns` (null without any; the sample's deviation: null of a single one). The categories:
    `host_wait`: the next event was launched after all before it on the stream had ended;
    `kernel_wait`: it was launched before, and the gap is below the delay; `other`: it was
    launched before, and waited longer (an event of another stream, as a rule); `unknown`: its
    launch is not in the trace. The idle time of a stream is that between its first start and
    last end in which nothing ran on it. Empty without GPU events.

    Source: HTA get_idle_time_breakdown. HTA takes the end of the one event before instead of
    the latest end, so that overlaps give negative gaps (D10), counts waits as events (D11),
    gaps of 0 as intervals, and puts what has no launch under `kernel_wait` or `other`.
    """
    gpu = gpu_events(trace, steps)
    if streams is not None:
        gpu = gpu.filter(pl.col("stream").is_in(streams))
    parts = gaps(gpu, trace.runtime, consecutive_kernel_delay_ns).group_by(
        *_STREAM, "idle_category"
    ).agg(
        idle_ns=pl.col("gap_ns").sum(), before_launch_ns=pl.col("before_launch_ns").sum(),
        **_STATISTICS,
    )  # fmt: skip
    return _with_zeros(parts, gpu.select(_STREAM).unique())


def gaps(gpu: pl.DataFrame, runtime: pl.DataFrame, delay_ns: int) -> pl.DataFrame:
    """The idle intervals of every stream.

    One row per interval: `device`, `stream`, `ts_ns` at which the next event begins, `gap_ns`,
    `before_launch_ns`, `idle_category`.
    """
    end = pl.col("ts_ns") + pl.col("dur_ns")
    timed = with_launch(gpu, runtime).with_columns(
        busy_until_ns=end.cum_max().shift(1).over(_STREAM)
    )
    found = timed.with_columns(gap_ns=pl.col("ts_ns") - pl.col("busy_until_ns"))
    category = (
        pl.when(pl.col("launch_ns").is_null())
        .then(pl.lit(UNKNOWN))
        .when(pl.col("launch_ns") > pl.col("busy_until_ns"))
        .then(pl.lit(HOST_WAIT))
        .when(pl.col("gap_ns") < delay_ns)
        .then(pl.lit(KERNEL_WAIT))
        .otherwise(pl.lit(OTHER))
    )
    late_ns = (pl.col("launch_ns") - pl.col("busy_until_ns")).clip(0, pl.col("gap_ns"))
    return found.filter(pl.col("gap_ns") > 0).select(
        *_STREAM, "ts_ns", "gap_ns", before_launch_ns=late_ns, idle_category=category
    )


def _with_zeros(parts: pl.DataFrame, streams: pl.DataFrame) -> pl.DataFrame:
    """Adds rows for categories without an interval, and shares."""
    every = streams.join(pl.DataFrame({"idle_category": IDLE_CATEGORIES}), how="cross")
    category, whole = pl.col("idle_category"), pl.col("idle_ns").sum().over(_STREAM)
    return (
        pl.concat([parts, every], how="diagonal")
        .unique([*_STREAM, "idle_category"], keep="first", maintain_order=True)
        .with_columns(
            pl.col("idle_ns", "count").fill_null(0),
            before_launch_ns=pl.when(category != UNKNOWN).then(
                pl.col("before_launch_ns").fill_null(0)
            ),
            place=category.replace_strict(IDLE_CATEGORIES, range(len(IDLE_CATEGORIES))),
        )
        .with_columns(idle_ratio=pl.when(whole > 0).then(pl.col("idle_ns") / whole))
        .sort(*_STREAM, "place")
        .select(
            *_STREAM, "idle_category", "idle_ns", "idle_ratio", "before_launch_ns", *_STATISTICS
        )
    )
