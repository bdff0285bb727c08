"""The critical path of one rank's window: what each event waited for, causes, a marked trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import Bools, Ints, covered_lengths, total, union
from haiprof.base.units import duration_text
from haiprof.trace_analysis import dependencies
from haiprof.trace_analysis.call_tree import innermost
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    MEMORY,
    step_marks,
    union_of,
)
from haiprof.trace_analysis.host_activity import split
from haiprof.trace_analysis.launches import copy_path, exact_us, in_pieces
from haiprof.trace_format.find import OVERLAY_SUFFIX
from haiprof.trace_format.kineto.decode import add_marks, write_copy
from haiprof.trace_format.kineto.rank_trace import STEP_NAME, Trace
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.launch_checks import BLOCKING, DEVICE_SYNC, FREE, STREAM_SYNC

Instance = int | tuple[int, int]
"""One of several ranges of a name, from 0; or the first and the last of those that are meant."""


class PathWindow(NamedTuple):
    """The window of a path on the host; work launched in it may run longer on the GPU."""

    start_ns: int
    host_end_ns: int
    thread: dependencies.Thread
    label: str


def find_window(
    trace: Trace, host: dependencies.HostEvents, *, steps: tuple[int, int] | None,
    annotation: str | None, instance: Instance,
) -> PathWindow:  # fmt: skip
    """Finds the requested window."""
    if steps is not None and annotation is not None:
        raise ValueError("give steps or an annotation, not both")
    if steps is None and annotation is None:
        return _of_everything(trace, host)
    # Ranges on the host with a text in their name, by time; before 2022 they were operators.
    part = "ProfilerStep#" if annotation is None else annotation
    named = pl.col("name").cast(pl.String).str.contains(part, literal=True)
    ranges = (table.filter(named).sort("ts_ns") for table in (trace.host_ranges, trace.ops))
    found = next((each for each in ranges if each.height), trace.ops.clear())
    if steps is not None:
        begins = step_marks(trace, steps)["start_ns"].implode()
        found = found.unique("ts_ns", keep="first", maintain_order=True)
        chosen = found.filter(pl.col("ts_ns").is_in(begins))
        label = f"profiler steps {steps[0]} to {steps[1] - 1}"
    else:
        first, last = (instance, instance) if isinstance(instance, int) else instance
        if not 0 <= first <= last < found.height:
            raise MissingDataError(
                f"{trace.path}: {found.height} annotations with {annotation!r} in their name; "
                f"instance {instance} was asked for",
                hint="record_function(name) around a part of the program makes one",
            )
        chosen = found[first : last + 1]
        which = f"instance {first}" if first == last else f"instances {first} to {last}"
        label = f"{chosen['name'][0]} ({which})"
    end = int((chosen["ts_ns"] + chosen["dur_ns"]).to_numpy().max())
    return PathWindow(chosen["ts_ns"][0], end, (chosen["pid"][0], chosen["tid"][0]), label)


def _of_everything(trace: Trace, host: dependencies.HostEvents) -> PathWindow:
    """All of it; where the host neither waits nor begins more, until the GPU is done."""
    if trace.checked.window is None:
        raise MissingDataError(f"{trace.path}: no operators, calls or GPU events in it")
    thread, gpu = host.busiest_thread(), trace.gpu
    is_own = (pl.col(name).eq_missing(of) for name, of in zip(("pid", "tid"), thread, strict=True))
    work = host.frame.filter(*is_own, ~pl.col("is_mark"))
    end = int((work["ts_ns"] + work["dur_ns"]).to_numpy().max(initial=trace.checked.window[0]))
    if len(gpu):
        done = int((gpu["ts_ns"] + gpu["dur_ns"]).max())  # type: ignore[arg-type]
        calls = trace.runtime.filter(pl.col("ts_ns") + pl.col("dur_ns") >= done)
        waits = calls["name"].cast(pl.String).str.contains(f"{BLOCKING}|{FREE}").any()
        begins = any((table["ts_ns"] >= done).any() for table in (trace.ops, trace.runtime))
        idle = 2 * total(union_of(gpu)) < done - int(gpu["ts_ns"][0])
        end = end if waits or begins or idle else min(end, done)
    return PathWindow(trace.checked.window[0], end, thread, "from the first to the last event")


LAUNCH, STREAM, EVENT, INFERRED, HOST = range(5)
"""Why an event began when it did: its launch; the event before it on its stream; another stream's
event, by a recorded wait or assumed; the host, by a launch that is not in the trace.
"""


class Causes(NamedTuple):
    """The last thing that each GPU event waited for."""

    why: Ints  # LAUNCH, STREAM, EVENT, INFERRED or HOST
    row: Ints  # the GPU event; of a launch, its call in `Trace.runtime`; -1 for HOST
    time: Ints  # when that ended, at most the start of the waiting event


def causes(gpu: dependencies.DeviceEvents) -> Causes:
    """What each GPU event waited for last: only that decided when it could start."""
    why, row, best = (np.full(len(gpu.starts), each) for each in (HOST, -1, dependencies.NEVER))
    # Of a launch the start of the call counts, as in HTA; of an unusually long one its end.
    begun = np.minimum(gpu.launched, gpu.starts)
    done = np.minimum(np.append(gpu.calls.ends, 0)[gpu.call], gpu.starts)
    for kind, (found_row, found_time) in (
        (LAUNCH, (gpu.call, np.where(done - begun > dependencies.USUAL_DELAY_NS, done, begun))),
        (STREAM, _by_pairs(gpu, dependencies.stream_order(gpu))),
        (EVENT, _by_pairs(gpu, dependencies.recorded_waits(gpu))),
    ):
        better = (found_row >= 0) & (found_time >= best)
        why[better], row[better], best[better] = kind, found_row[better], found_time[better]
    unknown = ~gpu.known & (gpu.starts - np.maximum(best, gpu.starts.min(initial=0))
                             > dependencies.USUAL_DELAY_NS)  # fmt: skip
    why[unknown], row[unknown], best[unknown] = HOST, -1, gpu.starts[unknown]
    inferred = _infer_waits(gpu, best, why)
    some = inferred >= 0
    why[some], row[some], best[some] = INFERRED, inferred[some], gpu.ends[inferred[some]]
    return Causes(why, row, np.where(row >= 0, best, gpu.starts))


def _by_pairs(gpu: dependencies.DeviceEvents, pairs: dependencies.Pairs) -> tuple[Ints, Ints]:
    """Of the events that each one waited for, the one that ended last; at most at its start."""
    earlier, later = pairs
    row = np.full(len(gpu.starts), -1, dtype=np.int64)
    order = np.argsort(gpu.ends[earlier], kind="stable")  # the latest is written last
    row[later[order]] = earlier[order]
    return row, np.minimum(gpu.ends[row], gpu.starts) if len(row) else row


def _infer_waits(gpu: dependencies.DeviceEvents, best: Ints, why: Ints) -> Ints:
    """Another stream's event that ended just before a waiting one began.

    Assumed after cudaStreamWaitEvent without sync events, in a CUDA graph, and where it began late
    (that need not be an order: it may have waited for room).
    """
    late = gpu.starts - best > dependencies.USUAL_DELAY_NS
    # Whether the launching thread made its stream wait since the stream's launch before; not looked
    # for where sync events say it.
    told, calls = np.zeros_like(late), gpu.calls
    waits = calls.find(dependencies.WAIT_CALL)
    before = np.full(len(gpu.starts), dependencies.NEVER, dtype=np.int64)
    for line in gpu.lines():
        own = gpu.launch_order(line)
        before[own[1:]] = gpu.launched[own[:-1]]
    launched = np.flatnonzero(gpu.known)
    for thread in () if gpu.trace.sync.height else np.unique(calls.thread[waits]):
        times = calls.starts[waits[calls.thread[waits] == thread]]
        own = launched[calls.thread[gpu.call[launched]] == thread]
        last = np.searchsorted(times, gpu.launched[own], side="right") - 1
        told[own] = (last >= 0) & (times[np.maximum(last, 0)] > before[own])
    correlation = gpu.frame["correlation"].fill_null(-1)
    graph = (correlation.is_duplicated() & (correlation > 0)).to_numpy()
    looking = np.flatnonzero((late | told | graph) & (why != EVENT) & (why != HOST))
    floor = np.where(told, best, np.maximum(best, gpu.starts - dependencies.USUAL_DELAY_NS))
    only_graph, numbers = graph & ~late & ~told, correlation.to_numpy()

    def fits(other: Ints, place: Ints) -> Bools:
        own = looking[place]
        real: Bools = (gpu.line[other] != gpu.line[own]) & (gpu.device[other] == gpu.device[own])
        real &= gpu.starts[other] < gpu.starts[own]
        real &= ~told[own] | (gpu.launched[other] <= gpu.launched[own])
        real &= ~only_graph[own] | (numbers[other] == numbers[own])
        return real

    found = np.full(len(gpu.starts), -1, dtype=np.int64)
    found[looking] = gpu.last_to_end_by(gpu.starts[looking], floor[looking], fits)
    return found


_JOINS = {
    "of": pl.Int64, "time": pl.Int64, "cause_time": pl.Int64, "gpu_row": pl.Int64,
    "thread": pl.Int64, "call_row": pl.Int64, "assumed": pl.Boolean,
}  # fmt: skip
"""Points at which a host thread (`of`, its number) resumed because something else had finished:
when it resumed and when that finished, in ns; the GPU event, or the number of the other thread, -1
where it was the other of these; the row of the call that waited, or -1; whether it was inferred,
not recorded."""


_Join = tuple[int | Ints | Bools, ...]


def _blocking_calls(
    host: dependencies.HostEvents, gpu: dependencies.DeviceEvents
) -> Iterator[_Join]:
    """Calls that returned when a GPU event had ended within them."""
    for why, call, event, assumed in dependencies.host_waits(gpu):
        starts, ends = gpu.calls.starts[call], gpu.calls.ends[call]
        cause = np.minimum(gpu.ends[event], ends)
        waited = (event >= 0) & (cause > starts)
        waited &= (why != dependencies.QUEUE) | (ends - starts > dependencies.USUAL_DELAY_NS)
        rows = host.row_of_call[call[waited]]
        of = host.thread_of_row[rows]
        yield of, ends[waited], cause[waited], event[waited], -1, rows, assumed[waited]


def _between_threads(host: dependencies.HostEvents, main: int) -> Iterator[_Join]:
    """Hand-overs to and from threads of backward passes, and threads woken after a pause."""
    nothing: Ints = np.empty(0, dtype=np.int64)
    held = [union(nothing, nothing)] * len(host.threads)
    for found in dependencies.hand_overs(host, host.threads[main]) if main >= 0 else ():
        waiting, working = host.number_of(found.waiting), host.number_of(found.working)
        held[working] = union(found.left, found.back)
        began, left = found.began[found.was_idle], found.left[found.was_idle]
        yield waiting, found.back, found.ended, -1, working, -1, False
        yield working, began, left, -1, waiting, -1, False
    for number, thread in enumerate(host.threads):
        if number != main:
            # It begins, or goes on after a long pause: assumed to be woken by the main one.
            starts, ends = host.work_of(thread)
            gaps = starts[1:] - np.maximum.accumulate(ends)[:-1]
            starts = starts[np.append(True, gaps > dependencies.LONG_GAP_NS)[: len(starts)]]
            starts = starts[covered_lengths(held[number], starts, starts + 1) == 0]
            yield number, starts, starts, -1, main, -1, True


ON_HOST, RETURN, HAND_OVER, ON_GPU, DELAY = range(5)
"""Kinds of segments: a thread works; a blocking call returns; one thread starts another; a GPU
event runs; the delay between a GPU event's last dependency and its start."""


class Walk:
    """Follows the longest path of a window, from its end backwards."""

    def __init__(
        self, host: dependencies.HostEvents, gpu: dependencies.DeviceEvents, main: int,
        start_ns: int,
    ) -> None:  # fmt: skip
        self.host, self.gpu, self.main, self.start_ns = host, gpu, main, start_ns
        self.causes = causes(gpu)
        # By the number of the thread, in order of time; columns of `_JOINS`.
        found = chain(_blocking_calls(host, gpu), _between_threads(host, main))
        parts = [pl.DataFrame(schema=_JOINS)]
        parts += [pl.DataFrame(dict(zip(_JOINS, each, strict=True)), _JOINS) for each in found]
        ordered = pl.concat(parts).sort("of", "time", "cause_time", maintain_order=True)
        self._joins = {int(rows["of"][0]): rows for rows in ordered.partition_by("of")}
        # GPU events by stream, the place of each there, and the first place of its run: in a run
        # each event waited for the one before it on the stream.
        self._order = np.lexsort((np.arange(len(gpu.line)), gpu.line))
        self._position = np.argsort(self._order)
        before = np.append(-1, self._order[:-1])[: len(self._order)]
        follows = self.causes.why[self._order] == STREAM
        follows &= self.causes.row[self._order] == before
        self._head = np.maximum.accumulate(np.where(follows, 0, np.arange(len(self._order))))
        self._pieces: list[Ints] = []
        """The last first: kind, where (the thread's number of ON_HOST and HAND_OVER, the call's row
        of RETURN, else the GPU event), start and end; shape (n, 4) each."""
        self._used: set[tuple[int, int]] = set()
        self.jumps: list[bool] = []
        """Of each change between threads and streams, whether it was inferred."""

    def back_from(self, end_ns: int, end_row: int) -> pl.DataFrame:
        """The path in order of time, without empty segments.

        `end_row` is the GPU event that ends it, or -1.
        """
        thread, row, now = -1 if end_row >= 0 else self.main, end_row, end_ns
        while now > self.start_ns:
            thread, row, now = (
                self._along_stream(row, now) if row >= 0 else self._along_thread(thread, now)
            )
        whole = pl.DataFrame(np.concatenate(self._pieces[::-1]), orient="row",
                             schema=["what", "row", "start_ns", "end_ns"])  # fmt: skip
        whole = whole.with_columns(pl.col("start_ns").clip(self.start_ns))
        length = pl.col("end_ns") - pl.col("start_ns")
        return whole.filter(length > 0).select("what", "row", "start_ns", duration_ns=length)

    def _add(self, *piece: int) -> None:
        """Adds one segment."""
        self._pieces.append(np.array([piece], dtype=np.int64))

    def _along_stream(self, row: int, now: int) -> tuple[int, int, int]:
        """Follows a run of GPU events back to what its first event waited for."""
        gpu, found, at = self.gpu, self.causes, int(self._position[row])
        rows = self._order[int(self._head[at]) : at + 1]
        begun = int(np.searchsorted(gpu.starts[rows], self.start_ns, side="right")) - 1
        rows = rows[max(begun, 0) :]  # nothing before the window
        ends = np.append(found.time[rows[1:]], now)
        begins = np.minimum(gpu.starts[rows], now)
        # The events of the run, and the delays between them.
        run = np.empty((2 * len(rows) - 1, 4), np.int64)
        run[::2] = np.column_stack(np.broadcast_arrays(ON_GPU, rows, begins, ends))
        run[1::2] = np.column_stack(np.broadcast_arrays(DELAY, rows[1:], ends[:-1], begins[1:]))
        self._pieces.append(run)
        first, now = int(rows[0]), int(begins[0])
        if now <= self.start_ns:
            return -1, -1, self.start_ns
        why, cause, time = (int(each[first]) for each in found)
        if why == HOST or (-2, first) in self._used:  # at one time again: contradictory timestamps
            self.jumps.append(True)
            return self.main, -1, now
        self._used.add((-2, first))
        self._add(DELAY, first, time, now)
        self.jumps.append(why == INFERRED)
        if why == LAUNCH:
            return int(self.host.thread_of_row[self.host.row_of_call[cause]]), -1, time
        return -1, cause, time

    def _along_thread(self, thread: int, now: int) -> tuple[int, int, int]:
        """Follows a host thread back to the last point at which it had waited."""
        joins = self._joins.get(thread)
        at = -1 if joins is None else joins["time"].search_sorted(now, "right") - 1
        while at >= 0 and (thread, at) in self._used:
            at -= 1
        if joins is None or at < 0 or joins["time"][at] <= self.start_ns:
            self._add(ON_HOST, thread, self.start_ns, now)
            return -1, -1, self.start_ns
        self._used.add((thread, at))
        _, went_on, cause, row, other, call, is_assumed = joins.row(at)
        self._add(ON_HOST, thread, went_on, now)
        self._add(RETURN if call >= 0 else HAND_OVER, call if call >= 0 else thread, cause, went_on)
        self.jumps.append(is_assumed)
        return other, row, cause


CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED = (
    "cpu_bound", "data_loading", "gpu_compute_bound", "gpu_communication_bound",
    "gpu_memory_bound", "gpu_kernel_kernel_overhead", "gpu_kernel_launch_overhead",
    "synchronisation", "unexplained",
)  # fmt: skip
BOUNDS = (CPU, DATA, COMPUTE, TALK, COPIES, KERNEL_GAP, LAUNCHING, SYNC, UNEXPLAINED)
DATA_LOADING = r"^enumerate\(DataLoader\)"  # PyTorch's own mark around a data loader's `__next__`

SEGMENTS: dict[str, type[pl.DataType]] = {
    "start_ns": pl.Int64, "duration_ns": pl.Int64, "bound_by": pl.String, "event": pl.Int64,
    "name": pl.String, "kind": pl.String, "pid": pl.Int64, "tid": pl.Int64,
    "device": pl.Int64, "stream": pl.Int64,
}  # fmt: skip
_PIECES = dict.fromkeys(("pid", "tid", "stretch", "ts_ns", "dur_ns"), pl.Int64)
_OF_KIND = {COMPUTATION: COMPUTE, COMMUNICATION: TALK, MEMORY: COPIES}
_DELAY_OF = {LAUNCH: LAUNCHING, STREAM: KERNEL_GAP}


def segments(walk: Walk, path: pl.DataFrame, data_loading: str) -> pl.DataFrame:
    """A row per segment of a path, in order; columns in `SEGMENTS`."""
    what, row, length = pl.col("what"), pl.col("row").cast(pl.Int64), pl.col("duration_ns")
    name, kind = pl.col("name").cast(pl.String), pl.col("category").cast(pl.String)
    waits = pl.col("name").str.contains(f"{DEVICE_SYNC}|{STREAM_SYNC}")
    is_work = pl.col("row").is_in(walk.host.rows_named(STEP_NAME)).not_()  # a mark has no name
    calls = walk.host.frame.with_row_index("row").select(
        row, "event", "pid", "tid", name=pl.when(is_work).then(name),
        kind=pl.when(is_work).then(kind),
    )  # fmt: skip
    on_host = _cut_at_events(walk.host, path.filter(what == ON_HOST), data_loading)
    works = on_host.join(calls, on="row", how="left").with_columns(
        bound_by=pl.when(waits.fill_null(value=False)).then(pl.lit(SYNC))
        .when("loading").then(pl.lit(DATA)).otherwise(pl.lit(CPU)),
    )  # fmt: skip
    # From the end of what a blocking call waited for to its return: the host's own work.
    returns = path.filter(what == RETURN).join(calls, on="row", how="left").with_columns(
        bound_by=pl.when(waits | (length <= dependencies.USUAL_DELAY_NS)).then(pl.lit(SYNC))
        .otherwise(pl.lit(CPU))
    )  # fmt: skip
    # From one thread's last event to the first event of the thread that it started or woke.
    schema = {"pid": pl.Int64, "tid": pl.Int64}
    threads = pl.DataFrame(walk.host.threads, schema=schema, orient="row").with_row_index("row")
    hands = path.filter(what == HAND_OVER).join(threads.with_columns(row), on="row").with_columns(
        bound_by=pl.lit(CPU)
    )  # fmt: skip
    # GPU events, and the delays before them, which carry the event that began late.
    events = walk.gpu.frame.with_row_index("row").select(
        row, "event", name, kind, "pid", "tid", "device", "stream", of="kind",
        why=pl.Series(walk.causes.why, dtype=pl.Int64),
    )  # fmt: skip
    running = what == ON_GPU
    is_late = (length > dependencies.USUAL_DELAY_NS) & (pl.col("why") != LAUNCH)
    delay = (
        pl.when(is_late).then(pl.lit(UNEXPLAINED))
        .otherwise(pl.col("why").replace_strict(_DELAY_OF, default=SYNC, return_dtype=pl.String))
    )  # fmt: skip
    work = pl.col("of").replace_strict(_OF_KIND, default=None, return_dtype=pl.String)
    on_gpu = path.filter(running | (what == DELAY)).join(events, on="row", how="left").with_columns(
        bound_by=pl.when(running).then(work).otherwise(delay),
        kind=pl.when(running).then("category").otherwise(pl.lit("delay")),
    )  # fmt: skip
    named = [part.select(name for name in part.columns if name in SEGMENTS)
             for part in (works, returns, hands, on_gpu)]  # fmt: skip
    types = [pl.col(name).cast(type_) for name, type_ in SEGMENTS.items()]
    return pl.concat(named, how="diagonal_relaxed").select(types).sort("start_ns")


def _cut_at_events(
    host: dependencies.HostEvents, stretches: pl.DataFrame, data_loading: str
) -> pl.DataFrame:
    """Cuts host time at every start and end of an event; each piece is its innermost event's."""
    tree, pieces = host.tree, [pl.DataFrame(schema=_PIECES)]
    for (thread,), own in stretches.group_by("row", maintain_order=True):
        rows, starts = host.rows_of(int(str(thread))), own["start_ns"].to_numpy()
        edges = np.unique(np.concatenate([tree.starts[rows], tree.ends[rows]]))
        cut = split(starts, starts + own["duration_ns"].to_numpy(), edges)
        pid, tid = host.threads[int(str(thread))]
        values = (pid, tid, cut.of, cut.starts, cut.ends - cut.starts)
        pieces.append(pl.DataFrame(dict(zip(_PIECES, values, strict=True)), schema=_PIECES))
    whole = pl.concat(pieces)
    row = innermost(tree, whole)
    is_loading = np.zeros(len(tree.parent), dtype=np.bool_)
    is_loading[host.rows_named(data_loading)] = True
    whole = whole.with_columns(
        row=pl.Series(row, dtype=pl.Int64), loading=pl.Series(tree.climb(row, is_loading) >= 0)
    )
    # Merges neighbouring pieces of one event.
    run = pl.struct("tid", "stretch", "row", "loading").rle_id()
    return whole.group_by(run.alias("run"), maintain_order=True).agg(
        pl.col("pid", "tid", "row", "loading").first(), start_ns=pl.col("ts_ns").first(),
        duration_ns=pl.col("dur_ns").sum(),
    )  # fmt: skip


RECORDED, ASSUMED = "recorded", "assumed"
_NEAR_TIE_RATIO = 0.01  # of the window: with a slightly faster host the path would run over the GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalPath:
    """The chain of events that determines a window's length, and how certain it is."""

    start_ns: int
    end_ns: int
    host_end_ns: int
    """Where the window ends on the host; before `end_ns` where the GPU was still working."""
    window: str  # The requested window, in words
    confidence: str
    """`recorded`: every dependency on the path is in the trace; `assumed`: some are inferred, or
    part of the path is unexplained."""
    dependency_count: int  # Changes between threads and streams on the path
    assumed_count: int  # Those of them that were inferred
    caveats: tuple[str, ...]  # Caveats for readers of the numbers
    rows: pl.DataFrame

    @property
    def length_ns(self) -> int:
        """Length of the window, which the path covers exactly."""
        return self.end_ns - self.start_ns

    def segments(self) -> pl.DataFrame:
        """The path, a row per segment in order of time, without gaps.

        `start_ns`; `duration_ns`; `bound_by`, one of `segments.BOUNDS`; `event`, its place in
        the file, null for host time that no event covers; `name`; `kind`, the event's
        category, or `delay` before a GPU event; `pid`; `tid`; `device` and `stream` of what
        ran on a GPU. `name` and `kind` are null, too, where only the mark of a profiler step
        covers the host's time.
        """
        return self.rows

    def summary(self) -> pl.DataFrame:
        """The window's length by cause.

        One row per cause, in the order of `segments.BOUNDS`: `bound_by`, `duration_ns`,
        `share_ratio` (of the window; null where it is empty), `segment_count`. The durations
        add up to the window. Causes: the host works (`cpu_bound`) or loads data
        (`data_loading`); a kernel computes, communicates or a copy runs (`gpu_..._bound`); a
        GPU event was launched and not yet running (`gpu_kernel_launch_overhead`) or could run
        as its stream was free (`gpu_kernel_kernel_overhead`); calls that wait for the GPU,
        from the moment at which it was done, and streams that wait for streams
        (`synchronisation`); `unexplained`: something the trace does not hold.
        """
        every = pl.DataFrame({"bound_by": BOUNDS})
        sums = every.join(self._sums("bound_by"), on="bound_by", how="left", maintain_order="left")
        counts, share = ("duration_ns", "segment_count"), pl.col("share_ratio")
        return sums.with_columns(
            pl.col(counts).fill_null(0), share.fill_null(0.0) if self.length_ns else share
        )

    def top(self, count: int = 20) -> pl.DataFrame:
        """The names that most of the path consists of.

        `bound_by`, `kind`, `name`, `duration_ns`, `share_ratio`, `segment_count`; the longest
        first. A null name is host time outside of all events but a profiler step's mark:
        Python, mostly.
        """
        sums = self._sums("bound_by", "kind", "name")
        return sums.sort("duration_ns", "name", descending=[True, False]).head(count)

    def _sums(self, *keys: str) -> pl.DataFrame:
        """Time of the segments with the same keys, its share of the window, and their number."""
        length = pl.lit(self.length_ns or None, pl.Float64)
        return self.rows.group_by(*keys).agg(
            pl.col("duration_ns").sum(),
            (pl.col("duration_ns").sum() / length).alias("share_ratio"),
            pl.len().cast(pl.Int64).alias("segment_count"),
        )


def critical_path(
    trace: Trace, *, steps: tuple[int, int] | None = None, annotation: str | None = None,
    instance: Instance = 0, data_loading: str = DATA_LOADING,
) -> CriticalPath:  # fmt: skip
    """The critical path of a window of one rank.

    It ends with the window: at its end on the host, or with the last GPU event launched within it
    where that ends later. From there it goes back, from every event to the last thing that it had
    waited for (see `walk`), to the window's start. It covers the window without a gap.
    """
    host = dependencies.HostEvents(trace)
    window = find_window(trace, host, steps=steps, annotation=annotation, instance=instance)
    gpu = dependencies.device_events(trace)
    # It ends with the host, or with the GPU event launched within it that ends after that.
    own = np.flatnonzero((gpu.launched >= window.start_ns) & (gpu.launched < window.host_end_ns))
    last = int(own[np.argmax(gpu.ends[own])]) if len(own) else -1
    slack_ns = window.host_end_ns - int(gpu.ends[last]) if len(own) else None
    end_row = last if slack_ns is not None and slack_ns <= 0 else -1
    end_ns = window.host_end_ns if end_row < 0 else int(gpu.ends[last])
    if end_ns <= window.start_ns:
        raise MissingDataError(f"{trace.path}: no time passes in {window.label}")
    walk = Walk(host, gpu, host.number_of(window.thread), window.start_ns)
    rows = segments(walk, walk.back_from(end_ns, end_row), data_loading)
    jumps, assumed = len(walk.jumps), sum(walk.jumps)
    unsure = assumed or (rows["bound_by"] == UNEXPLAINED).any()
    return CriticalPath(
        start_ns=window.start_ns, end_ns=end_ns, host_end_ns=window.host_end_ns,
        window=window.label, confidence=ASSUMED if unsure else RECORDED,
        dependency_count=jumps, assumed_count=assumed, rows=rows,
        caveats=tuple(_caveats(gpu, window, end_ns, (jumps, assumed), rows, slack_ns)),
    )  # fmt: skip


def _caveats(
    gpu: dependencies.DeviceEvents, window: PathWindow, end_ns: int, counts: tuple[int, int],
    rows: pl.DataFrame, slack_ns: int | None,
) -> list[str]:  # fmt: skip
    """What readers must know; `slack_ns` is how long before the host the GPU was done."""
    found = gpu.trace.report.notes
    if not len(gpu.starts):
        return [*found, "no GPU events in the trace: the path is the host's"]
    jumps, assumed = counts
    unsynced = "" if gpu.trace.sync.height else (
        ": the trace has no sync events "
        "(experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True))"
    )  # fmt: skip
    events = gpu.frame["event"].to_numpy()[gpu.launched < window.start_ns]
    earlier = pl.col("event").is_in(pl.Series(events).implode()) & pl.col("device").is_not_null()
    early, early_ns = int(rows.filter(earlier)["duration_ns"].sum()), gpu.launched - gpu.starts
    longer_ns, skewed = end_ns - window.host_end_ns, int((early_ns > 0).sum())
    is_tie = slack_ns and 0 < slack_ns < _NEAR_TIE_RATIO * (end_ns - window.start_ns)
    by_cause = dict(rows.group_by("bound_by").agg(pl.col("duration_ns").sum()).iter_rows())
    unexplained = by_cause.get(UNEXPLAINED, 0)
    counted = (
        (assumed, f"{assumed} of {jumps} dependencies on the path are assumed{unsynced}"),
        (longer_ns > 0,
         f"the GPU worked {duration_text(longer_ns)} longer than the window on the host"),
        (is_tie, f"the GPU was done only {duration_text(slack_ns)} before the host: its work is "
                 "almost as critical"),
        (early, f"{duration_text(early)} are GPU work that was launched before the window"),
        (skewed, f"{skewed} GPU events began up to {duration_text(int(early_ns.max()))} before "
                 "their launch: the clocks of host and GPU differ"),
        (by_cause.get(TALK),
         "communication includes waiting for other ranks; one rank's trace cannot tell"),
        (unexplained, f"{duration_text(unexplained)} passed before GPU events that were launched "
                      "and whose stream was free: they waited for something that is not in the "
                      "trace"),
    )  # fmt: skip
    return [*found, *(note for is_so, note in counted if is_so)]


CATEGORY = "critical_path"
MARK = "critical"


def write_overlay(
    trace: Trace, path: CriticalPath, *, folder: Path | None = None, only_path: bool = False
) -> Path:
    """Writes `<name>_critical_path.json.gz`, for Perfetto or chrome://tracing.

    The trace's text is passed through piece by piece, whatever its size. Events on the path get
    the argument `critical`; where the path changes its thread or stream stands an arrow (a flow
    event of category `critical_path`) that carries what bounds the next stretch. The file appears
    whole or not at all.
    """
    if trace.report.lost_count:
        raise TraceFormatError(
            f"{trace.path}: {trace.report.lost_count} events are no JSON, so the others cannot be "
            "marked in its text",
            hint="the path itself is in segments()",
        )
    target = copy_path(trace, folder, OVERLAY_SUFFIX)
    text = TraceText(trace.path)
    running = path.rows.filter(pl.col("kind") != "delay")["event"].drop_nulls()
    marked = add_marks(text, np.unique(running.to_numpy()), MARK, only_marked=only_path)
    # Arrows between events on the path that lie on different threads or streams.
    events = path.rows.filter(pl.col("event").is_not_null() & (pl.col("kind") != "delay"))
    here = ("pid", "tid", "start_ns")
    moves = events.with_columns(pl.col(*here).shift(-1).name.prefix("next_"),
                                bound=pl.col("bound_by").shift(-1)).filter(
        (pl.col("pid") != pl.col("next_pid")) | (pl.col("tid") != pl.col("next_tid"))
    ).with_row_index("id")  # fmt: skip
    ends = [
        moves.select(event=pl.concat_str(
            pl.lit(f'{{"ph": "{phase}", "cat": "{CATEGORY}", "name": "'), "bound",
            pl.lit(f'"{more}, "id": "{CATEGORY}'), "id", pl.lit('", "pid": '), f"{of}pid",
            pl.lit(', "tid": '), f"{of}tid", pl.lit(', "ts": '),
            *exact_us(pl.col(f"{of}start_ns")), pl.lit("}"),
        )).to_series()
        for phase, more, of in (("s", "", ""), ("f", ', "bp": "e"', "next_"))
    ]  # fmt: skip
    write_copy(target, text, chain(marked, in_pieces(pl.concat(ends))))
    return target
