"""What each GPU event waited for last: its launch, its stream, or another stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import with_kind
from haiprof.trace_analysis.critical.host import HostEvents
from haiprof.trace_format.kineto.rank_trace import Trace

Flags = npt.NDArray[np.bool_]

USUAL_DELAY_NS = 100_000
"""A kernel on a free stream starts sooner than this after its launch: in single-stream traces 99 %
start within 40 us. One that starts later was waiting."""
NEVER = np.iinfo(np.int64).min
LAUNCH, STREAM, EVENT, INFERRED, HOST = range(5)
"""Why an event began when it did: its launch; the event before it on its stream; another stream's
event, by a recorded wait or assumed; the host, by a launch that is not in the trace.
"""
_WAIT_CALLS = "^(?:cuda|cu|hip)StreamWaitEvent"
_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvents:
    """GPU events by start, as arrays; a number of an event is its row in `frame`."""

    frame: pl.DataFrame
    """`Trace.gpu` with `kind`."""
    starts: Ints
    ends: Ints
    line: Ints
    """Number of the device's stream."""
    device: Ints
    launch_row: Ints
    """Row of the launch call in `HostEvents.frame`; -1 where it is not recorded."""
    launched: Ints
    """When the launch call began; see `_launch_times` for those that are not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The last thing that each GPU event waited for."""

    why: Ints
    """LAUNCH, STREAM, EVENT, INFERRED or HOST."""
    row: Ints
    """The GPU event; of a launch, the row of its call; -1 for HOST."""
    time: Ints
    """When that ended, at most the start of the waiting event."""


def device_events(trace: Trace, host: HostEvents) -> DeviceEvents:
    """The GPU events of a trace with their launches."""
    gpu = with_kind(trace.gpu)
    calls = host.frame.with_row_index("row").select("row", "correlation", "ts_ns")
    first = calls.drop_nulls().sort("ts_ns", "row").unique("correlation", keep="first")
    joined = gpu.select("correlation").join(
        first.rename({"ts_ns": "launched"}), on="correlation", how="left", maintain_order="left"
    )
    keys = gpu.select(pl.col("device", "stream").fill_null(-1))
    starts = gpu["ts_ns"].to_numpy()
    return DeviceEvents(
        frame=gpu,
        starts=starts,
        ends=starts + gpu["dur_ns"].to_numpy(),
        line=keys.select(pl.struct("device", "stream").rank("dense"))
        .to_series()
        .to_numpy()
        .astype(np.int64),
        device=gpu["device"].fill_null(-1).to_numpy(),
        launch_row=joined["row"].cast(pl.Int64).fill_null(-1).to_numpy(),
        launched=_launch_times(keys, joined["launched"], host, starts),
    )


def _launch_times(keys: pl.DataFrame, known: pl.Series, host: HostEvents, starts: Ints) -> Ints:
    """When each event was launched, as far as the trace tells.

    A stream runs in order, so an event without a recorded launch was launched after its
    predecessors: it gets the latest of their launches. Before the first recorded one of its stream
        it was
    launched before the trace began. A stream without any: its events count from their start.
    """
    own = pl.col("known")
    streams = ("device", "stream")
    begun = host.frame["ts_ns"].to_numpy().min(initial=int(starts.min(initial=0)))
    times = keys.with_columns(known=known, start=pl.Series(starts, dtype=pl.Int64)).select(
        pl.when(own.is_not_null())
        .then(own)
        .when(own.is_not_null().any().over(streams))
        .then(pl.min_horizontal(own.cum_max().forward_fill().over(streams).fill_null(begun - 1),
                                "start"))
        .otherwise("start")
    )  # fmt: skip
    found: Ints = times.to_series().to_numpy()
    return found


def causes(trace: Trace, host: HostEvents, gpu: DeviceEvents) -> Causes:
    """What each GPU event waited for last: only that decided when it could start."""
    count = len(gpu.starts)
    why = np.full(count, HOST, dtype=np.int64)
    row = np.full(count, -1, dtype=np.int64)
    time = gpu.starts.copy()
    best = np.full(count, NEVER, dtype=np.int64)
    for kind, (found_row, found_time) in (
        (LAUNCH, _by_launch(host, gpu)),
        (STREAM, _by_stream(gpu)),
        (EVENT, _by_recorded_wait(trace, host, gpu)),
    ):
        better = (found_row >= 0) & (found_time >= best)
        why[better], row[better], best[better] = kind, found_row[better], found_time[better]
    unknown = (gpu.launch_row < 0) & (gpu.starts - np.maximum(best, gpu.starts.min(initial=0))
                                      > USUAL_DELAY_NS)  # fmt: skip
    why[unknown], row[unknown] = HOST, -1
    best[unknown] = gpu.starts[unknown]
    inferred_row = _infer_waits(trace, host, gpu, best, why)
    some = inferred_row >= 0
    why[some], row[some], best[some] = INFERRED, inferred_row[some], gpu.ends[inferred_row[some]]
    known = row >= 0
    time[known] = best[known]
    return Causes(why=why, row=row, time=time)


def _by_launch(host: HostEvents, gpu: DeviceEvents) -> tuple[Ints, Ints]:
    """The start of the launch call, as HTA has it.

    For a call that took unusually long (it loaded a module, or the queue was full) the time in it
    is the host's: its end counts, or the kernel's start if that is earlier.
    """
    known = gpu.launch_row >= 0
    row = np.maximum(gpu.launch_row, 0)
    durations = host.frame["dur_ns"].to_numpy()
    begun = np.minimum(gpu.launched, gpu.starts)
    done = begun if not len(durations) else np.minimum(gpu.launched + durations[row], gpu.starts)
    time = np.where(done - begun > USUAL_DELAY_NS, done, begun)
    return np.where(known, gpu.launch_row, -1), time


def _by_stream(gpu: DeviceEvents) -> tuple[Ints, Ints]:
    """The earlier event on the stream that ended last; if they overlap, it ends at the start."""
    row = np.full(len(gpu.starts), -1, dtype=np.int64)
    time = np.full(len(gpu.starts), NEVER, dtype=np.int64)
    for line in np.unique(gpu.line):
        own = np.flatnonzero(gpu.line == line)
        ends = gpu.ends[own]
        reach = np.maximum.accumulate(ends)
        last = np.maximum.accumulate(np.where(ends >= reach, np.arange(len(own)), 0))
        row[own[1:]] = own[last[:-1]]
        time[own[1:]] = np.minimum(reach[:-1], gpu.starts[own[1:]])
    return row, time


def _by_recorded_wait(trace: Trace, host: HostEvents, gpu: DeviceEvents) -> tuple[Ints, Ints]:
    """What a stream waited for by cudaStreamWaitEvent, from events of category cuda_sync.

    The first event launched to the waiting stream after the call waits for the last one launched
    to the other stream before cudaEventRecord; before the wait itself, where the record's
    correlation is missing (PyTorch records and waits in one go).
    """
    row = np.full(len(gpu.starts), -1, dtype=np.int64)
    time = np.full(len(gpu.starts), NEVER, dtype=np.int64)
    for (device, stream, other), times in _stream_waits(trace, host).items():
        waiting = launch_order(gpu, _on(gpu, device, stream))
        awaited = launch_order(gpu, _on(gpu, device, other))
        called, recorded = times
        at = np.searchsorted(gpu.launched[waiting], called)
        of = np.searchsorted(gpu.launched[awaited], recorded, side="right") - 1
        real = (at < len(waiting)) & (of >= 0)
        target, source = waiting[at[real]], awaited[of[real]]
        kept = gpu.ends[source] <= gpu.starts[target] + 1000  # us stamps round
        target, source = target[kept], source[kept]
        order = np.argsort(gpu.ends[source], kind="stable")  # the latest is written last
        target, source = target[order], source[order]
        later = gpu.ends[source] > time[target]
        row[target[later]] = source[later]
        time[target[later]] = np.minimum(gpu.ends[source], gpu.starts[target])[later]
    return row, time


def _stream_waits(trace: Trace, host: HostEvents) -> dict[tuple[int, int, int], tuple[Ints, Ints]]:
    """Times of the wait calls and of their records by device, stream and awaited stream."""
    waits = trace.sync.filter(pl.col("sync_kind") == "Stream Wait Event")
    calls = host.frame.select("correlation", "ts_ns").drop_nulls().unique("correlation")
    known = (
        waits.select("device", "stream", "wait_on_stream", "correlation", "wait_on_correlation")
        .join(calls.rename({"ts_ns": "called"}), on="correlation")
        .join(calls.select(wait_on_correlation="correlation", recorded="ts_ns"),
              on="wait_on_correlation", how="left")
        .with_columns(pl.col("recorded").fill_null(pl.col("called")))
        .drop_nulls(["device", "stream", "wait_on_stream"])
    )  # fmt: skip
    groups = known.group_by("device", "stream", "wait_on_stream", maintain_order=True)
    return {
        (int(str(key[0])), int(str(key[1])), int(str(key[2]))): (
            rows["called"].to_numpy(),
            rows["recorded"].to_numpy(),
        )
        for key, rows in groups
    }


def _on(gpu: DeviceEvents, device: int, stream: int) -> Ints:
    return np.flatnonzero(
        (gpu.device == device) & (gpu.frame["stream"].fill_null(-1).to_numpy() == stream)
    )


def launch_order(gpu: DeviceEvents, rows: Ints) -> Ints:
    """Events by their launch."""
    return rows[np.lexsort((rows, gpu.launched[rows]))]


def _infer_waits(trace: Trace, host: HostEvents, gpu: DeviceEvents, best: Ints, why: Ints) -> Ints:
    """Another stream's event that ended just before a waiting one began.

    Assumed where the launching thread called cudaStreamWaitEvent since the stream's last launch
    and no sync events are recorded, where both are of one CUDA graph, or where the event began
    unusually late and just after it (that need not be an order: it may have waited for room).
    """
    late = gpu.starts - best > USUAL_DELAY_NS
    told = _wait_called(host, gpu) if not trace.sync.height else np.zeros_like(late)
    correlation = gpu.frame["correlation"].fill_null(-1)
    graph = (correlation.is_duplicated() & (correlation >= 0)).to_numpy()
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


def _wait_called(host: HostEvents, gpu: DeviceEvents) -> Flags:
    """Whether the launching thread made its stream wait since the stream's launch before."""
    calls = host.rows_named(_WAIT_CALLS)
    starts = host.frame["ts_ns"].to_numpy()
    told = np.zeros(len(gpu.starts), dtype=np.bool_)
    before = np.full(len(gpu.starts), NEVER, dtype=np.int64)
    for line in np.unique(gpu.line):
        own = launch_order(gpu, np.flatnonzero(gpu.line == line))
        before[own[1:]] = gpu.launched[own[:-1]]
    for thread in np.unique(host.thread_of_row[calls]):
        waits = starts[calls[host.thread_of_row[calls] == thread]]
        own = np.flatnonzero(gpu.launch_row >= 0)
        own = own[host.thread_of_row[gpu.launch_row[own]] == thread]
        last = np.searchsorted(waits, gpu.launched[own], side="right") - 1
        told[own] = (last >= 0) & (waits[np.maximum(last, 0)] > before[own])
    return told
