"""Where the host waited: in calls that block on the GPU, and for other threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Ints
from haiprof.base.intervals import covered_lengths, union
from haiprof.trace_analysis.dependencies.device_events import (
    USUAL_DELAY_NS,
    Bools,
    DeviceEvents,
    RuntimeCalls,
)
from haiprof.trace_analysis.dependencies.host_events import LONG_GAP_NS, HostEvents
from haiprof.trace_analysis.dependencies.host_waits import QUEUE, host_waits
from haiprof.trace_analysis.dependencies.thread_handovers import hand_overs
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
    """The joins of each thread, by its number."""
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
            starts = _resume_times(*host.work_of(thread))
            starts = starts[covered_lengths(held[number], starts, starts + 1) == 0]
            yield _hand_over(number, starts, starts, main, assumed=True)


def _resume_times(starts: Ints, ends: Ints) -> Ints:
    """When a thread begins, or goes on after a long pause: assumed to be woken by the main one."""
    gaps = starts[1:] - np.maximum.accumulate(ends)[:-1]
    found: Ints = starts[np.append(True, gaps > LONG_GAP_NS)[: len(starts)]]
    return found


def _hand_over(of: int, time: Ints, cause_time: Ints, thread: int, *, assumed: bool) -> _Part:
    none = np.full(len(time), -1, dtype=np.int64)
    inferred = np.full(len(time), assumed, dtype=np.bool_)
    return none + 1 + of, (time, cause_time, none, none + 1 + thread, none, inferred)
