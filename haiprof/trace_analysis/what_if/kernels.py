"""The GPU's part of a replay: kernels on streams, their dependencies, and waits for them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import COMMUNICATION, with_kind
from haiprof.trace_analysis.cpu_collectives import CATEGORY, cpu_collectives
from haiprof.trace_format.blocking_calls import BLOCKING
from haiprof.trace_format.kineto.rank_trace import Trace

MISSING = np.iinfo(np.int64).min
FULL_QUEUE = 1000
"""A launch with this many kernels before it waits for room: CUDA queues 1024 per stream."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """GPU events of a rank by start; arrays of one length."""

    frame: pl.DataFrame
    """`event`, `name`, `kind`, `category`, `correlation`, `launch_tid`, `stream`."""
    starts: Ints
    ends: Ints
    launches: Ints
    """When the call that launched it began, MISSING of what has none in the trace."""
    streams: Ints
    """A number per device and stream."""
    talks: Bools
    """Whether it is communication."""

    def last_launched(self, stream: int, times: Ints) -> Ints:
        """The last kernel of a stream that was launched before each time; -1 where none was."""
        here = np.flatnonzero((self.streams == stream) & (self.launches > MISSING))
        here = here[np.argsort(self.launches[here], kind="stable")]
        at = np.searchsorted(self.launches[here], times, side="left") - 1
        return np.append(here, -1)[at]

    def last_done(self, stream: int, begins: Ints, ends: Ints) -> Ints:
        """The last kernel of a stream launched before a call and ended by its end; or -1."""
        here = np.flatnonzero((self.streams == stream) & (self.launches > MISSING))
        here = here[np.argsort(self.launches[here], kind="stable")]
        launched = np.searchsorted(self.launches[here], begins, side="left")
        done = np.searchsorted(np.maximum.accumulate(self.ends[here]), ends, side="right")
        found: Ints = np.append(here, -1)[np.minimum(launched, done) - 1]
        return found

    def by_correlation(self, stream: object) -> tuple[Ints, Ints]:
        """Correlations of the kernels of a CUDA stream, rising, and which kernels they are."""
        rows = self.frame.with_row_index("kernel").filter(pl.col("stream") == stream)
        sorted_rows = rows.drop_nulls("correlation").sort("correlation", "kernel")
        kernel = sorted_rows["kernel"].cast(pl.Int64).to_numpy()
        return sorted_rows["correlation"].to_numpy(), kernel

    def ends_or(self, which: Ints, otherwise: int) -> Ints:
        """Ends of kernels by number; `otherwise` for -1."""
        return np.append(self.ends, otherwise)[which]


def kernels_of(trace: Trace, window: tuple[int, int]) -> Kernels:
    """The GPU events that were launched in a window, or began in it without a launch on record.

    Where no GPU communicates, the collectives of the CPU are among them.
    """
    calls = trace.runtime.select("correlation", launch_ns="ts_ns", launch_tid="tid").drop_nulls()
    joined = with_kind(trace.gpu).join(
        calls.unique("correlation", keep="first"), on="correlation", how="left"
    )
    when = pl.coalesce("launch_ns", "ts_ns")
    if not (joined["kind"] == COMMUNICATION).any():
        joined = pl.concat([joined, _on_cpu(trace)], how="diagonal_relaxed")
    frame = joined.filter(when.is_between(*window)).sort("ts_ns", "event")
    starts = frame["ts_ns"].to_numpy()
    stream = pl.struct("device", "stream").rank("dense").cast(pl.Int64)
    return Kernels(
        frame=frame.select(
            "event", pl.col("name").cast(pl.String), "kind", pl.col("category").cast(pl.String),
            "correlation", "launch_tid", "stream",
        ),
        starts=starts,
        ends=starts + frame["dur_ns"].to_numpy(),
        launches=frame["launch_ns"].fill_null(MISSING).to_numpy(),
        streams=frame.select(stream).to_series().to_numpy(),
        talks=(frame["kind"] == COMMUNICATION).to_numpy(),
    )  # fmt: skip


def _on_cpu(trace: Trace) -> pl.DataFrame:
    """Collectives of the CPU as events of a stream of their own."""
    return cpu_collectives(trace).with_columns(
        kind=pl.lit(COMMUNICATION), category=pl.lit(CATEGORY),
        device=pl.lit(-1, pl.Int64), stream=pl.lit(-1, pl.Int64),
    )  # fmt: skip


def stream_order(kernels: Kernels) -> tuple[Ints, Ints]:
    """Pairs (earlier, later) of kernels that follow each other on a stream."""
    order = np.lexsort((kernels.starts, kernels.streams))
    follows = kernels.streams[order[1:]] == kernels.streams[order[:-1]]
    earlier, later = order[:-1][follows], order[1:][follows]
    apart = kernels.ends[earlier] <= kernels.starts[later]
    return earlier[apart], later[apart]


def stream_waits(trace: Trace, kernels: Kernels) -> tuple[Ints, Ints]:
    """Pairs (earlier, later) of kernels of different streams, where one stream waits for another.

    Exact where the profiler recorded synchronisations (`enable_cuda_sync_events`). Else each call
    of cudaStreamWaitEvent is taken to hold up the next kernel launched on its thread, until the
    kernel ended that was launched last before the call on another stream: for a collective on a
    computing stream, for other kernels on that stream whose last one ended latest; never on one
    that ended after the kernel began, which would contradict the trace.
    """
    recorded = trace.sync.filter(pl.col("wait_on_stream").is_not_null())
    if recorded.height:
        return _recorded_waits(recorded, kernels)
    named = pl.col("name").cast(pl.String).str.contains("StreamWaitEvent")
    calls = trace.runtime.filter(named)
    waits, later = _next_launches(calls, kernels)
    best = np.full(len(waits), -1)
    for stream in np.unique(kernels.streams):
        found = kernels.last_launched(int(stream), waits)
        usable = (found >= 0) & (kernels.streams[later] != stream)
        usable &= kernels.ends_or(found, 0) <= kernels.starts[later]
        usable &= ~(kernels.talks[later] & np.append(kernels.talks, False)[found])
        usable &= kernels.ends_or(found, 0) > kernels.ends_or(best, MISSING)
        best = np.where(usable, found, best)
    return best[best >= 0], later[best >= 0]


def _recorded_waits(waits: pl.DataFrame, kernels: Kernels) -> tuple[Ints, Ints]:
    """From synchronisation events: by correlations, which count up with the calls."""
    recorded = pl.coalesce(
        pl.when(pl.col("wait_on_correlation") > 0).then("wait_on_correlation"), "correlation"
    )
    asked = waits.drop_nulls("correlation").select(
        "stream", "wait_on_stream", "correlation", record=recorded
    )
    pairs = [(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))]
    for (waiting, awaited), rows in asked.group_by("stream", "wait_on_stream", maintain_order=True):
        numbers, kernel = kernels.by_correlation(waiting)
        before, earlier = kernels.by_correlation(awaited)
        later = np.searchsorted(numbers, rows["correlation"].to_numpy(), side="right")
        last = np.searchsorted(before, rows["record"].to_numpy(), side="left") - 1
        both = (later < len(kernel)) & (last >= 0)
        pairs.append((earlier[last[both]], kernel[later[both]]))
    first, second = np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])
    possible = kernels.ends[first] <= kernels.starts[second]
    return first[possible], second[possible]


def _next_launches(calls: pl.DataFrame, kernels: Kernels) -> tuple[Ints, Ints]:
    """Times of calls, and the next kernel that each one's thread launched."""
    tids = kernels.frame["launch_tid"].fill_null(-1).to_numpy()
    times, found = [np.empty(0, dtype=np.int64)], [np.empty(0, dtype=np.int64)]
    for tid in calls["tid"].unique().sort():
        here = np.flatnonzero((tids == tid) & (kernels.launches > MISSING))
        here = here[np.argsort(kernels.launches[here], kind="stable")]
        when = calls.filter(pl.col("tid") == tid)["ts_ns"].to_numpy()
        at = np.searchsorted(kernels.launches[here], when, side="left")
        times.append(when[at < len(here)])
        found.append(here[at[at < len(here)]])
    return np.concatenate(times), np.concatenate(found)


def blocking_calls(spans: pl.DataFrame, kernels: Kernels) -> pl.DataFrame:
    """Calls that wait for the GPU.

    Args:
        spans: Operators and runtime calls: `name`, `tid`, `ts_ns`, `end_ns`, `correlation`.
        kernels: Of the same window.

    Returns:
        `call` (a number), `correlation`, `name`, `tid`, `ts_ns`, `end_ns`, `full`. These are
        synchronisations and blocking copies by their names, copies to the host that return after
        they have ended, and launches with 1000 kernels before them on the stream, which wait for
        room (`full`).
    """
    calls = spans.filter(pl.col("correlation").is_not_null())
    named = calls.filter(pl.col("name").str.contains(BLOCKING))
    put = kernels.frame.select("correlation", "category", kernel_name="name").with_columns(
        done_ns=pl.Series(kernels.ends), ahead=pl.Series(_ahead(kernels))
    )
    launches = calls.join(put.unique("correlation", keep="first"), on="correlation")
    back = pl.col("kernel_name").str.contains("DtoH|DeviceToHost") & (
        pl.col("end_ns") >= pl.col("done_ns")
    )
    full = ~back & (pl.col("ahead") >= FULL_QUEUE)
    held = launches.with_columns(full=full).filter(back | full).select(*calls.columns, "full")
    found = pl.concat([named.with_columns(full=pl.lit(value=False)), held]).unique(
        ["tid", "ts_ns", "end_ns"], keep="first", maintain_order=True
    )
    return found.sort("ts_ns").with_row_index("call").with_columns(pl.col("call").cast(pl.Int64))


def _ahead(kernels: Kernels) -> Ints:
    """How many kernels of its stream had been launched and not ended at each one's launch."""
    found = np.zeros(len(kernels.starts), dtype=np.int64)
    for stream in np.unique(kernels.streams):
        here = np.flatnonzero((kernels.streams == stream) & (kernels.launches > MISSING))
        launches = kernels.launches[here]
        before = np.searchsorted(np.sort(launches), launches, side="left")
        found[here] = before - np.searchsorted(np.sort(kernels.ends[here]), launches, side="right")
    return found


def blocked_by(trace: Trace, calls: pl.DataFrame, kernels: Kernels) -> pl.DataFrame:
    """What each blocking call waits for.

    Args:
        trace: Of the rank; its synchronisation events say the stream, where there are any.
        calls: From `blocking_calls`.
        kernels: Of the same window.

    Returns:
        `call`, `begin_ns`, `kernel`: of all kernels that were launched before the call and ended
        within or before it, last of their streams, the one that ended latest; of the call's own
        stream only where the trace says which that is. A launch into a full queue waits for the
        last kernel of its stream that ended before it returned. No row where there is none.
    """
    own = kernels.frame.select("correlation", "stream").unique("correlation", keep="first")
    said = trace.sync.select("correlation", "stream", kind=pl.col("sync_kind").cast(pl.String))
    one = said.filter(pl.col("kind").is_in(["Stream Sync", "Stream Synchronize"])).drop("kind")
    named = pl.concat([one, own]).drop_nulls().unique("correlation", keep="first")
    known = calls.join(named, on="correlation", how="left", maintain_order="left")
    begins, ends = known["ts_ns"].to_numpy(), known["end_ns"].to_numpy()
    asked, full = known["stream"].fill_null(-1).to_numpy(), known["full"].to_numpy()
    cuda = kernels.frame["stream"].fill_null(-1).to_numpy()
    best = np.full(known.height, -1)
    for stream in np.unique(kernels.streams):
        number = cuda[kernels.streams == stream][0]
        # A blocking copy waits for itself: launched at its own beginning.
        found = np.where(
            full,
            kernels.last_done(int(stream), begins, ends),
            kernels.last_launched(int(stream), begins + 1),
        )
        usable = (found >= 0) & ((asked < 0) | (asked == number))
        usable &= kernels.ends_or(found, 0) <= ends
        usable &= kernels.ends_or(found, 0) > kernels.ends_or(best, MISSING)
        best = np.where(usable, found, best)
    return (
        known.select("call", begin_ns="ts_ns")
        .with_columns(kernel=pl.Series(best))
        .filter(pl.col("kernel") >= 0)
    )
