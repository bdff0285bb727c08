"""The last thing that each GPU event waited for: its launch, its stream, or another stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.dependencies.device_events import (
    NEVER,
    USUAL_DELAY_NS,
    Bools,
    DeviceEvents,
    RuntimeCalls,
)
from haiprof.trace_analysis.dependencies.stream_edges import (
    WAIT_CALL,
    Pairs,
    recorded_waits,
    stream_order,
)
from haiprof.trace_format.kineto.rank_trace import Trace

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


def causes(trace: Trace, gpu: DeviceEvents, calls: RuntimeCalls) -> Causes:
    """What each GPU event waited for last: only that decided when it could start."""
    count = len(gpu.starts)
    why = np.full(count, HOST, dtype=np.int64)
    row = np.full(count, -1, dtype=np.int64)
    time = gpu.starts.copy()
    best = np.full(count, NEVER, dtype=np.int64)
    for kind, (found_row, found_time) in (
        (LAUNCH, _by_launch(calls, gpu)),
        (STREAM, _by_pairs(gpu, stream_order(gpu))),
        (EVENT, _by_pairs(gpu, recorded_waits(trace, gpu, calls))),
    ):
        better = (found_row >= 0) & (found_time >= best)
        why[better], row[better], best[better] = kind, found_row[better], found_time[better]
    unknown = ~gpu.known & (gpu.starts - np.maximum(best, gpu.starts.min(initial=0))
                             > USUAL_DELAY_NS)  # fmt: skip
    why[unknown], row[unknown] = HOST, -1
    best[unknown] = gpu.starts[unknown]
    inferred_row = _infer_waits(trace, calls, gpu, best, why)
    some = inferred_row >= 0
    why[some], row[some], best[some] = INFERRED, inferred_row[some], gpu.ends[inferred_row[some]]
    known = row >= 0
    time[known] = best[known]
    return Causes(why=why, row=row, time=time)


def _by_launch(calls: RuntimeCalls, gpu: DeviceEvents) -> tuple[Ints, Ints]:
    """The start of the launch call, as HTA has it.

    For a call that took unusually long (it loaded a module, or the queue was full) the time in it
    is the host's: its end counts, or the kernel's start if that is earlier.
    """
    begun = np.minimum(gpu.launched, gpu.starts)
    done = np.minimum(np.append(calls.ends, 0)[gpu.call], gpu.starts)
    return gpu.call, np.where(done - begun > USUAL_DELAY_NS, done, begun)


def _by_pairs(gpu: DeviceEvents, pairs: Pairs) -> tuple[Ints, Ints]:
    """Of the events that each one waited for, the one that ended last; at most at its start."""
    earlier, later = pairs
    row = np.full(len(gpu.starts), -1, dtype=np.int64)
    order = np.argsort(gpu.ends[earlier], kind="stable")  # the latest is written last
    row[later[order]] = earlier[order]
    return row, np.minimum(gpu.ends[row], gpu.starts) if len(row) else row


def _infer_waits(
    trace: Trace, calls: RuntimeCalls, gpu: DeviceEvents, best: Ints, why: Ints
) -> Ints:
    """Another stream's event that ended just before a waiting one began.

    Assumed where the launching thread called cudaStreamWaitEvent since the stream's last launch
    and no sync events are recorded, where both are of one CUDA graph, or where the event began
    unusually late and just after it (that need not be an order: it may have waited for room).
    """
    late = gpu.starts - best > USUAL_DELAY_NS
    told = _wait_called(calls, gpu) if not trace.sync.height else np.zeros_like(late)
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


def _wait_called(calls: RuntimeCalls, gpu: DeviceEvents) -> Bools:
    """Whether the launching thread made its stream wait since the stream's launch before."""
    waits = calls.find(WAIT_CALL)
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
