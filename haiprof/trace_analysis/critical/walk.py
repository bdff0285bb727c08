"""The longest path of a window, found from its end back to its start, in integer nanoseconds.

An event starts, and a wait ends, when its last dependency is done. Following that last dependency
backwards leaves no wait on the path: of all chains of events it has the most work and the least
waiting, and it covers the window. The last dependency of every event is computed on whole arrays;
only the changes between threads and streams take steps of a Python loop.

Source: the critical path of C. Q. Yang and B. P. Miller, "Critical path analysis for the execution
of parallel and distributed programs", ICDCS 1988, found backwards as by D. Boehme et al.,
"Scalable critical-path based performance analysis", IPDPS 2012.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.critical.device import (
    HOST,
    INFERRED,
    LAUNCH,
    STREAM,
    Causes,
)
from haiprof.trace_analysis.critical.waits import Joins
from haiprof.trace_analysis.dependencies.device_events import DeviceEvents
from haiprof.trace_analysis.dependencies.host_events import HostEvents

ON_HOST, RETURN, HAND_OVER, ON_GPU, DELAY = range(5)
"""Kinds of segments: a thread works; a blocking call returns; one thread starts another; a GPU
event runs; the delay between a GPU event's last dependency and its start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretches:
    """The path in order, without gaps; shapes (n,)."""

    kind: Ints
    where: Ints
    """ON_HOST and HAND_OVER: the thread's number; RETURN: the call's row; else the GPU event."""
    starts: Ints
    ends: Ints
    jumps: int
    """Changes between threads and streams."""
    assumed: int
    """Changes that were inferred."""


@dataclass(slots=True)
class _Walk:
    """Collects the path's chunks, from the end backwards."""

    start_ns: int
    chunks: list[tuple[Ints, Ints, Ints, Ints]] = field(default_factory=list)
    jumps: int = 0
    assumed: int = 0

    def add(self, kind: int, where: int, start: int, end: int) -> None:
        """Adds one segment."""
        self.chunks.append(tuple(np.array([v], dtype=np.int64)  # type: ignore[arg-type]
                                 for v in (kind, where, start, end)))  # fmt: skip

    def jump(self, *, assumed: bool) -> None:
        """Counts a change between threads and streams."""
        self.jumps += 1
        self.assumed += assumed

    def finish(self) -> Stretches:
        """In order of time, cut to the window, without empty ones."""
        parts = [np.concatenate(column) for column in zip(*reversed(self.chunks), strict=True)]
        kind, where, starts, ends = parts
        starts = np.maximum(starts, self.start_ns)
        real = ends > starts
        return Stretches(
            kind=kind[real], where=where[real], starts=starts[real], ends=ends[real],
            jumps=self.jumps, assumed=self.assumed,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runs:
    """GPU events by stream; in a run each event waited for the one before it on the stream."""

    order: Ints
    position: Ints
    """Position of each event in `order`."""
    head: Ints
    """Position of the first event of each position's run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The dependencies of a window."""

    host: HostEvents
    gpu: DeviceEvents
    causes: Causes
    joins: dict[int, Joins]
    main: int
    """Number of the window's thread."""


def longest_path(graph: Graph, start_ns: int, end_ns: int, end_row: int) -> Stretches:
    """The critical path of a window."""
    walk, runs = _Walk(start_ns), _runs(graph)
    used: set[tuple[int, int]] = set()
    thread, row, now = (graph.main, -1, end_ns) if end_row < 0 else (-1, end_row, end_ns)
    while now > start_ns:
        if row >= 0:
            thread, row, now = _along_stream(graph, runs, walk, used, row, now)
        else:
            thread, row, now = _along_thread(graph, walk, used, thread, now)
    return walk.finish()


def _runs(graph: Graph) -> _Runs:
    gpu, found = graph.gpu, graph.causes
    order = np.lexsort((np.arange(len(gpu.line)), gpu.line))
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    before = np.append(-1, order[:-1])[: len(order)]
    follows = (found.why[order] == STREAM) & (found.row[order] == before)
    head = np.maximum.accumulate(np.where(follows, 0, np.arange(len(order))))
    return _Runs(order=order, position=position, head=head)


def _along_stream(
    graph: Graph, runs: _Runs, walk: _Walk, used: set[tuple[int, int]], row: int, now: int
) -> tuple[int, int, int]:
    """Follows a run of GPU events back to what its first event waited for."""
    gpu, found = graph.gpu, graph.causes
    at = int(runs.position[row])
    first = int(runs.head[at])
    rows = runs.order[first : at + 1]
    begun = int(np.searchsorted(gpu.starts[rows], walk.start_ns, side="right")) - 1
    rows = rows[max(begun, 0) :]  # nothing before the window
    ends = np.append(found.time[rows[1:]], now)
    begins = np.minimum(gpu.starts[rows], now)
    _add_run(walk, rows, begins, ends)
    head, now = int(rows[0]), int(begins[0])
    if now <= walk.start_ns:
        return -1, -1, walk.start_ns
    why, cause, time = int(found.why[head]), int(found.row[head]), int(found.time[head])
    if why == HOST or (-2, head) in used:  # the second visit at one time: contradictory timestamps
        walk.jump(assumed=True)
        return graph.main, -1, now
    used.add((-2, head))
    walk.add(DELAY, head, time, now)
    walk.jump(assumed=why == INFERRED)
    if why == LAUNCH:
        return int(graph.host.thread_of_row[graph.host.row_of_call[cause]]), -1, time
    return -1, cause, time


def _add_run(walk: _Walk, rows: Ints, starts: Ints, ends: Ints) -> None:
    """The events of a run and the delays between them."""
    count = len(rows)
    kind, where = np.empty(2 * count - 1, np.int64), np.empty(2 * count - 1, np.int64)
    begin, end = np.empty(2 * count - 1, np.int64), np.empty(2 * count - 1, np.int64)
    kind[::2], where[::2], begin[::2], end[::2] = ON_GPU, rows, starts, ends
    kind[1::2], where[1::2] = DELAY, rows[1:]
    begin[1::2], end[1::2] = ends[:-1], starts[1:]
    walk.chunks.append((kind, where, begin, end))


def _along_thread(
    graph: Graph, walk: _Walk, used: set[tuple[int, int]], thread: int, now: int
) -> tuple[int, int, int]:
    """Follows a host thread back to the last point at which it had waited."""
    joins = graph.joins.get(thread)
    at = -1 if joins is None else int(np.searchsorted(joins.time, now, side="right")) - 1
    while at >= 0 and (thread, at) in used:
        at -= 1
    if joins is None or at < 0 or joins.time[at] <= walk.start_ns:
        walk.add(ON_HOST, thread, walk.start_ns, now)
        return -1, -1, walk.start_ns
    used.add((thread, at))
    went_on, cause = int(joins.time[at]), int(joins.cause_time[at])
    walk.add(ON_HOST, thread, went_on, now)
    call = int(joins.call_row[at])
    walk.add(RETURN if call >= 0 else HAND_OVER, call if call >= 0 else thread, cause, went_on)
    walk.jump(assumed=bool(joins.assumed[at]))
    return int(joins.thread[at]), int(joins.gpu_row[at]), cause
