"""Where the host waited: in calls that block on the GPU, and for other threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import Intervals, covered_lengths, union
from haiprof.trace_analysis.call_tree import CallTree, nest
from haiprof.trace_analysis.dependencies.device_events import (
    USUAL_DELAY_NS,
    Bools,
    DeviceEvents,
    RuntimeCalls,
)
from haiprof.trace_analysis.dependencies.host_events import LONG_GAP_NS, HostEvents
from haiprof.trace_analysis.dependencies.host_waits import QUEUE, host_waits
from haiprof.trace_format.kineto.rank_trace import Trace

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
    assumed: Bools
    """Whether it was inferred, not recorded."""


_FIELDS = ("time", "cause_time", "gpu_row", "thread", "call_row", "assumed")


def joins_by_thread(
    trace: Trace, host: HostEvents, gpu: DeviceEvents, calls: RuntimeCalls, *, main: int
) -> dict[int, Joins]:
    """The joins of each thread, by its number.

    Args:
        trace: One rank's.
        host: Its host events.
        gpu: Its GPU events.
        calls: Its runtime calls.
        main: Number of the thread that the window is on.
    """
    parts = [*_blocking_calls(trace, host, gpu, calls), *_between_threads(host, main)]
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


_Part = tuple[Ints, tuple[Ints, Ints, Ints, Ints, Ints, Bools]]
"""Thread numbers, and the columns of `Joins`."""


def _blocking_calls(
    trace: Trace, host: HostEvents, gpu: DeviceEvents, calls: RuntimeCalls
) -> Iterator[_Part]:
    """Calls that returned when a GPU event had ended within them."""
    for why, call, event, assumed in host_waits(trace, gpu, calls):
        starts, ends = calls.starts[call], calls.ends[call]
        cause = np.minimum(gpu.ends[event], ends)
        waited = (event >= 0) & (cause > starts)
        waited &= (why != QUEUE) | (ends - starts > USUAL_DELAY_NS)
        rows = host.row_of_call[call[waited]]
        none = np.full(len(rows), -1, dtype=np.int64)
        yield (
            host.thread_of_row[rows],
            (ends[waited], cause[waited], event[waited], none, rows, assumed[waited]),
        )


def _between_threads(host: HostEvents, main: int) -> Iterator[_Part]:
    """Hand-overs between the forward and backward threads, and threads woken after a pause."""
    trees = {
        number: nest(host.frame[host.rows_of(number)].filter(~pl.col("is_mark")))
        for number in range(len(host.threads))
    }
    held = {number: union(NOTHING, NOTHING) for number in trees}
    numbers = {thread: number for number, thread in enumerate(host.threads)}
    for pair in host.backward_threads:
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
