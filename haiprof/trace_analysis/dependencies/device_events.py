"""GPU events with their launches and streams, and the runtime calls, as arrays."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.classify import COMMUNICATION, with_kind
from haiprof.trace_format.kineto.rank_trace import Trace

Bools = npt.NDArray[np.bool_]

USUAL_DELAY_NS = 100_000
"""A kernel on a free stream starts sooner than this after its launch: in single-stream traces 99 %
start within 40 us. One that starts later was waiting."""
FULL_QUEUE = 1000
"""A launch with this many events before it waits for room: CUDA queues 1024 per stream."""
NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeCalls:
    """Calls of the CUDA or HIP runtime and driver; a number of a call is its row in `frame`."""

    frame: pl.DataFrame
    """`Trace.runtime`."""
    starts: Ints
    ends: Ints
    thread: Ints
    """A number per process and thread."""
    names: tuple[str, ...]
    name: Ints
    """Place in `names`."""

    def find(self, pattern: str) -> Ints:
        """Calls with a name that matches a regular expression."""
        matching = np.array([re.search(pattern, name) is not None for name in self.names], bool)
        return np.flatnonzero(matching[self.name]) if len(self.name) else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceEvents:
    """GPU events by start, as arrays; a number of an event is its row in `frame`."""

    frame: pl.DataFrame
    """`Trace.gpu` with `kind` and the thread of the launch, `launch_tid`."""
    starts: Ints
    ends: Ints
    line: Ints
    """A number per device and stream."""
    device: Ints
    call: Ints
    """The launch call, in `RuntimeCalls`; -1 where it is not recorded."""
    launched: Ints
    """When the launch call began; see `_launch_times` for those that are not recorded."""
    known: Bools
    """Whether that is in the trace."""
    talks: Bools
    """Whether it is communication."""

    def take(self, rows: Ints) -> DeviceEvents:
        """Some of the events, in the given order."""
        arrays = [field.name for field in fields(self) if field.name != "frame"]
        return replace(self, frame=self.frame[rows], **{n: getattr(self, n)[rows] for n in arrays})

    def lines(self, rows: Ints | None = None) -> list[Ints]:
        """The events of each stream by their start; `rows` are those that count, rising."""
        line = self.line if rows is None else self.line[rows]
        order = np.argsort(line, kind="stable")
        cuts = np.flatnonzero(np.diff(line[order])) + 1
        parts = np.split(order if rows is None else rows[order], cuts)
        return [part for part in parts if len(part)]

    def of_stream(self, device: int, stream: int) -> Ints:
        """The events of a stream, by launch; a negative device stands for any."""
        own = self.frame["stream"].fill_null(-1).to_numpy() == stream
        own &= (self.device == device) | (device < 0)
        return self.launch_order(np.flatnonzero(own))

    def launch_order(self, rows: Ints) -> Ints:
        """Events by their launch."""
        return rows[np.lexsort((rows, self.launched[rows]))]

    def last_to_end(self, ordered: Ints) -> Ints:
        """For each of some events in order, the one up to it that ends last."""
        ends = self.ends[ordered]
        latest = ends >= np.maximum.accumulate(ends)
        return ordered[np.maximum.accumulate(np.where(latest, np.arange(len(ordered)), 0))]

    def last_before(self, ordered: Ints, times: Ints) -> Ints:
        """Of events by launch, the one launched before each time that ends last; or -1."""
        count = np.searchsorted(self.launched[ordered], times)
        return np.append(self.last_to_end(ordered), -1)[count - 1]

    def latest_within(self, starts: Ints, ends: Ints) -> Ints:
        """The event that ended last within each call and was launched before it; or -1."""
        by_end = np.argsort(self.ends, kind="stable")
        found = np.full(len(starts), -1, dtype=np.int64)
        looking = np.arange(len(starts))
        at = np.searchsorted(self.ends[by_end], ends, side="right") - 1
        for _ in range(_TRIES):
            row = by_end[np.maximum(at, 0)]
            inside = (at >= 0) & (self.ends[row] > starts[looking])
            real = inside & (self.launched[row] < starts[looking])
            found[looking[real]] = row[real]
            going = inside & ~real
            looking, at = looking[going], at[going] - 1
        return found


_TRIES = 8


def runtime_calls(trace: Trace) -> RuntimeCalls:
    """The runtime calls of a trace, by start."""
    frame = trace.runtime
    starts = frame["ts_ns"].to_numpy()
    codes = frame["name"].to_physical().to_numpy()
    _, first, name = np.unique(codes, return_index=True, return_inverse=True)
    return RuntimeCalls(
        frame=frame,
        starts=starts,
        ends=starts + frame["dur_ns"].to_numpy(),
        thread=_numbers(frame.select("pid", "tid")),
        names=tuple(frame["name"].gather(first).cast(pl.String)),
        name=name,
    )


def device_events(trace: Trace, calls: RuntimeCalls) -> DeviceEvents:
    """The GPU events of a trace with their launches: the first call of the same correlation."""
    named = calls.frame.select(
        "correlation", "ts_ns", launch_tid="tid", call=pl.int_range(pl.len(), dtype=pl.Int64)
    )
    first = named.filter(pl.col("correlation") > 0).unique("correlation", keep="first")
    gpu = with_kind(trace.gpu).join(
        first.rename({"ts_ns": "launch_ns"}),
        on="correlation", how="left", maintain_order="left",
    )  # fmt: skip
    keys = gpu.select(pl.col("device", "stream").fill_null(-1))
    starts = gpu["ts_ns"].to_numpy()
    return DeviceEvents(
        frame=gpu.drop("launch_ns", "call"),
        starts=starts,
        ends=starts + gpu["dur_ns"].to_numpy(),
        line=_numbers(keys),
        device=keys["device"].to_numpy(),
        call=gpu["call"].fill_null(-1).to_numpy(),
        launched=_launch_times(keys, gpu["launch_ns"], starts, _begin(trace, starts)),
        known=gpu["call"].is_not_null().to_numpy(),
        talks=(gpu["kind"] == COMMUNICATION).to_numpy(),
    )


def launches_around(gpu: DeviceEvents, calls: RuntimeCalls, rows: Ints) -> tuple[Ints, Ints]:
    """The event that each of some calls' thread launched last before it, and next; -1 for none."""
    launched = gpu.launch_order(np.flatnonzero(gpu.call >= 0))
    threads = calls.thread[gpu.call[launched]]
    last, following = np.full((2, len(rows)), -1, dtype=np.int64)
    for thread in np.unique(calls.thread[rows]):
        of = np.flatnonzero(calls.thread[rows] == thread)
        own = launched[threads == thread]
        at = np.searchsorted(gpu.launched[own], calls.starts[rows[of]])
        last[of], following[of] = np.append(own, -1)[at - 1], np.append(own, -1)[at]
    return last, following


def _numbers(keys: pl.DataFrame) -> Ints:
    """A number of each row; equal rows have the same."""
    found: Ints = keys.select(pl.struct(pl.all()).rank("dense")).to_series().to_numpy()
    return found.astype(np.int64)


def _begin(trace: Trace, starts: Ints) -> int:
    """When anything on the host began first; without a host the GPU."""
    marks = trace.annotations.filter(pl.col("category") != "gpu_user_annotation")
    tables = [table["ts_ns"].to_numpy() for table in (marks, trace.ops, trace.runtime)]
    times = np.concatenate(tables)
    return int(times.min(initial=int(starts.min(initial=0))))


def _launch_times(keys: pl.DataFrame, known: pl.Series, starts: Ints, begin: int) -> Ints:
    """When each event was launched, as far as the trace tells.

    A stream runs in order, so an event without a recorded launch was launched after its
    predecessors: it gets the latest of their launches. Before the first recorded one of its stream
    it was launched before the trace began. A stream without any: its events count from their start.
    """
    own = pl.col("known")
    streams = ("device", "stream")
    times = keys.with_columns(known=known, start=pl.Series(starts, dtype=pl.Int64)).select(
        pl.when(own.is_not_null())
        .then(own)
        .when(own.is_not_null().any().over(streams))
        .then(pl.min_horizontal(own.cum_max().forward_fill().over(streams).fill_null(begin - 1),
                                "start"))
        .otherwise("start")
    )  # fmt: skip
    found: Ints = times.to_series().to_numpy()
    return found
