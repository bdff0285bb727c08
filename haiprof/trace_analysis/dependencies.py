"""What GPU events and host threads wait for: launches, streams, blocking calls, other threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints
from haiprof.trace_analysis.call_tree import CallTree, nest, thread_numbers
from haiprof.trace_analysis.device_time import COMMUNICATION, MEMORY, with_kind
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import COPY_SYNC, DEVICE_SYNC, FREE, STREAM_SYNC, TO_HOST

USUAL_DELAY_NS = 100_000
"""A kernel on a free stream starts sooner than this after its launch: in single-stream traces 99 %
start within 40 us. One that starts later was waiting."""
FULL_QUEUE = 1000
"""A launch with this many events before it waits for room: CUDA queues 1024 per stream."""
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCalls:
    """Calls of the CUDA or HIP runtime and driver; a number of a call is its row in `frame`."""

    frame: pl.DataFrame  # `Trace.runtime`
    starts: Ints
    ends: Ints
    thread: Ints  # a number per process and thread

    def find(self, pattern: str) -> Ints:
        """Calls with a name that matches a regular expression."""
        return np.flatnonzero(self.frame.select(has_name(self.frame, pattern)).to_series())


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvents:
    """GPU events by start, as arrays; a number of an event is its row in `frame`."""

    trace: Trace
    calls: RuntimeCalls
    frame: pl.DataFrame  # `Trace.gpu` with `kind` and the thread of the launch, `launch_tid`
    starts: Ints
    ends: Ints
    line: Ints  # a number per device and stream
    device: Ints
    call: Ints  # the launch call, in `calls`; -1 where it is not recorded
    launched: Ints
    """When the launch call began; see `device_events` for those that are not recorded."""
    known: Bools  # whether that is in the trace
    talks: Bools  # whether it is communication

    def take(self, rows: Ints) -> DeviceEvents:
        """Some of the events, in the given order."""
        others = ("trace", "calls", "frame")
        arrays = [field.name for field in fields(self) if field.name not in others]
        return replace(self, frame=self.frame[rows], **{n: getattr(self, n)[rows] for n in arrays})

    def lines(self) -> list[Ints]:
        """The events of each stream by their start."""
        order = np.argsort(self.line, kind="stable")
        parts = np.split(order, np.flatnonzero(np.diff(self.line[order])) + 1)
        return [part for part in parts if len(part)]

    def of_stream(self, device: int, stream: int) -> Ints:
        """The events of a stream, by launch; a negative device stands for any."""
        own = self.frame["stream"].fill_null(-1).to_numpy() == stream
        own &= (self.device == device) | (device < 0)
        return self.launch_order(np.flatnonzero(own))

    def launch_order(self, rows: Ints) -> Ints:
        """Events by their launch."""
        return rows[np.lexsort((rows, self.launched[rows]))]

    def last_to_end(self, ordered: Ints) -> Ints:
        """For each of some events in order, the one up to it that ends last."""
        ends = self.ends[ordered]
        latest = ends >= np.maximum.accumulate(ends)
        return ordered[np.maximum.accumulate(np.where(latest, np.arange(len(ordered)), 0))]

    def last_before(self, ordered: Ints, times: Ints) -> Ints:
        """Of events by launch, the one launched before each time that ends last; or -1."""
        count = np.searchsorted(self.launched[ordered], times)
        return np.append(self.last_to_end(ordered), -1)[count - 1]

    def latest_within(self, starts: Ints, ends: Ints) -> Ints:
        """The event that ended last within each call and was launched before it; or -1."""
        return self.last_to_end_by(ends, starts, lambda row, at: self.launched[row] < starts[at])

    def last_to_end_by(self, until: Ints, since: Ints, fits: Callable[[Ints, Ints], Bools]) -> Ints:
        """The event that ended last between two times of each, and of which `fits(event, place)`.

        -1 where there is none among the last few.
        """
        by_end = np.argsort(self.ends, kind="stable")
        found = np.full(len(until), -1, dtype=np.int64)
        looking = np.arange(len(until))
        at = np.searchsorted(self.ends[by_end], until, side="right") - 1
        for _ in range(_TRIES):
            row = by_end[np.maximum(at, 0)]
            inside = (at >= 0) & (self.ends[row] > since[looking])
            real = inside & fits(row, looking)
            found[looking[real]] = row[real]
            going = inside & ~real
            looking, at = looking[going], at[going] - 1
        return found


_TRIES = 8


def device_events(trace: Trace) -> DeviceEvents:
    """The GPU events of a trace with their launches: the first call of the same correlation."""
    calls = trace.runtime
    begun = calls["ts_ns"].to_numpy()
    named = calls.select(
        "correlation", "ts_ns", launch_tid="tid", call=pl.int_range(pl.len(), dtype=pl.Int64)
    )
    first = named.filter(pl.col("correlation") > 0).unique("correlation", keep="first")
    gpu = with_kind(trace.gpu).join(
        first.rename({"ts_ns": "launch_ns"}),
        on="correlation", how="left", maintain_order="left",
    )  # fmt: skip
    keys = gpu.select(pl.col("device", "stream").fill_null(-1))
    starts = gpu["ts_ns"].to_numpy()
    # A stream runs in order, so an event without a recorded launch has the latest of those before
    # it; else from before anything on the host began, which is the GPU without a host.
    tables = (trace.runtime, trace.host_ranges, trace.ops)
    first_ns = np.concatenate([table["ts_ns"].to_numpy() for table in tables]).min(
        initial=int(starts.min(initial=0))
    )
    own, streams = pl.col("launch_ns"), ("device", "stream")
    before = own.cum_max().forward_fill().over(streams).fill_null(int(first_ns) - 1)
    launched = gpu.select(
        pl.when(own.is_not_null()).then(own)
        .when(own.is_not_null().any().over(streams)).then(pl.min_horizontal(before, "ts_ns"))
        .otherwise("ts_ns")
    )  # fmt: skip
    return DeviceEvents(
        trace=trace,
        calls=RuntimeCalls(
            frame=calls, starts=begun, ends=begun + calls["dur_ns"].to_numpy(),
            thread=_numbers(calls.select("pid", "tid")),
        ),
        frame=gpu.drop("launch_ns", "call"),
        starts=starts,
        ends=starts + gpu["dur_ns"].to_numpy(),
        line=_numbers(keys),
        device=keys["device"].to_numpy(),
        call=gpu["call"].fill_null(-1).to_numpy(),
        launched=launched.to_series().to_numpy(),
        known=gpu["call"].is_not_null().to_numpy(),
        talks=(gpu["kind"] == COMMUNICATION).to_numpy(),
    )  # fmt: skip


def launches_around(gpu: DeviceEvents, rows: Ints) -> tuple[Ints, Ints]:
    """The event that each of some calls' thread launched last before it, and next; -1 for none."""
    calls = gpu.calls
    launched = gpu.launch_order(np.flatnonzero(gpu.call >= 0))
    threads = calls.thread[gpu.call[launched]]
    last, following = np.full((2, len(rows)), -1, dtype=np.int64)
    for thread in np.unique(calls.thread[rows]):
        of = np.flatnonzero(calls.thread[rows] == thread)
        own = launched[threads == thread]
        at = np.searchsorted(gpu.launched[own], calls.starts[rows[of]])
        last[of], following[of] = np.append(own, -1)[at - 1], np.append(own, -1)[at]
    return last, following


def _numbers(keys: pl.DataFrame) -> Ints:
    """A number of each row; equal rows have the same."""
    found: Ints = keys.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
    return found.astype(np.int64)


WAIT_CALL = r"^(?:cuda|cu|hip)StreamWaitEvent"
"""Calls that make a stream wait for another; they return at once."""
ROUNDING_NS = 1000
"""Old traces have whole microseconds: what waited may seem to begin so much too early."""
Pairs = tuple[Ints, Ints]  # edges: the events that end first, and those that wait for them


def stream_order(gpu: DeviceEvents) -> Pairs:
    """Each event and, of those before it on its stream, the one that ends last.

    They may overlap: programmatic dependent launch lets a kernel begin before that one has ended.
    """
    parts = [(gpu.last_to_end(own)[:-1], own[1:]) for own in gpu.lines()]
    return _concatenate(parts)


def recorded_waits(gpu: DeviceEvents) -> Pairs:
    """What streams waited for by cudaStreamWaitEvent, from events of category cuda_sync.

    The first event launched to the waiting stream after the call waits for the last one launched
    to the other stream before cudaEventRecord; before the wait itself, where the record's
    correlation is missing (PyTorch records and waits in one go). Source: CUDA runtime API,
    cudaStreamWaitEvent: all future work of the stream waits for what the event captured.
    """
    if gpu.trace.sync.is_empty():
        return _concatenate([])
    waits = gpu.trace.sync.filter(pl.col("sync_kind") == "Stream Wait Event")
    calls = gpu.calls.frame.select("correlation", "ts_ns").drop_nulls()
    times = calls.group_by("correlation").agg(pl.col("ts_ns").min()).sort("correlation")
    keys = ("device", "stream", "wait_on_stream")
    record = pl.col("wait_on_correlation")
    noted = pl.when(record > 0).then(record).otherwise("correlation")
    found = (
        waits.select(pl.col("device").fill_null(-1), *keys[1:], "correlation", record=noted)
        .drop_nulls(["correlation", *keys])
        .sort("record")
        .join_asof(times.select("correlation", recorded="ts_ns"),
                   left_on="record", right_on="correlation", coalesce=True)
        .sort("correlation")
        .join_asof(times.select("correlation", called="ts_ns"), on="correlation",
                   strategy="forward")
        .drop_nulls(["called", "recorded"])
    )  # fmt: skip
    parts = []
    for rows in found.partition_by(keys, maintain_order=True):
        device, stream, other = rows.select(keys).row(0)
        waiting, awaited = gpu.of_stream(device, stream), gpu.of_stream(device, other)
        later = np.searchsorted(gpu.launched[waiting], rows["called"].to_numpy())
        before = np.searchsorted(gpu.launched[awaited], rows["recorded"].to_numpy(), side="right")
        real = (later < len(waiting)) & (before > 0)
        first, second = awaited[before[real] - 1], waiting[later[real]]
        possible = gpu.ends[first] <= gpu.starts[second] + ROUNDING_NS
        parts.append((first[possible], second[possible]))
    return _concatenate(parts)


def _concatenate(parts: list[Pairs]) -> Pairs:
    nothing = np.empty(0, dtype=np.int64)
    first, second = zip((nothing, nothing), *parts, strict=True)
    return np.concatenate(first), np.concatenate(second)


_COPIES = "Memcpy|Memset"
COPY, COPY_TO_HOST, SHORT_COPY, DEVICE, STREAM, MEMORY_FREE, QUEUE = range(7)
"""Why a call waits: for its copy, as its name says; for a copy to the host's memory, or for
another one, that was seen to end first; for the device; for a stream; to free memory that may be in
use; for room in the queue of its stream."""


class HostWaits(NamedTuple):
    """Calls that may wait, and for what."""

    why: int  # one of the above
    call: Ints  # in `DeviceEvents.calls`
    event: Ints  # the GPU event that it waits for last, which may have ended before; -1 without one
    assumed: Bools  # whether that was inferred, not recorded


def host_waits(gpu: DeviceEvents) -> Iterator[HostWaits]:
    """Yields the calls that return only when a GPU event has ended, by kind of call.

    Source: CUDA runtime API, "API synchronization behavior".
    """
    if not len(gpu.starts):
        return
    calls = gpu.calls
    syncs, frees = calls.find(DEVICE_SYNC), calls.find(FREE)
    begun = gpu.launch_order(np.arange(len(gpu.starts)))
    freed = gpu.latest_within(calls.starts[frees], calls.ends[frees])
    waited = gpu.last_before(begun, calls.starts[syncs])
    for found in (
        *_own_copies(gpu),
        HostWaits(DEVICE, syncs, waited, np.zeros(len(syncs), np.bool_)),
        HostWaits(MEMORY_FREE, frees, freed, np.ones(len(frees), np.bool_)),
        _stream_syncs(gpu),
        _full_queue(gpu),
    ):
        call, event, assumed = found.call, found.event.copy(), found.assumed.copy()
        late = gpu.ends[event] > calls.ends[call] + USUAL_DELAY_NS  # not what it waited for
        wrong = (event >= 0) & late
        event[wrong] = gpu.latest_within(calls.starts[call[wrong]], calls.ends[call[wrong]])
        assumed[wrong] = True
        yield HostWaits(found.why, call, event, assumed)


def _own_copies(gpu: DeviceEvents) -> Iterator[HostWaits]:
    """Copies that ended before their call returned, as of pageable memory: it had waited for them.

    A call that always blocks, without its copy in the trace, waited for what ended last in it.
    """
    copies = np.flatnonzero((gpu.frame["kind"] == MEMORY).to_numpy() & (gpu.call >= 0))
    calls, own = gpu.calls, gpu.call[copies]
    alone = np.setdiff1d(calls.find(COPY_SYNC), own)
    event = gpu.latest_within(calls.starts[alone], calls.ends[alone])
    yield HostWaits(COPY, alone, event, np.ones(len(alone), np.bool_))
    within = np.isin(own, calls.find(_COPIES)) & (gpu.ends[copies] <= calls.ends[own])
    copies, own = copies[within], own[within]
    to_host = gpu.frame["name"][copies].cast(pl.String).str.contains(TO_HOST).to_numpy()
    kinds = np.where(to_host, COPY_TO_HOST, SHORT_COPY)
    kinds[np.isin(own, calls.find(COPY_SYNC))] = COPY
    for why in (COPY, COPY_TO_HOST, SHORT_COPY):
        these = kinds == why
        yield HostWaits(why, own[these], copies[these], np.zeros(int(these.sum()), np.bool_))


def _stream_syncs(gpu: DeviceEvents) -> HostWaits:
    """What cudaStreamSynchronize and cudaEventSynchronize waited for: the stream of the sync event.

    Else that to which the thread launched before, as PyTorch does; else what ended last in it.
    """
    syncs = gpu.calls.find(STREAM_SYNC)
    starts, ends = gpu.calls.starts[syncs], gpu.calls.ends[syncs]
    event = np.full(len(syncs), -1, dtype=np.int64)
    # Stream and device that each call waited for, -1 where no sync event says so, and until when:
    # when the event was recorded that it waited for; else when the call began.
    calls, sync = gpu.calls.frame, gpu.trace.sync
    kind = pl.col("sync_kind").cast(pl.String)
    is_event = kind == "Event Sync"
    times = calls.select(wait_on_correlation="correlation", recorded="ts_ns").drop_nulls()
    scopes = (
        sync.filter(is_event | (kind == "Stream Sync"))
        .with_columns(line=pl.when(is_event).then("wait_on_stream").otherwise("stream"))
        .filter(pl.col("line").is_between(0, (1 << 31) - 1))
        .join(times.unique("wait_on_correlation"), on="wait_on_correlation", how="left")
        .select("correlation", "device", "line", "recorded")
        .unique("correlation", keep="first")
    )
    known = calls.select("correlation")[syncs].join(
        scopes, on="correlation", how="left", maintain_order="left"
    )  # fmt: skip
    stream, device = (known[name].fill_null(-1).to_numpy().copy() for name in ("line", "device"))
    until = np.minimum(known["recorded"].fill_null(1 << 62).to_numpy(), starts)
    assumed = stream < 0
    last, _ = launches_around(gpu, syncs)
    guessed = assumed & (last >= 0)
    stream[guessed] = gpu.frame["stream"].fill_null(-1).to_numpy()[last[guessed]]
    device[guessed] = gpu.device[last[guessed]]
    for key in np.unique(np.stack([device, stream], axis=1), axis=0) if len(syncs) else ():
        own = np.flatnonzero((device == key[0]) & (stream == key[1]))
        event[own] = gpu.last_before(gpu.of_stream(*key.tolist()), until[own])
    done = gpu.ends[event]
    missed = assumed & ((event < 0) | (done <= starts) | (done > ends))
    within = gpu.latest_within(starts[missed], ends[missed])
    event[missed] = np.where((within < 0) & (done[missed] <= starts[missed]), event[missed], within)
    return HostWaits(STREAM, syncs, event, assumed)


def _full_queue(gpu: DeviceEvents) -> HostWaits:
    """Launches into a full queue: they wait for room, until some event of the stream has ended."""
    event = np.full(len(gpu.starts), -1, dtype=np.int64)
    ahead = np.zeros(len(gpu.starts), dtype=np.int64)
    for line in gpu.lines():
        own = gpu.launch_order(line[gpu.call[line] >= 0])
        times, reach = gpu.launched[own], np.maximum.accumulate(gpu.ends[own])
        before = np.searchsorted(times, times)
        ahead[own] = before - np.searchsorted(np.sort(gpu.ends[own]), times, side="right")
        done = np.searchsorted(reach, gpu.calls.ends[gpu.call[own]], side="right")
        event[own] = np.append(gpu.last_to_end(own), -1)[np.minimum(before, done) - 1]
    full = np.flatnonzero(ahead >= FULL_QUEUE)
    return HostWaits(QUEUE, gpu.call[full], event[full], np.ones(len(full), np.bool_))


LONG_GAP_NS = 1_000_000
"""A thread that was idle for longer began again because of another one. Source: Chakra's
trace_linker, enforce_inter_thread_order, threshold 1000 us."""
AUTOGRAD = r"^autograd::engine|AccumulateGrad|Backward\d*$"
"""Operators of backward passes; before 2021 only the functions themselves were recorded."""
Thread = tuple[int, int]  # pid and tid


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
        rows = self.rows_of(self.number_of(thread))  # arrows may lead where nothing ran
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
    left: Ints  # the last thing that the waiting thread did before
    rested: Ints
    """When the working thread was done with what it did before; NEVER where it did nothing."""
    began: Ints
    """When it began the next thing; before `left` where it was at work as the other one left."""
    ended: Ints  # when it was done, by `back`
    back: Ints  # the next thing that the waiting thread did

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

    Of the working thread the outermost operators count.
    """
    # Gaps between neighbouring starts and ends in which no innermost operator runs.
    starts, ends = host.work_of(waiting)
    times = np.unique(np.concatenate([starts, ends]))
    calls_another = np.append((starts[1:] < ends[:-1]) & (ends[1:] <= ends[:-1]), False)
    busy = np.isin(times[:-1], starts[~calls_another[: len(starts)]])
    left, back = times[:-1][~busy], times[1:][~busy]
    starts, ends = host.work_of(working)
    reach = np.maximum.accumulate(ends)
    outermost = np.append(True, starts[1:] >= reach[:-1])[: len(starts)]
    starts, reach = starts[outermost], reach[np.append(outermost[1:], True)[: len(starts)]]
    before = np.searchsorted(reach, left, side="right") - 1
    last = np.searchsorted(reach, back, side="right") - 1
    held = last > before
    before, last = before[held], last[held]
    return HandOvers(
        waiting=waiting, working=working, left=left[held],
        rested=np.where(before >= 0, reach[before], NEVER), began=starts[before + 1],
        ended=reach[last], back=back[held],
    )  # fmt: skip
