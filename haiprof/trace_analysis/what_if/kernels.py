"""The GPU's part of a replay: events in its window, what they wait for, and who waits for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import COMMUNICATION, with_kind
from haiprof.trace_analysis.cpu_collectives import CATEGORY, cpu_collectives
from haiprof.trace_analysis.dependencies.device_events import (
    NEVER,
    DeviceEvents,
    RuntimeCalls,
    device_events,
    launches_around,
)
from haiprof.trace_analysis.dependencies.host_waits import (
    DEVICE,
    MEMORY_FREE,
    SHORT_COPY,
    STREAM,
    host_waits,
)
from haiprof.trace_analysis.dependencies.stream_edges import (
    WAIT_CALL,
    Pairs,
    recorded_waits,
    stream_order,
)
from haiprof.trace_format.kineto.rank_trace import Trace


def kernels_of(trace: Trace, calls: RuntimeCalls, window: tuple[int, int]) -> DeviceEvents:
    """The GPU events that were launched in a window, or began in it without a launch on record."""
    gpu = device_events(trace, calls)
    when = np.where(gpu.known, gpu.launched, gpu.starts)
    return gpu.take(np.flatnonzero((when >= window[0]) & (when <= window[1])))


def with_cpu_collectives(
    trace: Trace, kernels: DeviceEvents, window: tuple[int, int]
) -> DeviceEvents:
    """Adds the collectives of the CPU, on a stream of their own, where no GPU communicates."""
    if kernels.talks.any() or (with_kind(trace.gpu)["kind"] == COMMUNICATION).any():
        return kernels
    found = cpu_collectives(trace).filter(pl.col("launch_ns").is_between(*window))
    if found.is_empty():
        return kernels
    starts, none = found["ts_ns"].to_numpy(), np.full(len(found), -1, dtype=np.int64)
    shown = found.with_columns(kind=pl.lit(COMMUNICATION), category=pl.lit(CATEGORY))
    own = {
        "starts": starts, "ends": starts + found["dur_ns"].to_numpy(), "line": none,
        "device": none, "call": none, "launched": found["launch_ns"].to_numpy(),
        "known": none < 0, "talks": none < 0,
    }  # fmt: skip
    text = pl.col("name", "kind", "category").cast(pl.String)
    frames = [frame.with_columns(text) for frame in (kernels.frame, shown)]
    return replace(
        kernels,
        frame=pl.concat(frames, how="diagonal_relaxed").select(kernels.frame.columns),
        **{name: np.concatenate([getattr(kernels, name), more]) for name, more in own.items()},
    )


def ordered_pairs(kernels: DeviceEvents) -> Pairs:
    """Events that follow each other on a stream; not those that overlap."""
    return _possible(kernels, stream_order(kernels))


def _possible(kernels: DeviceEvents, pairs: Pairs) -> Pairs:
    first, second = pairs
    possible = kernels.ends[first] <= kernels.starts[second]
    return first[possible], second[possible]


def stream_waits(trace: Trace, kernels: DeviceEvents, calls: RuntimeCalls) -> Pairs:
    """Pairs (earlier, later) of kernels of different streams, where one stream waits for another.

    Exact where the profiler recorded synchronisations (`enable_cuda_sync_events`). Else each call
    of cudaStreamWaitEvent is taken to hold up the next kernel launched on its thread, until the
    kernel ended that was launched last before the call on another stream: for a collective on a
    computing stream, for other kernels on that stream whose last one ended latest; never on one
    that ended after the kernel began, which would contradict the trace.
    """
    if trace.sync["wait_on_stream"].is_not_null().any():
        return _possible(kernels, recorded_waits(trace, kernels, calls))
    waits, later = _next_launches(kernels, calls)
    best = np.full(len(waits), -1)
    ends, talks = np.append(kernels.ends, NEVER), np.append(kernels.talks, False)
    for own in kernels.lines():
        found = kernels.last_before(kernels.launch_order(own[kernels.known[own]]), waits)
        usable = (found >= 0) & (kernels.line[later] != kernels.line[own[0]])
        usable &= ends[found] <= kernels.starts[later]
        usable &= ~(talks[later] & talks[found])
        usable &= ends[found] > ends[best]
        best = np.where(usable, found, best)
    return best[best >= 0], later[best >= 0]


def _next_launches(kernels: DeviceEvents, calls: RuntimeCalls) -> Pairs:
    """Times of calls that make a stream wait, and the next kernel that each one's thread launched.

    A trace without synchronisation events does not say which stream waits.
    """
    waits = calls.find(WAIT_CALL)
    _, found = launches_around(kernels, calls, waits)
    return calls.starts[waits[found >= 0]], found[found >= 0]


def blocking_calls(
    trace: Trace, kernels: DeviceEvents, calls: RuntimeCalls, window: tuple[int, int]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls in a window that wait for the GPU, and what each of them waits for.

    `call`, `name`, `tid`, `ts_ns`, `end_ns` of synchronisations, blocking copies, copies to the
    host that return after they have ended, and launches into a full queue; and `call`,
    `begin_ns`, `kernel` of those that wait for one.
    """
    parts = [np.empty((0, 2), dtype=np.int64)]
    for why, call, event, assumed in host_waits(trace, kernels, calls):
        meant = (calls.starts[call] >= window[0]) & (calls.starts[call] <= window[1])
        if why in (DEVICE, STREAM):
            known = (why == STREAM) & ~assumed
            event = np.where(known, event, _last_done(kernels, calls, call))
        if why not in (SHORT_COPY, MEMORY_FREE):
            parts.append(np.stack([call, event], axis=1)[meant])
    pairs = np.concatenate(parts)
    pairs = pairs[np.unique(pairs[:, 0], return_index=True)[1]]
    call, event = pairs[:, 0], pairs[:, 1]
    ends = np.minimum(calls.ends[call], window[1])
    found = calls.frame[call].select(
        pl.col("name").cast(pl.String), "tid", "ts_ns", end_ns=pl.Series(ends),
        call=pl.Series(call),
    )  # fmt: skip
    held = (event >= 0) & (kernels.ends[event] <= ends) if len(kernels.ends) else event >= 0
    waited = {"call": call[held], "begin_ns": calls.starts[call[held]], "kernel": event[held]}
    return found, pl.DataFrame(waited)


def _last_done(kernels: DeviceEvents, calls: RuntimeCalls, call: Ints) -> Ints:
    """Of the events launched last to each stream before a call, the one that ended last in it."""
    best = np.full(len(call), -1)
    ends = np.append(kernels.ends, NEVER)
    for line in kernels.lines():
        own = kernels.launch_order(line[kernels.known[line]])
        before = np.searchsorted(kernels.launched[own], calls.starts[call], side="right")
        found = np.append(own, -1)[before - 1]
        usable = (ends[found] <= calls.ends[call]) & (ends[found] > ends[best])
        best = np.where(usable, found, best)
    return best
