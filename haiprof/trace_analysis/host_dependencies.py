"""Host activity by thread, and work that one thread leaves to another and waits for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints
from haiprof.trace_analysis.call_tree import CallTree, nest, thread_numbers
from haiprof.trace_analysis.device_dependencies import NEVER
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import Trace

LONG_GAP_NS = 1_000_000
"""A thread that was idle for longer began again because of another one. Source: Chakra's
trace_linker, enforce_inter_thread_order, threshold 1000 us."""
AUTOGRAD = r"^autograd::engine|AccumulateGrad|Backward\d*$"
"""Operators of backward passes; before 2021 only the functions themselves were recorded."""
Thread = tuple[int, int]
"""pid and tid."""


class HostEvents:
    """Operators, runtime calls and annotations of a trace on their threads."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    @property
    def frame(self) -> pl.DataFrame:
        """By thread and start, a parent before its children; `is_mark` of annotations."""
        return self.tree.spans

    @cached_property
    def tree(self) -> CallTree:
        """Nesting of all of them."""
        kept = ["event", "name", "category", "ts_ns", "dur_ns", "pid", "tid"]
        marks = self._trace.host_ranges
        call = pl.int_range(pl.len(), dtype=pl.Int64)
        parts = [
            marks.select(*kept, is_mark=True),
            self._trace.ops.select(*kept, is_mark=False),
            self._trace.runtime.select(*kept, is_mark=False, call=call),
        ]
        return nest(pl.concat(parts, how="diagonal"))

    @cached_property
    def row_of_call(self) -> Ints:
        """The row of `frame` of each call in `Trace.runtime`."""
        calls = self.frame["call"]
        found = np.empty(len(calls) - calls.null_count(), dtype=np.int64)
        rows = np.flatnonzero(calls.is_not_null().to_numpy())
        found[calls.drop_nulls().to_numpy()] = rows
        return found

    @cached_property
    def threads(self) -> list[Thread]:
        """Process and thread id of each thread; its place is the thread's number."""
        return self.frame.select("pid", "tid").unique(maintain_order=True).rows()

    @cached_property
    def thread_of_row(self) -> Ints:
        """Number of the thread of each row of `frame`."""
        return thread_numbers(self.frame)

    @cached_property
    def backward_threads(self) -> list[tuple[Thread, Thread | None]]:
        """Threads that ran gradients of operators of another thread, and that one.

        Known by the sequence numbers that PyTorch gives an operator and its gradient, where the
        gradient names a forward thread; else by the arrows of category `fwdbwd`; else by the names
        of their operators alone: then the other thread is not known.
        """
        ops, arrows = self._trace.ops, self._trace.links
        numbered = ops.filter(pl.col("sequence_number") >= 0)
        gradients = numbered.filter(pl.col("forward_tid") > 0)
        ahead = numbered.filter(pl.col("forward_tid").fill_null(0) <= 0)
        heads, tails = (arrows.filter(pl.col("phase") == phase) for phase in ("f", "s"))
        found = _pairs(gradients, ahead, "sequence_number") or _pairs(heads, tails, "id")
        if found or not gradients.is_empty():
            return found
        named = ops.filter(pl.col("name").cast(pl.String).str.contains(AUTOGRAD))
        threads = named.select("pid", "tid").drop_nulls().unique().sort("pid", "tid")
        return [(thread, None) for thread in threads.rows()]

    def rows_of(self, thread: int) -> slice:
        """The rows of `frame` of a thread, by its number."""
        first, last = np.searchsorted(self.thread_of_row, [thread, thread + 1])
        return slice(int(first), int(last))

    def work_of(self, thread: Thread) -> tuple[Ints, Ints]:
        """Starts and ends of a thread's operators and calls, one before those inside it."""
        if thread not in self.threads:  # arrows may lead where nothing ran
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        rows = self.rows_of(self.threads.index(thread))
        is_work = ~self.frame["is_mark"][rows].to_numpy()
        return self.tree.starts[rows][is_work], self.tree.ends[rows][is_work]

    def rows_named(self, pattern: str) -> Ints:
        """Rows of `frame` with a name that matches a regular expression."""
        return np.flatnonzero(self.frame.select(has_name(self.frame, pattern)).to_series())

    def number_of(self, thread: Thread) -> int:
        """The number of a thread; -1 of one on which nothing ran."""
        return self.threads.index(thread) if thread in self.threads else -1

    def busiest_thread(self) -> Thread:
        """The thread with most operators and calls that is not one of backward passes."""
        counts = self.frame.filter(~pl.col("is_mark")).group_by("pid", "tid").len()
        if counts.is_empty():
            return (0, 0)
        backward = {thread for thread, _ in self.backward_threads}
        ranked = counts.sort("len", "pid", "tid", descending=[True, False, False]).rows()
        forward = [(pid, tid) for pid, tid, _ in ranked if (pid, tid) not in backward]
        return forward[0] if forward else (ranked[0][0], ranked[0][1])


def _pairs(
    later: pl.DataFrame, earlier: pl.DataFrame, key: str
) -> list[tuple[Thread, Thread | None]]:
    """For each thread of the later ones, the thread that shares most keys with it."""
    ids = ["pid", "tid", key]
    shared = later.select(ids).unique().join(earlier.select(ids).unique(), on=key, suffix="_of")
    other = (pl.col("pid") != pl.col("pid_of")) | (pl.col("tid") != pl.col("tid_of"))
    counts = shared.filter(other).group_by("pid", "tid", "pid_of", "tid_of").len()
    best = counts.sort("len", "pid_of", "tid_of", descending=[True, False, False])
    return [
        ((pid, tid), (pid_of, tid_of))
        for pid, tid, pid_of, tid_of, _ in best.unique(["pid", "tid"], keep="first").rows()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOvers:
    """When a thread waited for another one; arrays of one length, by time, in ns."""

    waiting: Thread
    working: Thread
    left: Ints
    """The last thing that the waiting thread did before."""
    rested: Ints
    """When the working thread was done with what it did before; NEVER where it did nothing."""
    began: Ints
    """When it began the next thing; before `left` where it was at work as the other one left."""
    ended: Ints
    """When it was done, by `back`."""
    back: Ints
    """The next thing that the waiting thread did."""

    @property
    def was_idle(self) -> Bools:
        """Whether the working thread was idle until the other one left it something to do."""
        return self.began >= self.left

    def within(self, begin: int, end: int) -> HandOvers:
        """Those of which all lies in a window."""
        kept = (self.left >= begin) & (self.back <= end)
        names = ("left", "rested", "began", "ended", "back")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


def hand_overs(host: HostEvents, main: Thread) -> list[HandOvers]:
    """Backward passes on threads of the autograd engine, for which another thread waits.

    The thread that calls `backward()` does nothing until the engine's thread is done, and mostly it
    ran the forward pass too; else (in nn.DataParallel each device has a thread for that) the main
    thread does. What the engine runs on the calling thread itself, as gradients on the CPU, is work
    of that thread.
    """
    found = []
    for backward, forward in host.backward_threads:
        for waiting in dict.fromkeys((forward or main, main)):
            waits = _waits(host, waiting, backward)
            if waiting != backward and len(waits.left):
                found.append(waits)
                break
    return found


def _waits(host: HostEvents, waiting: Thread, working: Thread) -> HandOvers:
    """Pauses of a thread in which another one was done with something.

    In a pause the thread begins and ends nothing, and is in no operator that calls no other one: in
    such a one it works. Of the working thread the outermost operators count.
    """
    left, back = _pauses(*host.work_of(waiting))
    starts, ends = host.work_of(working)
    reach = np.maximum.accumulate(ends)
    outermost = np.append(True, starts[1:] >= reach[:-1])[: len(starts)]
    starts, reach = starts[outermost], reach[np.append(outermost[1:], True)[: len(starts)]]
    before = np.searchsorted(reach, left, side="right") - 1
    last = np.searchsorted(reach, back, side="right") - 1
    held = last > before
    before, last = before[held], last[held]
    return HandOvers(
        waiting=waiting,
        working=working,
        left=left[held],
        rested=np.where(before >= 0, reach[before], NEVER),
        began=starts[before + 1],
        ended=reach[last],
        back=back[held],
    )


def _pauses(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Gaps between neighbouring starts and ends in which no innermost operator runs."""
    times = np.unique(np.concatenate([starts, ends]))
    calls_another = np.append(starts[1:] < ends[:-1], False) & np.append(
        ends[1:] <= ends[:-1], False
    )
    busy = np.zeros(len(times), dtype=np.bool_)
    busy[np.searchsorted(times, starts[~calls_another[: len(starts)]])] = True
    idle = np.flatnonzero(~busy[:-1])
    return times[idle], times[idle + 1]
