"""Queue length: how many launches each stream has received and not begun."""

from __future__ import annotations

import polars as pl

from haiprof.trace_analysis.launches import launched_events
from haiprof.trace_analysis.temporal import Steps
from haiprof.trace_format.kineto.rank_trace import Trace

MAX_QUEUE_LENGTH = 1024
"""Launches that a CUDA stream takes before a launch call blocks; HTA's default."""

_STREAM = ("device", "stream")


def queue_length(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """The launch queue of each stream over time.

    A launch enters the queue when its call begins, and leaves it when the first of what it
    started on that stream begins. A CUDA graph enters once for each stream that it has nodes
    on, not once for each node: so it counts against the launches that a stream takes.

    Never negative: only launches whose call and GPU event are both in the trace count, an
    entry at the time of a leaving comes before it, and a kernel whose recorded start lies
    before its call (the clocks of CPU and GPU are matched to about 1 us) leaves at once.

    Source: HTA get_queue_length_time_series, which knows twelve names of calls, and no graph
    or cooperative launches (D16, D17).
    """
    waiting = _entries(trace, steps)
    change = [
        waiting.select(*_STREAM, ts_ns=when, change=pl.lit(by, dtype=pl.Int64))
        for when, by in (("enter_ns", 1), ("leave_ns", -1))
    ]
    changes = pl.concat(change).sort(*_STREAM, "ts_ns", -pl.col("change"))
    return changes.select(*_STREAM, "ts_ns", queue_length=pl.col("change").cum_sum().over(_STREAM))


def _entries(trace: Trace, steps: Steps) -> pl.DataFrame:
    """`device`, `stream`, `enter_ns`, `leave_ns` of each launch on each stream."""
    entry = launched_events(trace, steps).group_by(*_STREAM, "correlation", maintain_order=True)
    first = entry.agg(enter_ns=pl.col("call_ts_ns").first(), leave_ns=pl.col("ts_ns").min())
    return first.with_columns(leave_ns=pl.max_horizontal("enter_ns", "leave_ns"))


def queue_length_summary(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """How long the launch queue of each stream was: over time, and over its changes.

    Source: the last eight are HTA's get_queue_length_summary. They weigh a length that held
    for 1 us like one that held for a second: `mean_length` does not.
    """
    series = _with_duration(queue_length(trace, steps=steps))
    length, duration = pl.col("queue_length"), pl.col("dur_ns")
    summary = series.group_by(_STREAM, maintain_order=True).agg(
        launch_count=(pl.len() // 2).cast(pl.Int64),
        span_ns=duration.sum(),
        empty_ns=duration.filter(length == 0).sum(),
        mean_length=(length * duration).sum() / duration.sum(),
        max_length=length.max(),
        change_count=pl.len().cast(pl.Int64),
        change_mean=length.mean(),
        change_std=length.std(),
        change_min=length.min(),
        change_q25=length.quantile(0.25, "linear"),
        change_q50=length.quantile(0.5, "linear"),
        change_q75=length.quantile(0.75, "linear"),
        change_max=length.max(),
    )
    return summary.with_columns(pl.col("mean_length").fill_nan(None)).sort(_STREAM)


def full_queue(
    trace: Trace, *, steps: Steps = None, max_queue_length: int = MAX_QUEUE_LENGTH
) -> pl.DataFrame:
    """How long the launch queue of each stream was full: launch calls block meanwhile.

    Source: HTA get_time_spent_blocked_on_full_queue, which keeps only the last of a rank's
    streams (D14) and says nothing of streams that were never full.
    """
    series = _with_duration(queue_length(trace, steps=steps))
    trace_ns = _trace_ns(trace)
    full = pl.col("dur_ns").filter(pl.col("queue_length") >= max_queue_length).sum()
    return (
        series.group_by(_STREAM, maintain_order=True)
        .agg(full_ns=full, trace_ns=pl.lit(trace_ns, dtype=pl.Int64))
        .with_columns(full_ratio=pl.col("full_ns") / pl.col("trace_ns"))
        .sort(_STREAM)
    )


def _with_duration(series: pl.DataFrame) -> pl.DataFrame:
    """How long each value held: `dur_ns`; the last one of a stream, an empty queue, for nothing."""
    until = pl.col("ts_ns").shift(-1).over(_STREAM)
    return series.with_columns(dur_ns=(until - pl.col("ts_ns")).fill_null(0))


def _trace_ns(trace: Trace) -> int:
    tables = [table for table in (trace.gpu, trace.runtime, trace.ops) if len(table)]
    starts = [int(table["ts_ns"].to_numpy().min()) for table in tables]
    ends = [int((table["ts_ns"] + table["dur_ns"]).to_numpy().max()) for table in tables]
    return max(ends) - min(starts) if tables else 0
