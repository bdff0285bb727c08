"""The replayed part of a trace: its steps, the host's activity in them, and the main thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.dependencies.host_events import HostEvents
from haiprof.trace_analysis.dependencies.thread_handovers import HandOvers, hand_overs
from haiprof.trace_format.kineto.rank_trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWindow:
    """The part of a rank's trace that is replayed."""

    begin_ns: int
    end_ns: int
    main_tid: int
    """The thread that trains."""
    bounds_ns: Ints
    """When each profiler step begins and the last one ends; of the whole window where there are
    none."""
    spans: pl.DataFrame
    """Operators and runtime calls that begin in it: `name`, `tid`, `ts_ns`, `end_ns` (at most the
    window's), `correlation` of calls."""
    handed: tuple[HandOvers, ...]
    """Waits of its threads for each other."""

    @property
    def step_count(self) -> int:
        """Profiler steps in it; 1 where there are none."""
        return len(self.bounds_ns) - 1


def replay_window(trace: Trace, steps: tuple[int, int] | None) -> ReplayWindow:
    """The window of some steps."""
    spans = _spans(trace)
    if not spans.height:
        raise MissingDataError(
            f"{trace.path}: no operators or runtime calls to replay",
            hint="profile with ProfilerActivity.CPU",
        )
    host = HostEvents(trace)
    marks = trace.steps
    if steps is not None:
        marks = marks.filter(pl.col("step").is_between(*steps, closed="left"))
        if not marks.height:
            raise MissingDataError(f"{trace.path}: no profiler step from {steps[0]} to {steps[1]}")
    if marks.height:
        begin, end, tid = (
            _edge(marks, "start_ns", "min"),
            _edge(marks, "end_ns", "max"),
            marks["tid"][0],
        )
    else:
        begin, end, tid = (
            _edge(spans, "ts_ns", "min"),
            _edge(spans, "end_ns", "max"),
            host.busiest_thread()[1],
        )
    inside = spans.filter(pl.col("ts_ns").is_between(begin, end)).with_columns(
        end_ns=pl.min_horizontal("end_ns", pl.lit(end))
    )
    return ReplayWindow(
        begin_ns=begin,
        end_ns=end,
        main_tid=tid,
        bounds_ns=np.append(marks["start_ns"].sort().to_numpy() if marks.height else begin, end),
        spans=inside,
        handed=_find_waits(host, tid, (begin, end)),
    )


def _find_waits(host: HostEvents, main_tid: int, window: tuple[int, int]) -> tuple[HandOvers, ...]:
    """Hand-overs of which both sides are in the window."""
    main = [thread for thread in host.threads if thread[1] == main_tid]
    return tuple(found.within(*window) for found in hand_overs(host, main[0]))


def _spans(trace: Trace) -> pl.DataFrame:
    end = (pl.col("ts_ns") + pl.col("dur_ns")).alias("end_ns")
    columns = (pl.col("name").cast(pl.String), "tid", "ts_ns", end)
    calls = trace.runtime.select(*columns, "correlation")
    both = pl.concat([trace.ops.select(*columns), calls], how="diagonal")
    return both.drop_nulls("tid").sort("ts_ns", maintain_order=True)


def _edge(frame: pl.DataFrame, column: str, which: str) -> int:
    return int(getattr(frame[column], which)())
