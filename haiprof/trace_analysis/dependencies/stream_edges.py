"""What GPU events wait for on the GPU: the event before on their stream, and other streams."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.dependencies.device_events import DeviceEvents, RuntimeCalls
from haiprof.trace_format.kineto.rank_trace import Trace

WAIT_CALL = r"^(?:cuda|cu|hip)StreamWaitEvent"
"""Calls that make a stream wait for another; they return at once."""
ROUNDING_NS = 1000
"""Old traces have whole microseconds: what waited may seem to begin so much too early."""
Pairs = tuple[Ints, Ints]
"""Edges: the events that end first, and those that wait for them."""


def stream_order(gpu: DeviceEvents) -> Pairs:
    """Each event and, of those before it on its stream, the one that ends last.

    They may overlap: programmatic dependent launch lets a kernel begin before that one has ended.
    """
    parts = [(gpu.last_to_end(own)[:-1], own[1:]) for own in gpu.lines()]
    return _concatenate(parts)


def recorded_waits(trace: Trace, gpu: DeviceEvents, calls: RuntimeCalls) -> Pairs:
    """What streams waited for by cudaStreamWaitEvent, from events of category cuda_sync.

    The first event launched to the waiting stream after the call waits for the last one launched
    to the other stream before cudaEventRecord; before the wait itself, where the record's
    correlation is missing (PyTorch records and waits in one go). Source: CUDA runtime API,
    cudaStreamWaitEvent: all future work of the stream waits for what the event captured.
    """
    parts = []
    for (device, stream, other), rows in _wait_calls(trace, calls) if len(trace.sync) else ():
        waiting, awaited = gpu.of_stream(device, stream), gpu.of_stream(device, other)
        later = np.searchsorted(gpu.launched[waiting], rows["called"].to_numpy())
        before = np.searchsorted(gpu.launched[awaited], rows["recorded"].to_numpy(), side="right")
        real = (later < len(waiting)) & (before > 0)
        first, second = awaited[before[real] - 1], waiting[later[real]]
        possible = gpu.ends[first] <= gpu.starts[second] + ROUNDING_NS
        parts.append((first[possible], second[possible]))
    return _concatenate(parts)


def _wait_calls(
    trace: Trace, calls: RuntimeCalls
) -> list[tuple[tuple[int, int, int], pl.DataFrame]]:
    """Times of the wait calls and of their records by device, stream and awaited stream.

    Correlations count up with the calls, so one whose call is not in the trace has its place too.
    """
    waits = trace.sync.filter(pl.col("sync_kind") == "Stream Wait Event")
    times = calls.frame.select("correlation", "ts_ns").drop_nulls().sort("correlation", "ts_ns")
    times = times.unique("correlation", keep="first", maintain_order=True)
    keys = ("device", "stream", "wait_on_stream")
    device, record = pl.col("device").fill_null(-1), pl.col("wait_on_correlation")
    noted = pl.when(record > 0).then(record).otherwise("correlation")
    found = (
        waits.select(device, *keys[1:], "correlation", record=noted)
        .drop_nulls(["correlation", *keys])
        .sort("record")
        .join_asof(times.select("correlation", recorded="ts_ns"),
                   left_on="record", right_on="correlation", coalesce=True)
        .sort("correlation")
        .join_asof(times.select("correlation", called="ts_ns"), on="correlation",
                   strategy="forward")
        .drop_nulls(["called", "recorded"])
    )  # fmt: skip
    groups = found.group_by(keys, maintain_order=True)
    return [((int(str(a)), int(str(b)), int(str(c))), rows) for (a, b, c), rows in groups]


def _concatenate(parts: list[Pairs]) -> Pairs:
    nothing = np.empty(0, dtype=np.int64)
    first, second = zip((nothing, nothing), *parts, strict=True)
    return np.concatenate(first), np.concatenate(second)
