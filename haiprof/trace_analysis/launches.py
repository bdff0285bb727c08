"""Launches: CPU time of each call, the kernels it started, and their delay."""

from __future__ import annotations

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.classify import MEMORY_CATEGORIES
from haiprof.trace_analysis.temporal import Steps, gpu_events
from haiprof.trace_format.kineto.rank_trace import Trace

RUNTIME_CUTOFF_NS = 50_000
LAUNCH_DELAY_CUTOFF_NS = 100_000
"""HTA's defaults for get_cuda_kernel_launch_stats."""


def with_call(gpu: pl.DataFrame, runtime: pl.DataFrame) -> pl.DataFrame:
    """GPU events with the call that launched them, whatever the call's name.

    Every GPU event, by start, with `call`, `call_ts_ns`, `call_dur_ns` and the call's `pid`,
    `tid`, `external_id`; null where the launch is not in the trace. Kernels of a CUDA graph
    share one call. Of several calls with one correlation the outermost counts: a runtime call
    around the driver's. A correlation of 0 is none.
    """
    calls = runtime.filter(pl.col("correlation") > 0).select(
        "correlation",
        "pid",
        "tid",
        "external_id",
        call="name",
        call_ts_ns="ts_ns",
        call_dur_ns="dur_ns",
    )
    own = gpu.drop("pid", "tid").rename({"external_id": "gpu_external_id"})
    first = calls.unique("correlation", keep="first", maintain_order=True)
    return own.join(first, on="correlation", how="left").sort("ts_ns", "event")


def launched_events(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """GPU events whose launch is in the trace, with the call: columns of `with_call`."""
    found = with_call(gpu_events(trace, steps), trace.runtime).drop_nulls("call")
    if found.is_empty() and len(trace.gpu) and not _any_launch(trace):
        raise MissingDataError(
            f"{trace.path}: {len(trace.gpu)} GPU events and no call that launched one of them",
            hint="record both: ProfilerActivity.CPU and ProfilerActivity.CUDA",
        )
    return found


def _any_launch(trace: Trace) -> bool:
    known = trace.runtime.filter(pl.col("correlation") > 0)
    return len(trace.gpu.join(known, on="correlation", how="semi")) > 0


def launch_statistics(
    trace: Trace,
    *,
    steps: Steps = None,
    runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
    include_memory_events: bool = True,
) -> pl.DataFrame:
    """The cost of each launch, and the delay until its work began.

    Source: HTA get_cuda_kernel_launch_stats. HTA knows four calls; here a launch is whatever
    call a GPU event names as its own: cuLaunchKernel(Ex), cooperative, graph and HIP launches
    as well (D16). HTA counts a graph's kernels as a launch each (D17). The delay holds the
    time in which earlier work kept the stream busy; see `queue_length`.
    """
    found = launched_events(trace, steps)
    if not include_memory_events:
        found = found.filter(~pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES))
    cpu, gpu, delay = (
        pl.col(name) for name in ("cpu_duration_ns", "gpu_duration_ns", "launch_delay_ns")
    )
    return _per_launch(found).with_columns(
        is_short=(cpu <= runtime_cutoff_ns) & (gpu < cpu),
        is_runtime_outlier=cpu > runtime_cutoff_ns,
        is_launch_delay_outlier=delay > launch_delay_cutoff_ns,
    )


def _per_launch(found: pl.DataFrame) -> pl.DataFrame:
    """One row per call, from one per GPU event; the events are by start."""
    launches = found.group_by("correlation", maintain_order=True).agg(
        pl.col("call").first(),
        kernel=pl.col("name").first(),
        kernel_count=pl.len().cast(pl.Int64),
        device=pl.col("device").first(),
        stream=pl.col("stream").first(),
        ts_ns=pl.col("call_ts_ns").first(),
        cpu_duration_ns=pl.col("call_dur_ns").first(),
        gpu_duration_ns=pl.col("dur_ns").sum(),
        first_ns=pl.col("ts_ns").first(),
    )
    end = pl.col("ts_ns") + pl.col("cpu_duration_ns")
    return (
        launches.with_columns(
            pl.col("call", "kernel").cast(pl.String),
            launch_delay_ns=(pl.col("first_ns") - end).clip(0),
        )
        .drop("first_ns")
        .sort("ts_ns", "correlation")
    )


def launch_summary(
    trace: Trace,
    *,
    steps: Steps = None,
    runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
    include_memory_events: bool = True,
) -> pl.DataFrame:
    """Launches by call: how many, how long, and how many are short or outliers."""
    launches = launch_statistics(
        trace,
        steps=steps,
        runtime_cutoff_ns=runtime_cutoff_ns,
        launch_delay_cutoff_ns=launch_delay_cutoff_ns,
        include_memory_events=include_memory_events,
    )
    spread = [
        aggregate
        for part in ("cpu_duration", "launch_delay")
        for aggregate in (
            pl.col(f"{part}_ns").sum(),
            pl.col(f"{part}_ns").median().alias(f"{part}_median_ns"),
            pl.col(f"{part}_ns").max().alias(f"{part}_max_ns"),
        )
    ]
    flags = ("short", "runtime_outlier", "launch_delay_outlier")
    by_call = launches.group_by("call").agg(
        pl.len().cast(pl.Int64).alias("launch_count"),
        pl.col("kernel_count").sum(),
        pl.col("gpu_duration_ns").sum(),
        *spread,
        *(pl.col(f"is_{flag}").sum().cast(pl.Int64).alias(f"{flag}_count") for flag in flags),
    )
    alone = _without_launch(trace, steps, include_memory_events=include_memory_events)
    found = by_call.sort("launch_count", "call", descending=[True, False])
    return pl.concat([found, alone], how="diagonal")


def _without_launch(trace: Trace, steps: Steps, *, include_memory_events: bool) -> pl.DataFrame:
    """The row of GPU events whose launch is not in the trace; no row where there is none."""
    gpu = gpu_events(trace, steps)
    if not include_memory_events:
        gpu = gpu.filter(~pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES))
    known = trace.runtime.filter(pl.col("correlation") > 0)
    alone = gpu.join(known, on="correlation", how="anti")
    return alone.select(
        call=pl.lit(None, dtype=pl.String),
        kernel_count=pl.len().cast(pl.Int64),
        gpu_duration_ns=pl.col("dur_ns").sum(),
    ).filter(pl.col("kernel_count") > 0)
