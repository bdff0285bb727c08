"""Temporal breakdown: the time in which a GPU computes, does something else, or is idle."""

from __future__ import annotations

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, total, union
from haiprof.trace_analysis.classify import COMPUTATION, with_kind
from haiprof.trace_format.kineto.rank_trace import Trace

Steps = tuple[int, int] | None
"""First profiler step and the one after the last; None is everything in the file."""

TEMPORAL_SCHEMA = {
    "device": pl.Int64,
    "span_ns": pl.Int64,
    "idle_ns": pl.Int64,
    "compute_ns": pl.Int64,
    "non_compute_ns": pl.Int64,
}


def temporal_breakdown(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Idle, computing and other time of each GPU of a trace.

    Source: HTA get_temporal_breakdown. HTA rounds ns to us (D1), counts waits as work (D11),
    lays all devices of a process into one timeline (D12), takes kernels with `Sync`, `dma` or
    `Memset` in their name for no computation (D13), and leaves the last step out (D20).
    """
    gpu = with_kind(gpu_events(trace, steps))
    rows = [_device(key[0], events) for key, events in gpu.group_by("device", maintain_order=True)]
    nothing = [(None,) * len(TEMPORAL_SCHEMA)]
    return pl.DataFrame(rows or nothing, schema=TEMPORAL_SCHEMA, orient="row").sort("device")


def _device(device: object, events: pl.DataFrame) -> tuple[object, int, int, int, int]:
    span = int(_ends(events).to_numpy().max() - events["ts_ns"].to_numpy().min())
    compute = total(union_of(events.filter(pl.col("kind") == COMPUTATION)))
    busy = total(union_of(events))
    return device, span, span - busy, compute, busy - compute


def _ends(events: pl.DataFrame) -> pl.Series:
    return events["ts_ns"] + events["dur_ns"]


def union_of(events: pl.DataFrame) -> Intervals:
    """The time that any of the events covers; from their `ts_ns` and `dur_ns`."""
    return union(events["ts_ns"].to_numpy(), _ends(events).to_numpy())


def gpu_events(trace: Trace, steps: Steps) -> pl.DataFrame:
    """`Trace.gpu`, or those events of it that were launched in some profiler steps.

    Those whose launch call began between the beginning of the first and the end of the last
    of the steps; an event without a launch in the trace counts by its own beginning. Where
    the arguments name no device or stream, `pid` and `tid` do.
    """
    gpu = trace.gpu.with_columns(
        device=pl.coalesce("device", "pid"), stream=pl.coalesce("stream", "tid")
    )
    if steps is None:
        return gpu
    start_ns, end_ns = step_window(trace, steps)
    known = with_launch(gpu, trace.runtime)
    when = pl.coalesce("launch_ns", "ts_ns")
    return known.filter(when.is_between(start_ns, end_ns, closed="left")).drop("launch_ns")


def step_window(trace: Trace, steps: tuple[int, int]) -> tuple[int, int]:
    """When some profiler steps began and ended, in ns."""
    marks = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    starts, ends = marks["start_ns"].to_list(), marks["end_ns"].to_list()
    if not starts:
        raise _no_such_step(trace, steps)
    return min(starts), max(ends)


def traced_window(trace: Trace, steps: Steps = None) -> tuple[int, int, int | None]:
    """When the profiler steps of a trace began and ended, in ns, and how many there are."""
    marks = trace.steps
    if steps is not None:
        marks = marks.filter(pl.col("step").is_between(*steps, closed="left"))
    if len(marks):
        low, high = marks.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        return low, high, marks["step"].n_unique()
    return *(trace.checked.window or (0, 0)), None


def traced_time(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """How long `traced_window` is; a question for a pool: one row, `wall_ns`."""
    low, high, _ = traced_window(trace, steps)
    return pl.DataFrame({"wall_ns": [high - low]}, schema={"wall_ns": pl.Int64})


def _no_such_step(trace: Trace, steps: tuple[int, int]) -> MissingDataError:
    numbers = trace.steps["step"].to_list()
    if not numbers:
        return MissingDataError(
            f"{trace.path}: no profiler step was recorded",
            hint="call profiler.step() once per step, or ask without steps=",
        )
    return MissingDataError(
        f"{trace.path}: no step from {steps[0]} to before {steps[1]}; "
        f"it has {min(numbers)} to {max(numbers)}"
    )


def with_launch(gpu: pl.DataFrame, runtime: pl.DataFrame) -> pl.DataFrame:
    """GPU events with the time of their launch.

    The same rows in the same order, with `launch_ns`, the beginning of the call that launched
    each; null where it is not in the trace. All kernels of a CUDA graph have one launch.
    """
    calls = runtime.select("correlation", launch_ns="ts_ns").filter(pl.col("correlation") > 0)
    first = calls.group_by("correlation").agg(pl.col("launch_ns").min())
    joined = gpu.with_row_index("place").join(first, on="correlation", how="left")
    return joined.sort("place").drop("place")
