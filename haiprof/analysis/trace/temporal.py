"""Temporal breakdown: how much of the time a GPU computes, does something else, or is idle."""

from __future__ import annotations

import polars as pl

from haiprof.analysis.trace.classify import COMPUTATION, with_kind
from haiprof.analysis.trace.intervals import Intervals, total, union
from haiprof.traces.trace import Trace

TEMPORAL_SCHEMA = {
    "device": pl.Int64,
    "span_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "non_compute_ns": pl.Int64,
}


def temporal_breakdown(trace: Trace, *, steps: tuple[int, int] | None = None) -> pl.DataFrame:
    """Idle, computing and other time of each GPU of a trace.

    Args:
        trace: One rank's.
        steps: Only GPU events launched in the profiler steps from the first to before the second.

    Returns:
        One row per device: `device`; `span_ns` from the first start to the last end of its events;
        `idle_ns` in which nothing ran; `compute_ns` in which a computing kernel ran;
        `non_compute_ns`, the rest: copies and communication that no kernel hid. Empty without GPU
        events.

        Source: HTA get_temporal_breakdown, with integer ns, all steps, and one row per device
        (HTA's D1, D11, D12, D20 in docs/hta-differences.md).
    """
    gpu = with_kind(gpu_events(trace, steps))
    rows = [_device(key[0], events) for key, events in gpu.group_by("device", maintain_order=True)]
    return pl.DataFrame(rows, schema=TEMPORAL_SCHEMA, orient="row").sort("device")


def _device(device: object, events: pl.DataFrame) -> tuple[object, int, int, int, int]:
    everything = union_of(events)
    span = int(everything.ends[-1] - everything.starts[0]) if len(everything.starts) else 0
    compute = total(union_of(events.filter(pl.col("kind") == COMPUTATION)))
    busy = total(everything)
    return device, span, span - busy, compute, busy - compute


def union_of(events: pl.DataFrame) -> Intervals:
    """The time that any of the events covers; from their `ts_ns` and `dur_ns`."""
    starts = events["ts_ns"].to_numpy()
    return union(starts, starts + events["dur_ns"].to_numpy())


def gpu_events(trace: Trace, steps: tuple[int, int] | None) -> pl.DataFrame:
    """`Trace.gpu`, or those events of it that were launched in some profiler steps.

    Args:
        trace: One rank's.
        steps: First step and the one after the last; None takes all events.

    Returns:
        A GPU event belongs to the step in which its launch call began; one without a launch in the
        trace belongs to the step in which it began itself.
    """
    if steps is None:
        return trace.gpu
    marks = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    launches = trace.runtime.select("correlation", launch_ns="ts_ns").drop_nulls()
    known = trace.gpu.join(
        launches.unique("correlation", keep="first"), on="correlation", how="left"
    )
    when = known["launch_ns"].fill_null(known["ts_ns"])
    inside = pl.Series(values=[False] * len(when))
    for start, end in marks.select("start_ns", "end_ns").iter_rows():
        inside = inside | when.is_between(start, end, closed="left")
    return trace.gpu.filter(inside)
