"""Where the host waited: in calls that block on the GPU, and for other threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import Intervals, covered_lengths, union
from haiprof.trace_analysis.call_tree import CallTree
from haiprof.trace_analysis.classify import MEMORY
from haiprof.trace_analysis.critical.device import NEVER, USUAL_DELAY_NS, DeviceEvents, launch_order
from haiprof.trace_analysis.critical.host import LONG_GAP_NS, HostEvents, backward_threads
from haiprof.trace_format.blocking_calls import DEVICE_SYNC, FREE, STREAM_SYNC
from haiprof.trace_format.kineto.rank_trace import Trace

Flags = npt.NDArray[np.bool_]

COPY = "Memcpy|Memset"  # those that waited show it by their times
_FULL_QUEUE = 1000  # launches; CUDA's queue of a stream holds 1024, and then a launch call blocks
_TRIES = 8
NOTHING: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joins:
    """Points at which a host thread resumed because something else had finished; by time."""

    time: Ints
    """When the thread resumed, ns."""
    cause_time: Ints
    """When what it waited for finished, ns."""
    gpu_row: Ints
    """That GPU event; -1 where it was another thread."""
    thread: Ints
    """Number of that other thread; -1 where it was a GPU event."""
    call_row: Ints
    """Row of the call that waited; -1 without one."""
    assumed: Flags
    """Whether it was inferred, not recorded."""


_FIELDS = ("time", "cause_time", "gpu_row", "thread", "call_row", "assumed")


def joins_by_thread(
    trace: Trace, host: HostEvents, gpu: DeviceEvents, main: int
) -> dict[int, Joins]:
    """The joins of each thread, by its number.

    Args:
        trace: One rank's.
        host: Its host events.
        gpu: Its GPU events.
        main: Number of the thread that the window is on.
    """
    parts = [*_blocking_calls(trace, host, gpu), *_between_threads(trace, host, main)]
    names = ("of", *_FIELDS)
    columns = zip(*((of, *values) for of, values in parts), strict=True)
    whole: dict[str, Ints] = dict.fromkeys(names, NOTHING)
    whole |= {name: np.concatenate(column) for name, column in zip(names, columns, strict=False)}
    order = np.lexsort((whole["cause_time"], whole["time"], whole["of"]))
    whole = {name: values[order] for name, values in whole.items()}
    found = {}
    for number in np.unique(whole["of"]):
        own = whole["of"] == number
        found[int(number)] = Joins(**{
            name: whole[name][own].astype(np.bool_ if name == "assumed" else np.int64)
            for name in _FIELDS
        })  # fmt: skip
    return found


_Part = tuple[Ints, tuple[Ints, Ints, Ints, Ints, Ints, Flags]]
"""Thread numbers, and the columns of `Joins`."""


def _blocking_calls(trace: Trace, host: HostEvents, gpu: DeviceEvents) -> Iterator[_Part]:
    """Calls that returned when a GPU event had ended within them."""
    if not len(gpu.starts):
        return
    starts = host.frame["ts_ns"].to_numpy()
    ends = starts + host.frame["dur_ns"].to_numpy()
    recorded = _recorded_scopes(trace, host)
    device = host.rows_named(DEVICE_SYNC)
    stream = host.rows_named(STREAM_SYNC)
    free, everything = host.rows_named(FREE), launch_order(gpu, np.arange(len(gpu.starts)))
    for rows, row, assumed in (
        _own_copies(host, gpu, starts, ends),
        (device, _last_before(gpu, everything, starts[device]), np.zeros(len(device), np.bool_)),
        (free, _latest_within(gpu, starts[free], ends[free]), np.ones(len(free), np.bool_)),
        _stream_syncs(host, gpu, stream, recorded, starts, ends),
        _full_queue(host, gpu, starts, ends),
    ):
        late = gpu.ends[np.maximum(row, 0)] > ends[rows] + USUAL_DELAY_NS  # not what it waited for
        wrong = (row >= 0) & late
        row, assumed = row.copy(), assumed.copy()
        row[wrong] = _latest_within(gpu, starts[rows[wrong]], ends[rows[wrong]])
        assumed[wrong] = True
        cause = np.where(row >= 0, np.minimum(gpu.ends[np.maximum(row, 0)], ends[rows]), NEVER)
        kept = cause > starts[rows]
        rows, row, cause, assumed = rows[kept], row[kept], cause[kept], assumed[kept]
        none = np.full(len(rows), -1, dtype=np.int64)
        yield host.thread_of_row[rows], (ends[rows], cause, row, none, rows, assumed)


def _last_before(gpu: DeviceEvents, ordered: Ints, times: Ints) -> Ints:
    """For each time, the event launched before it that ends last; -1 without any."""
    if not len(ordered):
        return np.full(len(times), -1, dtype=np.int64)
    ends = gpu.ends[ordered]
    reach = np.maximum.accumulate(ends)
    last = np.maximum.accumulate(np.where(ends >= reach, np.arange(len(ordered)), 0))
    count = np.searchsorted(gpu.launched[ordered], times)
    return np.where(count > 0, ordered[last[np.maximum(count, 1) - 1]], -1)


def _latest_within(gpu: DeviceEvents, starts: Ints, ends: Ints) -> Ints:
    """The GPU event that ended last within each call and was launched before it; or -1."""
    by_end = np.argsort(gpu.ends, kind="stable")
    found = np.full(len(starts), -1, dtype=np.int64)
    looking = np.arange(len(starts))
    at = np.searchsorted(gpu.ends[by_end], ends, side="right") - 1
    for _ in range(_TRIES):
        row = by_end[np.maximum(at, 0)]
        inside = (at >= 0) & (gpu.ends[row] > starts[looking])
        real = inside & (gpu.launched[row] < starts[looking])
        found[looking[real]] = row[real]
        going = inside & ~real
        looking, at = looking[going], at[going] - 1
    return found


def _own_copies(
    host: HostEvents, gpu: DeviceEvents, starts: Ints, ends: Ints
) -> tuple[Ints, Ints, Flags]:
    """Copies that ended before their call returned, which had waited for them.

    cudaMemcpyAsync does so with pageable memory, whatever its name says.
    """
    copies = np.flatnonzero((gpu.frame["kind"] == MEMORY).to_numpy() & (gpu.launch_row >= 0))
    calls = gpu.launch_row[copies]
    by_name = np.zeros(len(starts), dtype=np.bool_)
    by_name[host.rows_named(COPY)] = True
    within = by_name[calls] & (gpu.ends[copies] <= ends[calls])
    return calls[within], copies[within], np.zeros(int(within.sum()), np.bool_)


def _stream_syncs(
    host: HostEvents,
    gpu: DeviceEvents,
    calls: Ints,
    recorded: pl.DataFrame,
    starts: Ints,
    ends: Ints,
) -> tuple[Ints, Ints, Flags]:
    """What cudaStreamSynchronize and cudaEventSynchronize waited for.

    Where a sync event names the stream, its last event; else the last event of the stream that
    the thread launched to before, as PyTorch does after a copy; else what ended last in the call.
    """
    row = np.full(len(calls), -1, dtype=np.int64)
    scope = host.frame[calls].select("correlation").join(
        recorded, on="correlation", how="left", maintain_order="left"
    )  # fmt: skip
    line = scope["line_stream"].fill_null(-1).to_numpy().copy()
    device = scope["device"].fill_null(-1).to_numpy().copy()
    until = np.minimum(scope["recorded"].fill_null(1 << 62).to_numpy(), starts[calls])
    assumed = line < 0
    _guess_streams(host, gpu, calls, starts, assumed, line, device)
    streams = gpu.frame["stream"].fill_null(-1).to_numpy()
    for key in np.unique(np.stack([device, line], axis=1), axis=0) if len(calls) else ():
        own = np.flatnonzero((device == key[0]) & (line == key[1]))
        events = np.flatnonzero((gpu.device == key[0]) & (streams == key[1]))
        row[own] = _last_before(gpu, launch_order(gpu, events), until[own])
    done = gpu.ends[np.maximum(row, 0)]
    missed = assumed & ((row < 0) | (done <= starts[calls]) | (done > ends[calls]))
    row[missed] = _latest_within(gpu, starts[calls[missed]], ends[calls[missed]])
    return calls, row, assumed


def _guess_streams(
    host: HostEvents,
    gpu: DeviceEvents,
    calls: Ints,
    starts: Ints,
    wanted: Flags,
    line: Ints,
    device: Ints,
) -> None:
    """Fills in the stream of the thread's last launch before each wanted call."""
    launched = launch_order(gpu, np.flatnonzero(gpu.launch_row >= 0))
    threads = host.thread_of_row[gpu.launch_row[launched]]
    streams = gpu.frame["stream"].fill_null(-1).to_numpy()
    for thread in np.unique(host.thread_of_row[calls]):
        own = launched[threads == thread]
        of = np.flatnonzero((host.thread_of_row[calls] == thread) & wanted)
        at = np.searchsorted(gpu.launched[own], starts[calls[of]]) - 1
        of, at = of[at >= 0], at[at >= 0]
        line[of], device[of] = streams[own[at]], gpu.device[own[at]]


def _recorded_scopes(trace: Trace, host: HostEvents) -> pl.DataFrame:
    """Stream that a call waited for by its correlation, and when the event was recorded."""
    kinds = trace.sync.with_columns(pl.col("sync_kind").cast(pl.String)).filter(
        pl.col("sync_kind").is_in(["Stream Sync", "Event Sync"])
    )
    times = host.frame.select(wait_on_correlation="correlation", recorded="ts_ns").drop_nulls()
    is_event = pl.col("sync_kind") == "Event Sync"
    stream = pl.when(is_event).then("wait_on_stream").otherwise("stream")
    return (
        kinds.with_columns(line_stream=stream)
        .filter(pl.col("line_stream").is_between(0, (1 << 31) - 1))
        .join(times.unique("wait_on_correlation"), on="wait_on_correlation", how="left")
        .select("correlation", "device", "line_stream", "recorded")
        .unique("correlation", keep="first")
    )


def _full_queue(
    host: HostEvents, gpu: DeviceEvents, starts: Ints, ends: Ints
) -> tuple[Ints, Ints, Flags]:
    """Launch calls that took long while the stream's queue was full: they waited for room."""
    known = np.flatnonzero(gpu.launch_row >= 0)
    slow = known[ends[gpu.launch_row[known]] - gpu.launched[known] > USUAL_DELAY_NS]
    waiting = np.zeros(len(slow), dtype=np.int64)
    for line in np.unique(gpu.line[slow]):
        own = np.flatnonzero(gpu.line[slow] == line)
        all_of = np.flatnonzero(gpu.line == line)
        times = gpu.launched[slow[own]]
        launched = np.searchsorted(np.sort(gpu.launched[all_of]), times)
        waiting[own] = launched - np.searchsorted(np.sort(gpu.starts[all_of]), times)
    rows = gpu.launch_row[slow[waiting >= _FULL_QUEUE]]
    return rows, _latest_within(gpu, starts[rows], ends[rows]), np.ones(len(rows), np.bool_)


def _between_threads(trace: Trace, host: HostEvents, main: int) -> Iterator[_Part]:
    """Hand-overs between the forward and backward threads, and threads woken after a pause."""
    trees = {
        number: host.tree_of(host.frame[host.rows_of(number)].filter(~pl.col("is_mark")))
        for number in range(len(host.threads))
    }
    held = {number: union(NOTHING, NOTHING) for number in trees}
    numbers = {thread: number for number, thread in enumerate(host.threads)}
    for pair in backward_threads(trace):
        if pair.forward not in numbers or pair.backward not in numbers:
            continue  # arrows lead there, but nothing ran there
        forward, backward = numbers[pair.forward], numbers[pair.backward]
        begins, ends, first, last = _forward_waits(trees[forward], trees[backward])
        held[backward] = union(begins, ends)
        yield _hand_over(forward, ends, last, backward)
        yield _hand_over(backward, first, begins, forward)
    for number, tree in trees.items():
        if number != main:
            yield _resumed_threads(tree, held[number], number, main)


def _forward_waits(forward: CallTree, backward: CallTree) -> tuple[Ints, Ints, Ints, Ints]:
    """Pauses of the forward thread while the backward thread worked, for which it waited.

    Returns:
        Begin and end of each, and when the backward thread's events in it began and ended.
    """
    begins, ends = _pauses(forward)
    top = backward.depth == 0
    starts_b, ends_b = backward.starts[top], np.maximum.accumulate(backward.ends[top])
    first = np.searchsorted(starts_b, begins)
    last = np.searchsorted(ends_b, ends, side="right") - 1
    held = first <= last
    return begins[held], ends[held], starts_b[first[held]], ends_b[last[held]]


def _pauses(tree: CallTree) -> tuple[Ints, Ints]:
    """Gaps between consecutive starts and ends in which no leaf event runs."""
    times = np.unique(np.concatenate([tree.starts, tree.ends]))
    begins, ends = times[:-1], times[1:]
    leaf = np.ones(len(tree.starts), dtype=np.bool_)
    leaf[tree.parent[tree.parent >= 0]] = False
    at = np.searchsorted(begins, tree.starts[leaf])
    at = at[at < len(ends)]
    busy = np.zeros(len(begins), dtype=np.bool_)
    busy[at] = True
    return begins[~busy], ends[~busy]


def _resumed_threads(tree: CallTree, held: Intervals, number: int, main: int) -> _Part:
    """Threads that begin, or resume after a long pause: assumed to be woken by the main thread."""
    top = tree.depth == 0
    starts = tree.starts[top]
    reach = np.maximum.accumulate(tree.ends[top])
    resumed = np.append(True, starts[1:] - reach[:-1] > LONG_GAP_NS)[: len(starts)]
    resumed &= covered_lengths(held, starts, starts + 1) == 0  # the forward thread is known to wait
    of, (time, cause, row, thread, call, known) = _hand_over(
        number, starts[resumed], starts[resumed], main
    )
    return of, (time, cause, row, thread, call, ~known)


def _hand_over(of: int, time: Ints, cause_time: Ints, thread: int) -> _Part:
    none = np.full(len(time), -1, dtype=np.int64)
    same = np.zeros(len(time), dtype=np.bool_)
    return none + 1 + of, (time, cause_time, none, none + 1 + thread, none, same)
