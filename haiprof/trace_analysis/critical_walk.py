"""The longest path of a window, found backwards from its end: what each event waited for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Bools, Ints, covered_lengths, total, union
from haiprof.trace_analysis.dependencies import (
    LONG_GAP_NS,
    NEVER,
    QUEUE,
    USUAL_DELAY_NS,
    WAIT_CALL,
    DeviceEvents,
    HostEvents,
    Pairs,
    Thread,
    hand_overs,
    host_waits,
    recorded_waits,
    stream_order,
)
from haiprof.trace_analysis.device_time import union_of
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BLOCKING, FREE

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
    if annotation is not None:
        return _of_annotation(trace, annotation, instance)
    if steps is None:
        return _of_everything(trace, host)
    marks = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    if marks.is_empty():
        known = trace.steps["step"].to_list()
        hint = "it has no steps: call the profiler's step(), or ask for the whole trace"
        if known:
            hint = f"it has the steps {min(known)} to {max(known)}"
        raise MissingDataError(f"{trace.path}: no profiler step in {steps}", hint=hint)
    first, after_last = steps
    ranges = _ranges(trace, "ProfilerStep#").unique("ts_ns", keep="first")
    own = ranges.join(marks.select(ts_ns="start_ns"), on="ts_ns", how="semi")
    return _window(own, f"profiler steps {first} to {after_last - 1}")


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
    for table in (trace.host_ranges, trace.ops):
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
    if trace.checked.window is None:
        raise MissingDataError(f"{trace.path}: no operators, calls or GPU events in it")
    start = trace.checked.window[0]
    thread = host.busiest_thread()
    on_thread = host.frame.filter(
        pl.col("pid").eq_missing(thread[0])
        & pl.col("tid").eq_missing(thread[1])
        & ~pl.col("is_mark")
    )
    ends = (on_thread["ts_ns"] + on_thread["dur_ns"]).to_numpy()
    end = int(ends.max()) if len(ends) else start
    return PathWindow(
        start_ns=start,
        host_end_ns=end if trace.gpu.is_empty() else min(end, _last_gpu_end(trace, end)),
        thread=thread,
        label="from the first to the last event",
    )


def _last_gpu_end(trace: Trace, otherwise: int) -> int:
    """When a busy GPU is done, where the host neither waits for it nor begins more."""
    end = int((trace.gpu["ts_ns"] + trace.gpu["dur_ns"]).max())  # type: ignore[arg-type]
    calls = trace.runtime.filter(pl.col("ts_ns") + pl.col("dur_ns") >= end)
    waits = calls["name"].cast(pl.String).str.contains(f"{BLOCKING}|{FREE}").any()
    begins = any((table["ts_ns"] >= end).any() for table in (trace.ops, trace.runtime))
    idle = 2 * total(union_of(trace.gpu)) < end - int(trace.gpu["ts_ns"][0])
    return otherwise if waits or begins or idle else end


LAUNCH, STREAM, EVENT, INFERRED, HOST = range(5)
"""Why an event began when it did: its launch; the event before it on its stream; another stream's
event, by a recorded wait or assumed; the host, by a launch that is not in the trace.
"""
_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The last thing that each GPU event waited for."""

    why: Ints
    """LAUNCH, STREAM, EVENT, INFERRED or HOST."""
    row: Ints
    """The GPU event; of a launch, its call in `Trace.runtime`; -1 for HOST."""
    time: Ints
    """When that ended, at most the start of the waiting event."""


def causes(gpu: DeviceEvents) -> Causes:
    """What each GPU event waited for last: only that decided when it could start."""
    count = len(gpu.starts)
    why = np.full(count, HOST, dtype=np.int64)
    row = np.full(count, -1, dtype=np.int64)
    time = gpu.starts.copy()
    best = np.full(count, NEVER, dtype=np.int64)
    # Of a launch the start of the call counts, as in HTA; of an unusually long one its end.
    begun = np.minimum(gpu.launched, gpu.starts)
    done = np.minimum(np.append(gpu.calls.ends, 0)[gpu.call], gpu.starts)
    for kind, (found_row, found_time) in (
        (LAUNCH, (gpu.call, np.where(done - begun > USUAL_DELAY_NS, done, begun))),
        (STREAM, _by_pairs(gpu, stream_order(gpu))),
        (EVENT, _by_pairs(gpu, recorded_waits(gpu))),
    ):
        better = (found_row >= 0) & (found_time >= best)
        why[better], row[better], best[better] = kind, found_row[better], found_time[better]
    unknown = ~gpu.known & (gpu.starts - np.maximum(best, gpu.starts.min(initial=0))
                             > USUAL_DELAY_NS)  # fmt: skip
    why[unknown], row[unknown] = HOST, -1
    best[unknown] = gpu.starts[unknown]
    inferred_row = _infer_waits(gpu, best, why)
    some = inferred_row >= 0
    why[some], row[some], best[some] = INFERRED, inferred_row[some], gpu.ends[inferred_row[some]]
    known = row >= 0
    time[known] = best[known]
    return Causes(why=why, row=row, time=time)


def _by_pairs(gpu: DeviceEvents, pairs: Pairs) -> tuple[Ints, Ints]:
    """Of the events that each one waited for, the one that ended last; at most at its start."""
    earlier, later = pairs
    row = np.full(len(gpu.starts), -1, dtype=np.int64)
    order = np.argsort(gpu.ends[earlier], kind="stable")  # the latest is written last
    row[later[order]] = earlier[order]
    return row, np.minimum(gpu.ends[row], gpu.starts) if len(row) else row


def _infer_waits(gpu: DeviceEvents, best: Ints, why: Ints) -> Ints:
    """Another stream's event that ended just before a waiting one began.

    Assumed where the launching thread called cudaStreamWaitEvent since the stream's last launch
    and no sync events are recorded, where both are of one CUDA graph, or where the event began
    unusually late and just after it (that need not be an order: it may have waited for room).
    """
    late = gpu.starts - best > USUAL_DELAY_NS
    told = np.zeros_like(late) if gpu.trace.sync.height else _wait_called(gpu)
    correlation = gpu.frame["correlation"].fill_null(-1)
    graph = (correlation.is_duplicated() & (correlation > 0)).to_numpy()
    looking = np.flatnonzero((late | told | graph) & (why != EVENT) & (why != HOST))
    found = np.full(len(gpu.starts), -1, dtype=np.int64)
    by_end = np.argsort(gpu.ends, kind="stable")
    at = np.searchsorted(gpu.ends[by_end], gpu.starts[looking], side="right") - 1
    floor = np.where(told, best, np.maximum(best, gpu.starts - USUAL_DELAY_NS))
    only_graph = graph & ~late & ~told
    numbers = correlation.to_numpy()
    for _ in range(_TRIES):
        good = at >= 0
        looking, at = looking[good], at[good]
        other = by_end[at]
        real = (gpu.line[other] != gpu.line[looking]) & (gpu.device[other] == gpu.device[looking])
        real &= (gpu.ends[other] > floor[looking]) & (gpu.starts[other] < gpu.starts[looking])
        real &= ~told[looking] | (gpu.launched[other] <= gpu.launched[looking])
        real &= ~only_graph[looking] | (numbers[other] == numbers[looking])
        found[looking[real]] = other[real]
        going = ~real & (gpu.ends[other] > floor[looking])
        looking, at = looking[going], at[going] - 1
    return found


def _wait_called(gpu: DeviceEvents) -> Bools:
    """Whether the launching thread made its stream wait since the stream's launch before."""
    calls, waits = gpu.calls, gpu.calls.find(WAIT_CALL)
    told = np.zeros(len(gpu.starts), dtype=np.bool_)
    before = np.full(len(gpu.starts), NEVER, dtype=np.int64)
    for line in gpu.lines():
        own = gpu.launch_order(line)
        before[own[1:]] = gpu.launched[own[:-1]]
    launched = np.flatnonzero(gpu.known)
    for thread in np.unique(calls.thread[waits]):
        times = calls.starts[waits[calls.thread[waits] == thread]]
        own = launched[calls.thread[gpu.call[launched]] == thread]
        last = np.searchsorted(times, gpu.launched[own], side="right") - 1
        told[own] = (last >= 0) & (times[np.maximum(last, 0)] > before[own])
    return told


NOTHING: Ints = np.empty(0, dtype=np.int64)


_JOINS = {
    "of": pl.Int64, "time": pl.Int64, "cause_time": pl.Int64, "gpu_row": pl.Int64,
    "thread": pl.Int64, "call_row": pl.Int64, "assumed": pl.Boolean,
}  # fmt: skip
"""Points at which a host thread (`of`, its number) resumed because something else had finished:
when it resumed and when that finished, in ns; the GPU event, or the number of the other thread, -1
where it was the other of these; the row of the call that waited, or -1; whether it was inferred,
not recorded."""


def joins_by_thread(host: HostEvents, gpu: DeviceEvents, main: int) -> dict[int, pl.DataFrame]:
    """The joins of each thread by time, by its number; columns of `_JOINS`."""
    found = chain(_blocking_calls(host, gpu), _between_threads(host, main))
    parts = [pl.DataFrame(schema=_JOINS), *(part.select(list(_JOINS)) for part in found)]
    ordered = pl.concat(parts).sort("of", "time", "cause_time", maintain_order=True)
    return {int(rows["of"][0]): rows for rows in ordered.partition_by("of")}


def _blocking_calls(host: HostEvents, gpu: DeviceEvents) -> Iterator[pl.DataFrame]:
    """Calls that returned when a GPU event had ended within them."""
    for why, call, event, assumed in host_waits(gpu):
        starts, ends = gpu.calls.starts[call], gpu.calls.ends[call]
        cause = np.minimum(gpu.ends[event], ends)
        waited = (event >= 0) & (cause > starts)
        waited &= (why != QUEUE) | (ends - starts > USUAL_DELAY_NS)
        rows = host.row_of_call[call[waited]]
        yield pl.DataFrame({
            "of": host.thread_of_row[rows], "time": ends[waited], "cause_time": cause[waited],
            "gpu_row": event[waited], "thread": np.full(len(rows), -1), "call_row": rows,
            "assumed": assumed[waited],
        })  # fmt: skip


def _between_threads(host: HostEvents, main: int) -> Iterator[pl.DataFrame]:
    """Hand-overs to and from threads of backward passes, and threads woken after a pause."""
    held = [union(NOTHING, NOTHING)] * len(host.threads)
    for found in hand_overs(host, host.threads[main]) if main >= 0 else ():
        waiting, working = host.number_of(found.waiting), host.number_of(found.working)
        held[working] = union(found.left, found.back)
        began, left = found.began[found.was_idle], found.left[found.was_idle]
        yield _hand_over(waiting, found.back, found.ended, working, assumed=False)
        yield _hand_over(working, began, left, waiting, assumed=False)
    for number, thread in enumerate(host.threads):
        if number != main:
            # It begins, or goes on after a long pause: assumed to be woken by the main one.
            starts, ends = host.work_of(thread)
            gaps = starts[1:] - np.maximum.accumulate(ends)[:-1]
            starts = starts[np.append(True, gaps > LONG_GAP_NS)[: len(starts)]]
            starts = starts[covered_lengths(held[number], starts, starts + 1) == 0]
            yield _hand_over(number, starts, starts, main, assumed=True)


def _hand_over(
    of: int, time: Ints, cause_time: Ints, thread: int, *, assumed: bool
) -> pl.DataFrame:
    same = {"of": of, "gpu_row": -1, "thread": thread, "call_row": -1}
    return pl.DataFrame({"time": time, "cause_time": cause_time}).with_columns(
        **{name: pl.lit(value, pl.Int64) for name, value in same.items()}, assumed=pl.lit(assumed)
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """The dependencies of a window."""

    host: HostEvents
    gpu: DeviceEvents
    causes: Causes
    joins: dict[int, pl.DataFrame]
    """As `joins_by_thread` has them."""
    main: int
    """Number of the window's thread."""


def longest_path(graph: Graph, start_ns: int, end_ns: int, end_row: int) -> Stretches:
    """The critical path of a window."""
    gpu, found = graph.gpu, graph.causes
    # GPU events by stream; in a run each event waited for the one before it on the stream.
    order = np.lexsort((np.arange(len(gpu.line)), gpu.line))
    position = np.empty(len(order), dtype=np.int64)
    position[order] = np.arange(len(order))
    before = np.append(-1, order[:-1])[: len(order)]
    follows = (found.why[order] == STREAM) & (found.row[order] == before)
    head = np.maximum.accumulate(np.where(follows, 0, np.arange(len(order))))
    walk = _Walk(graph=graph, start_ns=start_ns, order=order, position=position, head=head)
    thread, row, now = (graph.main, -1, end_ns) if end_row < 0 else (-1, end_row, end_ns)
    while now > start_ns:
        thread, row, now = (
            walk.along_stream(row, now) if row >= 0 else walk.along_thread(thread, now)
        )
    return walk.finish()


@dataclass(slots=True, kw_only=True)
class _Walk:
    """Collects the path's chunks, from the end backwards."""

    graph: Graph
    start_ns: int
    order: Ints
    position: Ints
    """Position of each event in `order`."""
    head: Ints
    """Position of the first event of each position's run."""
    chunks: list[tuple[Ints, Ints, Ints, Ints]] = field(default_factory=list)
    used: set[tuple[int, int]] = field(default_factory=set)
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

    def along_stream(self, row: int, now: int) -> tuple[int, int, int]:
        """Follows a run of GPU events back to what its first event waited for."""
        gpu, found = self.graph.gpu, self.graph.causes
        at = int(self.position[row])
        rows = self.order[int(self.head[at]) : at + 1]
        begun = int(np.searchsorted(gpu.starts[rows], self.start_ns, side="right")) - 1
        rows = rows[max(begun, 0) :]  # nothing before the window
        ends = np.append(found.time[rows[1:]], now)
        begins = np.minimum(gpu.starts[rows], now)
        # The events of the run, and the delays between them.
        kind, where, begin, end = np.empty((4, 2 * len(rows) - 1), np.int64)
        kind[::2], where[::2], begin[::2], end[::2] = ON_GPU, rows, begins, ends
        kind[1::2], where[1::2], begin[1::2], end[1::2] = DELAY, rows[1:], ends[:-1], begins[1:]
        self.chunks.append((kind, where, begin, end))
        first, now = int(rows[0]), int(begins[0])
        if now <= self.start_ns:
            return -1, -1, self.start_ns
        why, cause, time = int(found.why[first]), int(found.row[first]), int(found.time[first])
        if why == HOST or (-2, first) in self.used:  # at one time again: contradictory timestamps
            self.jump(assumed=True)
            return self.graph.main, -1, now
        self.used.add((-2, first))
        self.add(DELAY, first, time, now)
        self.jump(assumed=why == INFERRED)
        if why == LAUNCH:
            host = self.graph.host
            return int(host.thread_of_row[host.row_of_call[cause]]), -1, time
        return -1, cause, time

    def along_thread(self, thread: int, now: int) -> tuple[int, int, int]:
        """Follows a host thread back to the last point at which it had waited."""
        joins = self.graph.joins.get(thread)
        at = -1 if joins is None else joins["time"].search_sorted(now, "right") - 1
        while at >= 0 and (thread, at) in self.used:
            at -= 1
        if joins is None or at < 0 or joins["time"][at] <= self.start_ns:
            self.add(ON_HOST, thread, self.start_ns, now)
            return -1, -1, self.start_ns
        self.used.add((thread, at))
        _, went_on, cause, row, other, call, is_assumed = joins.row(at)
        self.add(ON_HOST, thread, went_on, now)
        self.add(RETURN if call >= 0 else HAND_OVER, call if call >= 0 else thread, cause, went_on)
        self.jump(assumed=is_assumed)
        return other, row, cause

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
