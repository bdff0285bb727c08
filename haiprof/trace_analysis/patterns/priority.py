"""Bottleneck ratio: the share of a window in which a function ran and nothing above it did."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, covered_lengths, difference, union
from haiprof.trace_analysis.temporal import Steps, step_window
from haiprof.trace_format.kineto.rank_trace import Trace


class PatternWindow(NamedTuple):
    """The window of function patterns, in ns on the trace's clock."""

    start: int
    end: int


class Spans(NamedTuple):
    """Calls of one kind inside a window."""

    code: Ints
    """Of the function, from 0; shape (n,)."""
    starts: Ints
    """ns, not before the window."""
    ends: Ints
    """ns, not after the window."""


def pattern_window(trace: Trace, steps: Steps) -> PatternWindow:
    """The profiler steps that were asked for, or everything from the first to the last event."""
    if steps is not None:
        return PatternWindow(*step_window(trace, steps))
    tables = (trace.gpu, trace.runtime, trace.ops, trace.python, trace.annotations)
    ends = [(table["ts_ns"] + table["dur_ns"]).to_numpy().max() for table in tables if len(table)]
    if not ends:
        raise MissingDataError(f"{trace.path}: no event with a time in it")
    return PatternWindow(min(int(table["ts_ns"].to_numpy()[0]) for table in tables if len(table)),
                  int(max(ends)))  # fmt: skip


def inside(events: pl.DataFrame, code: Ints, window: PatternWindow) -> Spans:
    """Events cut to a window; those outside of it are left out."""
    starts = events["ts_ns"].to_numpy()
    ends = np.minimum(starts + events["dur_ns"].to_numpy(), window.end)
    starts = np.maximum(starts, window.start)
    real = ends > starts
    return Spans(code[real], starts[real], ends[real])


def busy(spans: Spans) -> Intervals:
    """When any of them ran."""
    return union(spans.starts, spans.ends)


def free_below(window: PatternWindow, higher: Intervals) -> Intervals:
    """The part of a window that is left for the kinds below."""
    whole = Intervals(np.array([window.start]), np.array([window.end]))
    return difference(whole, higher)


def join_spans(left: Intervals, right: Intervals) -> Intervals:
    """The time that either covers."""
    return union(np.append(left.starts, right.starts), np.append(left.ends, right.ends))


def function_times(spans: Spans, free: Intervals, count: int) -> tuple[Ints, Ints]:
    """How long each function ran, and how long with no kind above it.

    `covered_ns` and `bottleneck_ns`, shape (count,). Calls of one function at the same time
    count once; of two functions of one kind at the same time, both count.
    """
    length, own = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    if not len(spans.starts):
        return length, own
    base = int(spans.starts.min())
    stride = int(spans.ends.max()) - base + 1  # a lane of its own for each function
    lane = spans.code * stride
    merged = union(spans.starts - base + lane, spans.ends - base + lane)
    code = merged.starts // stride
    starts, ends = merged.starts - code * stride + base, merged.ends - code * stride + base
    np.add.at(length, code, ends - starts)
    np.add.at(own, code, covered_lengths(free, starts, ends))
    return length, own


def kind_ns(spans: Intervals, free: Intervals) -> int:
    """How long a whole kind ran with nothing above it."""
    return int(covered_lengths(free, spans.starts, spans.ends).sum()) if len(spans.starts) else 0
