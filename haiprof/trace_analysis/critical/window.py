"""The window of a critical path: steps, an annotation, or the whole trace."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.dependencies.host_events import HostEvents, Thread
from haiprof.trace_format.kineto.rank_trace import Trace

Instance = int | tuple[int, int]
"""One of several ranges of a name, from 0; or the first and the last of those that are meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathWindow:
    """The window of a critical path on the host, and its thread."""

    start_ns: int
    host_end_ns: int
    """Its end on the host; work that was launched in it may run longer on the GPU."""
    thread: Thread
    label: str
    """In words."""


def find_window(
    trace: Trace,
    host: HostEvents,
    *,
    steps: tuple[int, int] | None,
    annotation: str | None,
    instance: Instance,
) -> PathWindow:
    """Finds the requested window."""
    if steps is not None and annotation is not None:
        raise ValueError("give steps or an annotation, not both")
    if steps is not None:
        return _of_steps(trace, steps)
    if annotation is not None:
        return _of_annotation(trace, annotation, instance)
    return _of_everything(trace, host)


def _of_steps(trace: Trace, steps: tuple[int, int]) -> PathWindow:
    marks = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    if marks.is_empty():
        known = trace.steps["step"].to_list()
        hint = "it has no steps: call the profiler's step(), or ask for the whole trace"
        if known:
            hint = f"it has the steps {min(known)} to {max(known)}"
        raise MissingDataError(f"{trace.path}: no profiler step in {steps}", hint=hint)
    first, after_last = steps
    return _window(_marks_as_ranges(trace, marks), f"profiler steps {first} to {after_last - 1}")


def _marks_as_ranges(trace: Trace, marks: pl.DataFrame) -> pl.DataFrame:
    """Steps as ranges with their process."""
    ranges = _ranges(trace, "ProfilerStep#").unique("ts_ns", keep="first")
    return ranges.join(marks.select(ts_ns="start_ns"), on="ts_ns", how="semi")


def _of_annotation(trace: Trace, annotation: str, instance: Instance) -> PathWindow:
    found = _ranges(trace, annotation)
    first, last = (instance, instance) if isinstance(instance, int) else instance
    if not 0 <= first <= last < found.height:
        raise MissingDataError(
            f"{trace.path}: {found.height} annotations with {annotation!r} in their name; "
            f"instance {instance} was asked for",
            hint="record_function(name) around a part of the program makes one",
        )
    chosen = found[first : last + 1]
    which = f"instance {first}" if first == last else f"instances {first} to {last}"
    return _window(chosen, f"{chosen['name'][0]} ({which})")


def _ranges(trace: Trace, part: str) -> pl.DataFrame:
    """Ranges on the host with a text in their name, by time; before 2022 they were operators."""
    marks = trace.annotations.filter(pl.col("category") != "gpu_user_annotation")
    for table in (marks, trace.ops):
        named = table.with_columns(pl.col("name").cast(pl.String))
        found = named.filter(pl.col("name").str.contains(part, literal=True))
        if found.height:
            return found.select("name", "ts_ns", "dur_ns", "pid", "tid").sort("ts_ns")
    return pl.DataFrame(schema={"name": pl.String, "ts_ns": pl.Int64, "dur_ns": pl.Int64,
                                "pid": pl.Int64, "tid": pl.Int64})  # fmt: skip


def _window(ranges: pl.DataFrame, label: str) -> PathWindow:
    ends = ranges["ts_ns"] + ranges["dur_ns"]
    first = ranges.row(0, named=True)
    return PathWindow(
        start_ns=first["ts_ns"],
        host_end_ns=int(ends.to_numpy().max()),
        thread=(first["pid"], first["tid"]),
        label=label,
    )


def _of_everything(trace: Trace, host: HostEvents) -> PathWindow:
    times = [
        table.select(start="ts_ns", end=pl.col("ts_ns") + pl.col("dur_ns"))
        for table in (trace.ops, trace.runtime, trace.gpu)
    ]
    spans = pl.concat(times)
    if spans.is_empty():
        raise MissingDataError(f"{trace.path}: no operators, calls or GPU events in it")
    thread = host.busiest_thread()
    on_thread = host.frame.filter(
        pl.col("pid").eq_missing(thread[0])
        & pl.col("tid").eq_missing(thread[1])
        & ~pl.col("is_mark")
    )
    ends = (on_thread["ts_ns"] + on_thread["dur_ns"]).to_numpy()
    start = int(spans["start"].to_numpy().min())
    return PathWindow(
        start_ns=start,
        host_end_ns=int(ends.max()) if len(ends) else start,
        thread=thread,
        label="the whole trace",
    )
