"""Calls that block, and the GPU event that each one waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import MEMORY
from haiprof.trace_analysis.dependencies.device_events import (
    FULL_QUEUE,
    USUAL_DELAY_NS,
    Bools,
    DeviceEvents,
    RuntimeCalls,
    launches_around,
)
from haiprof.trace_format.blocking_calls import COPY_SYNC, DEVICE_SYNC, FREE, STREAM_SYNC
from haiprof.trace_format.kineto.rank_trace import Trace

_COPIES, _TO_HOST = "Memcpy|Memset", "DtoH|DeviceToHost"


COPY, COPY_TO_HOST, SHORT_COPY, DEVICE, STREAM, MEMORY_FREE, QUEUE = range(7)
"""Why a call waits: for its copy, as its name says; for a copy to the host's memory, or for
another one, that was seen to end first; for the device; for a stream; to free memory that may be in
use; for room in the queue of its stream."""


class HostWaits(NamedTuple):
    """Calls that may wait, and for what."""

    why: int
    """One of the above."""
    call: Ints
    """In `RuntimeCalls`."""
    event: Ints
    """The GPU event that it waits for last, which may have ended before; -1 without one."""
    assumed: Bools
    """Whether that was inferred, not recorded."""


def host_waits(trace: Trace, gpu: DeviceEvents, calls: RuntimeCalls) -> Iterator[HostWaits]:
    """Yields the calls that return only when a GPU event has ended, by kind of call.

    Source: CUDA runtime API, "API synchronization behavior".
    """
    if not len(gpu.starts):
        return
    for found in (
        *_own_copies(gpu, calls),
        _device_syncs(gpu, calls),
        _frees(gpu, calls),
        _stream_syncs(trace, gpu, calls),
        _full_queue(gpu, calls),
    ):
        call, event, assumed = found.call, found.event.copy(), found.assumed.copy()
        late = gpu.ends[event] > calls.ends[call] + USUAL_DELAY_NS  # not what it waited for
        wrong = (event >= 0) & late
        event[wrong] = gpu.latest_within(calls.starts[call[wrong]], calls.ends[call[wrong]])
        assumed[wrong] = True
        yield HostWaits(found.why, call, event, assumed)


def _device_syncs(gpu: DeviceEvents, calls: RuntimeCalls) -> HostWaits:
    syncs, begun = calls.find(DEVICE_SYNC), gpu.launch_order(np.arange(len(gpu.starts)))
    event = gpu.last_before(begun, calls.starts[syncs])
    return HostWaits(DEVICE, syncs, event, np.zeros(len(syncs), np.bool_))


def _frees(gpu: DeviceEvents, calls: RuntimeCalls) -> HostWaits:
    frees = calls.find(FREE)
    event = gpu.latest_within(calls.starts[frees], calls.ends[frees])
    return HostWaits(MEMORY_FREE, frees, event, np.ones(len(frees), np.bool_))


def _own_copies(gpu: DeviceEvents, calls: RuntimeCalls) -> Iterator[HostWaits]:
    """Copies that ended before their call returned, which had waited for them.

    cudaMemcpyAsync does so with pageable memory, whatever its name says. A call that always blocks
    and whose copy is not in the trace waited for what ended last in it: copies come after all work
    before them.
    """
    copies = np.flatnonzero((gpu.frame["kind"] == MEMORY).to_numpy() & (gpu.call >= 0))
    own = gpu.call[copies]
    alone = np.setdiff1d(calls.find(COPY_SYNC), own)
    event = gpu.latest_within(calls.starts[alone], calls.ends[alone])
    yield HostWaits(COPY, alone, event, np.ones(len(alone), np.bool_))
    within = np.isin(own, calls.find(_COPIES)) & (gpu.ends[copies] <= calls.ends[own])
    copies, own = copies[within], own[within]
    to_host = gpu.frame["name"][copies].cast(pl.String).str.contains(_TO_HOST).to_numpy()
    kinds = np.where(to_host, COPY_TO_HOST, SHORT_COPY)
    kinds[np.isin(own, calls.find(COPY_SYNC))] = COPY
    for why in (COPY, COPY_TO_HOST, SHORT_COPY):
        these = kinds == why
        yield HostWaits(why, own[these], copies[these], np.zeros(int(these.sum()), np.bool_))


def _stream_syncs(trace: Trace, gpu: DeviceEvents, calls: RuntimeCalls) -> HostWaits:
    """What cudaStreamSynchronize and cudaEventSynchronize waited for.

    Where a sync event names the stream, its last event; else the last event of the stream that
    the thread launched to before, as PyTorch does after a copy; else what ended last in the call.
    """
    syncs = calls.find(STREAM_SYNC)
    starts, ends = calls.starts[syncs], calls.ends[syncs]
    event = np.full(len(syncs), -1, dtype=np.int64)
    stream, device, until = _recorded_scopes(trace, calls, syncs)
    assumed = stream < 0
    last, _ = launches_around(gpu, calls, syncs)
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


def _recorded_scopes(trace: Trace, calls: RuntimeCalls, syncs: Ints) -> tuple[Ints, Ints, Ints]:
    """Stream and device that each call waited for, -1 where no sync event says so, and until when.

    That is when the event was recorded that it waited for; else when the call began.
    """
    starts = calls.starts[syncs]
    if not len(trace.sync):
        return np.full(len(syncs), -1), np.full(len(syncs), -1), starts
    is_event = pl.col("sync_kind").cast(pl.String) == "Event Sync"
    times = calls.frame.select(wait_on_correlation="correlation", recorded="ts_ns").drop_nulls()
    scopes = (
        trace.sync.filter(is_event | (pl.col("sync_kind").cast(pl.String) == "Stream Sync"))
        .with_columns(line=pl.when(is_event).then("wait_on_stream").otherwise("stream"))
        .filter(pl.col("line").is_between(0, (1 << 31) - 1))
        .join(times.unique("wait_on_correlation"), on="wait_on_correlation", how="left")
        .select("correlation", "device", "line", "recorded")
        .unique("correlation", keep="first")
    )
    own = calls.frame.select("correlation")[syncs].join(
        scopes, on="correlation", how="left", maintain_order="left"
    )  # fmt: skip
    stream, device = (own[name].fill_null(-1).to_numpy().copy() for name in ("line", "device"))
    recorded = own["recorded"].fill_null(1 << 62).to_numpy()
    return stream, device, np.minimum(recorded, starts)


def _full_queue(gpu: DeviceEvents, calls: RuntimeCalls) -> HostWaits:
    """Launches into a full queue: they wait for room, until some event of the stream has ended."""
    event = np.full(len(gpu.starts), -1, dtype=np.int64)
    ahead = np.zeros(len(gpu.starts), dtype=np.int64)
    for line in gpu.lines():
        own = gpu.launch_order(line[gpu.call[line] >= 0])
        times, reach = gpu.launched[own], np.maximum.accumulate(gpu.ends[own])
        before = np.searchsorted(times, times)
        ahead[own] = before - np.searchsorted(np.sort(gpu.ends[own]), times, side="right")
        done = np.searchsorted(reach, calls.ends[gpu.call[own]], side="right")
        event[own] = np.append(gpu.last_to_end(own), -1)[np.minimum(before, done) - 1]
    full = np.flatnonzero(ahead >= FULL_QUEUE)
    return HostWaits(QUEUE, gpu.call[full], event[full], np.ones(len(full), np.bool_))
