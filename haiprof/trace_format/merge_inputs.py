"""The files to merge: rank, host and clock of each; numbers and lanes of their processes."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.intervals import Ints
from haiprof.trace_format.find import MERGED_KEY, by_rank, one_window, rank_of, trace_files
from haiprof.trace_format.kineto.columns import exact_ns
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.events import GPU_RANGES, LANE
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText

WALL_FROM_NS = 10**18
"""September 2001: an earlier time is not Unix time but counts from something else."""
_SAID_BEFORE = {"distributedInfo", "baseTimeNanoseconds", "haiprof"}
"""Where one of these precedes the events, the metadata behind them is not needed."""


class _Stamp(msgspec.Struct):
    ph: msgspec.Raw = msgspec.Raw(b"")
    ts: msgspec.Raw = msgspec.Raw(b"null")


_STAMPS = msgspec.json.Decoder(list[_Stamp])


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceInput:
    """One file before it is merged."""

    path: Path
    rank: int | None  # as the file states it; `by_rank` numbers the others
    metadata: dict[str, Any]
    first_ns: int | None
    """Time of one of its first events, less `base_ns`; None in a file without events."""

    @property
    def base_ns(self) -> int:
        """What its profiler subtracted from its stamps."""
        base = self.metadata.get("baseTimeNanoseconds")
        return base if type(base) is int and abs(base) < 1 << 62 else 0

    @property
    def has_wall_clock(self) -> bool:
        """Whether its times are Unix time once `base_ns` is added."""
        return self.first_ns is not None and self.base_ns + self.first_ns >= WALL_FROM_NS

    @property
    def host(self) -> str | None:
        """The machine it was recorded on, where the file states it."""
        for said in (self.metadata.get("haiprof"), self.metadata):
            host = said.get("host") or said.get("host_name") if isinstance(said, dict) else None
            if isinstance(host, str) and host:
                return host
        return None


def merge_files(sources: Sequence[Path], window: int | None) -> tuple[list[Path], int]:
    """The files to merge, and how many are of other windows."""
    every = list(dict.fromkeys(path for source in sources for path in trace_files(source)))
    chosen = one_window(every, window)
    return chosen, len(every) - len(chosen)


def merge_inputs(
    paths: Sequence[Path], *, ranks: frozenset[int] | None = None
) -> dict[int, TraceInput]:
    """Reads what the files state about themselves, by rank."""
    found = by_rank(trace_input(path) for path in paths)
    if ranks is None:
        return found
    missing = sorted(ranks - found.keys())
    if missing:
        raise TraceFormatError(
            f"{paths[0].parent}: no trace of rank {', '.join(map(str, missing))}",
            hint=f"there are ranks {', '.join(map(str, found))}",
        )
    return {rank: each for rank, each in found.items() if rank in ranks}


def trace_input(path: Path) -> TraceInput:
    """Reads what a file states about itself; all of it only where that stands behind the events."""
    text = TraceText(path)
    pieces = event_texts(text)
    _, first = next(pieces, (0, []))
    if not _SAID_BEFORE & text.metadata.keys():
        for _ in pieces:
            pass
    if MERGED_KEY in text.metadata:
        raise TraceFormatError(
            f"{path}: it is a merged trace already", hint="name the ranks' own traces"
        )
    # The earliest time in the first piece; metadata events may have the time 0.
    stamps = _STAMPS.decode(b"[" + b",".join(first) + b"]")
    times, good = exact_ns([bytes(each.ts) for each in stamps if bytes(each.ph) != b'"M"'])
    return TraceInput(
        path=path, rank=rank_of(path, text.metadata), metadata=text.metadata,
        first_ns=int(times[good].min()) if good.any() else None,
    )  # fmt: skip


Fields = dict[str, msgspec.Raw]  # one event; values as they are written

STRIDE = 1000
"""Rank 3's processes are 4000 to 4999; those below 1000 belong to no rank (nodes' counters)."""
PHASES_PLACE, COUNTERS_PLACE, _FIRST_PLACE = 0, 1, 2
_OVERFLOW = 2_000_000_000  # a rank with more processes than fit its thousand goes on here
_CPU_SORT, _DEVICE_SORT, _OTHER_SORT = 10, 100, 900

_NAME, _LABELS, _SORT = "process_name", "process_labels", "process_sort_index"
_HELD = {json.dumps(name).encode(): name for name in (_NAME, _LABELS, _SORT)}
_KEY_OF = {_NAME: "name", _LABELS: "labels", _SORT: "sort_index"}
_DEVICE = re.compile(r"(?!CPU)[A-Z]+ (\d{1,3})")
_ARGS: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True)
class _Process:
    """One process of one rank."""

    pid: int
    written: str  # its pid in the rank's own file
    labels: dict[str, str] = field(default_factory=dict)  # its name and label there


class Lanes:
    """The processes of one rank, numbered in order of appearance."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pids: dict[bytes, bytes] = {}
        """New one by the old one's JSON text; several texts may mean one process."""
        self._processes: dict[str, _Process] = {}
        self._held: list[tuple[str, _Process, Fields]] = []

    def pid(self, written: bytes) -> bytes:
        """The process's number in the merged trace."""
        found = self._pids.get(written)
        if found is None:
            found = self._pids[written] = b"%d" % self._process(written).pid
        return found

    def defer(self, event: Fields) -> bool:
        """Defers an event that names, labels or sorts a process; False for any other."""
        kind = _HELD.get(bytes(event.get("name", b"")))
        if kind is None:
            return False
        process = self._process(bytes(event.get("pid", b"")))
        value = _args(event).get(_KEY_OF[kind])
        if isinstance(value, str):
            process.labels[kind] = value
        self._held.append((kind, process, event))
        return True

    def deferred_events(self) -> Iterator[bytes]:
        """The deferred events, with the rank in names and sort indices."""
        for kind, process, event in self._held:
            event["pid"] = msgspec.Raw(b"%d" % process.pid)
            if kind != _LABELS:
                new = self._name(process) if kind == _NAME else self._sort_index(process)
                args = {**_args(event), _KEY_OF[kind]: new}
                event["args"] = msgspec.Raw(msgspec.json.encode(args))
            yield msgspec.json.encode(event)

    def added_events(self) -> Iterator[bytes]:
        """Names and sort indices for processes without any in the rank's file."""
        have = {(kind, process.pid) for kind, process, _ in self._held}
        for process in self._processes.values():
            named, placed = ((kind, process.pid) in have for kind in (_NAME, _SORT))
            name = None if named else self._name(process)
            index = None if placed else self._sort_index(process)
            yield from process_events(process.pid, name, index)

    def _process(self, written: bytes) -> _Process:
        name = _pid_text(written)
        found = self._processes.get(name)
        if found is None:
            place = _FIRST_PLACE + len(self._processes)
            # Far above every thousand, and a rank's own: no two ranks meet there.
            far = _OVERFLOW + self._rank * 10**7 + place
            pid = rank_pid(self._rank, place) if place < STRIDE else far
            found = self._processes[name] = _Process(pid, name)
        return found

    def _name(self, process: _Process) -> str:
        label, name = process.labels.get(_LABELS, ""), process.labels.get(_NAME, "")
        if _DEVICE.fullmatch(label) or not process.written.isdigit():
            shown = label or process.written or "no process"
        elif label:
            shown = f"{label} ({name} {process.written})" if name else f"{label} {process.written}"
        else:
            shown = f"{name or 'process'} {process.written}"
        return f"rank {self._rank}: {shown}"

    def _sort_index(self, process: _Process) -> int:
        label = process.labels.get(_LABELS, "")
        device = _DEVICE.fullmatch(label)
        place = _DEVICE_SORT + int(device[1]) if device else _OTHER_SORT
        return sort_index(self._rank, _CPU_SORT if label == "CPU" else min(place, STRIDE - 1))


def rank_pid(rank: int, place: int) -> int:
    """The number of a rank's process in the merged trace."""
    return (rank + 1) * STRIDE + place


def sort_index(rank: int, place: int) -> int:
    """The sort index of a rank's process: by rank, then by its own order."""
    return rank * STRIDE + place


def process_events(pid: int, name: str | None, index: int | None) -> Iterator[bytes]:
    """Events that name a process and set its sort index."""
    if name is not None:
        yield meta_event(_NAME, pid, 0, {"name": name})
    if index is not None:
        yield meta_event(_SORT, pid, 0, {"sort_index": index})


def meta_event(kind: str, pid: int, tid: int, args: Mapping[str, str | int]) -> bytes:
    """An event that names or sorts a process or a thread."""
    return msgspec.json.encode({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})


def _args(event: Fields) -> dict[str, Any]:
    try:
        return _ARGS.decode(event.get("args", msgspec.Raw(b"{}")))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _pid_text(written: bytes) -> str:
    """A pid as text: to a viewer 7 and "7" are one process."""
    try:
        value = json.loads(written) if written else ""
    except (ValueError, RecursionError):
        return written.decode("utf-8", "replace")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)


_MOST_LANES = 64
_COMPLETE, _ARROW_END = b'"X"', b'"f"'
_SCHEMA = {
    "event": pl.Int64, "pid": pl.Int64, "tid": pl.Int64, "lane": pl.Int64,
    "correlation": pl.Int64, "ts_ns": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLanes:
    """Events that leave their stream's lane, and the arrows that end at them."""

    places: tuple[int, ...] = ()  # in the file, in order
    tids: Mapping[int, int] = field(default_factory=dict)  # new thread by place
    arrows: Mapping[tuple[int, int], Mapping[int, int]] = field(default_factory=dict)
    """By the arrow's id and thread: new thread by time."""
    threads: tuple[tuple[int, int, int], ...] = ()  # process, stream and number of each lane

    def move(self, events: Sequence[Fields], first: int) -> None:
        """Moves some of the file's events to their lanes; all of their other fields stay."""
        if not self.places:
            return
        start = bisect_left(self.places, first)
        for place in self.places[start : bisect_left(self.places, first + len(events))]:
            event = events[place - first]
            if bytes(event.get("ph", b"")) == _COMPLETE:
                event["tid"] = msgspec.Raw(b"%d" % self.tids[place])
        for event in events:
            if bytes(event.get("ph", b"")) != _ARROW_END:
                continue
            number, tid = (bytes(event.get(key, b"")).strip(b'"') for key in ("id", "tid"))
            if number.isdigit() and tid.isdigit() and (int(number), int(tid)) in self.arrows:
                by_time = self.arrows[int(number), int(tid)]
                times, good = exact_ns([bytes(event.get("ts", b"null"))])
                if good[0] and int(times[0]) in by_time:
                    event["tid"] = msgspec.Raw(b"%d" % by_time[int(times[0])])

    def names(self, pids: Mapping[int, int]) -> Iterator[bytes]:
        """Events that name the lanes and put each below its stream."""
        for pid, tid, lane in self.threads:
            name = f"stream {tid}, overlapping" + (f" {lane}" if lane > 1 else "")
            place = pids[pid], tid + lane * LANE
            yield meta_event("thread_name", *place, {"name": name})
            yield meta_event("thread_sort_index", *place, {"sort_index": tid})


def overlapping_events(trace: Trace) -> pl.DataFrame:
    """The GPU events that must leave their stream's lane; a question for a pool.

    A viewer nests what stands in one lane, and drops a slice that begins within another one and
    ends after it: kernels by programmatic dependent launch, and branches of a CUDA graph.
    """
    if trace.report.lost_count:
        return pl.DataFrame(schema=_SCHEMA)
    kept = ("event", "pid", "tid", "ts_ns", "dur_ns")
    ranges = trace.annotations.filter(pl.col("category") == GPU_RANGES).select(*kept)
    every = pl.concat(
        [trace.columns.table("gpu").select(*kept, "correlation"), ranges], how="diagonal"
    ).filter(pl.col("pid").is_not_null() & pl.col("tid").is_between(0, LANE, closed="left"))
    ordered = every.sort("ts_ns", "dur_ns", "event", descending=[False, True, False])
    moved = [pl.DataFrame(schema=_SCHEMA)]
    for _, own in ordered.group_by("pid", "tid", maintain_order=True):
        starts: Ints = own["ts_ns"].to_numpy()
        ends: Ints = starts + own["dur_ns"].to_numpy()
        if (starts[1:] < np.maximum.accumulate(ends)[:-1]).any():
            lanes = _choose_lanes(zip(starts.tolist(), ends.tolist(), strict=True))
            placed = own.with_columns(lane=pl.Series(list(lanes), dtype=pl.Int64))
            moved.append(placed.filter(pl.col("lane") > 0).select(*_SCHEMA))
    return pl.concat(moved)


def stream_lanes(moved: pl.DataFrame) -> StreamLanes:
    """What `RankEvents` needs to move events to their lanes."""
    rows = moved.sort("event").with_columns(to=pl.col("tid") + LANE * pl.col("lane"))
    arrows: dict[tuple[int, int], dict[int, int]] = {}
    for number, tid, ts_ns, to in rows.select("correlation", "tid", "ts_ns", "to").iter_rows():
        arrows.setdefault((number or 0, tid), {})[ts_ns] = to
    threads = rows.select("pid", "tid", "lane").unique().sort("pid", "tid", "lane")
    return StreamLanes(
        places=tuple(rows["event"].to_list()), tids=dict(rows.select("event", "to").iter_rows()),
        arrows=arrows, threads=tuple(threads.rows()),
    )  # fmt: skip


def _choose_lanes(spans: Iterable[tuple[int, int]]) -> Iterator[int]:
    """Yields the first lane in which each span stands alone or within another one."""
    lanes: list[list[int]] = []
    for start, end in spans:
        for number, open_ends in enumerate(lanes):
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            if not open_ends or end <= open_ends[-1]:
                open_ends.append(end)
                yield number
                break
        else:
            yield len(lanes) if len(lanes) < _MOST_LANES else 0
            lanes += [[end]] * (len(lanes) < _MOST_LANES)
