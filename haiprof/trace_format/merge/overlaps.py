"""GPU events of one stream that overlap in part, which viewers drop, in lanes beside the stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.times import exact_ns
from haiprof.trace_format.merge.lanes import Fields

LANE = 50_000_000
"""Added to a stream's or thread's number, once per lane: more than any such number (Linux counts
threads to 4 million), and 64 of them fit the 32 bits that Perfetto reads."""
_MOST_LANES = 64
_GPU_RANGES = "gpu_user_annotation"
_COMPLETE, _ARROW_END = b'"X"', b'"f"'
_SCHEMA = {
    "event": pl.Int64, "pid": pl.Int64, "tid": pl.Int64, "lane": pl.Int64,
    "correlation": pl.Int64, "ts_ns": pl.Int64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLanes:
    """Events that leave their stream's lane, and the arrows that end at them."""

    places: tuple[int, ...] = ()
    """In the file, in order."""
    tids: Mapping[int, int] = field(default_factory=dict)
    """New thread by place."""
    arrows: Mapping[tuple[int, int], Mapping[int, int]] = field(default_factory=dict)
    """By the arrow's id and thread: new thread by time."""
    threads: tuple[tuple[int, int, int], ...] = ()
    """Process, stream and number of each lane."""

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
            if bytes(event.get("ph", b"")) == _ARROW_END:
                self._move_arrow(event)

    def names(self, pids: Mapping[int, int]) -> Iterator[bytes]:
        """Events that name the lanes and put each below its stream."""
        encode = msgspec.json.Encoder().encode
        for pid, tid, lane in self.threads:
            name = f"stream {tid}, overlapping" + (f" {lane}" if lane > 1 else "")
            event = {"ph": "M", "pid": pids[pid], "tid": tid + lane * LANE}
            yield encode({**event, "name": "thread_name", "args": {"name": name}})
            yield encode({**event, "name": "thread_sort_index", "args": {"sort_index": tid}})

    def _move_arrow(self, event: Fields) -> None:
        number, tid = (bytes(event.get(key, b"")).strip(b'"') for key in ("id", "tid"))
        if not (number.isdigit() and tid.isdigit()):
            return
        by_time = self.arrows.get((int(number), int(tid)))
        if by_time is None:
            return
        times, good = exact_ns([bytes(event.get("ts", b"null"))])
        if good[0] and (moved := by_time.get(int(times[0]))) is not None:
            event["tid"] = msgspec.Raw(b"%d" % moved)


def overlapping_events(trace: Trace) -> pl.DataFrame:
    """The GPU events that must leave their stream's lane; a question for a pool.

    A viewer nests what stands in one lane, and drops a slice that begins within another one and
    ends after it: kernels by programmatic dependent launch, and branches of a CUDA graph.
    """
    if trace.report.lost_count:
        return pl.DataFrame(schema=_SCHEMA)
    kept = ("event", "pid", "tid", "ts_ns", "dur_ns")
    ranges = trace.annotations.filter(pl.col("category") == _GPU_RANGES).select(*kept)
    every = pl.concat(
        [trace.columns.table("gpu").select(*kept, "correlation"), ranges], how="diagonal"
    ).filter(pl.col("pid").is_not_null() & pl.col("tid").is_between(0, LANE, closed="left"))
    parts = [
        own.with_columns(lane=pl.Series(_lanes_of(own), dtype=pl.Int64))
        for _, own in every.sort(
            "ts_ns", "dur_ns", "event", descending=[False, True, False]
        ).group_by("pid", "tid", maintain_order=True)
    ]
    moved = [own.filter(pl.col("lane") > 0).select(*_SCHEMA) for own in parts]
    return pl.concat([pl.DataFrame(schema=_SCHEMA), *moved])


def stream_lanes(moved: pl.DataFrame) -> StreamLanes:
    """What `RankEvents` needs to move events to their lanes."""
    rows = moved.sort("event").with_columns(to=pl.col("tid") + LANE * pl.col("lane"))
    arrows: dict[tuple[int, int], dict[int, int]] = {}
    for number, tid, ts_ns, to in rows.select("correlation", "tid", "ts_ns", "to").iter_rows():
        arrows.setdefault((number or 0, tid), {})[ts_ns] = to
    threads = rows.select("pid", "tid", "lane").unique().sort("pid", "tid", "lane")
    return StreamLanes(
        places=tuple(rows["event"].to_list()),
        tids=dict(rows.select("event", "to").iter_rows()),
        arrows=arrows,
        threads=tuple(threads.rows()),
    )


def _lanes_of(events: pl.DataFrame) -> Ints:
    """The lane of each event of one stream, 0 for the stream's own."""
    starts: Ints = events["ts_ns"].to_numpy()
    ends: Ints = starts + events["dur_ns"].to_numpy()
    found = np.zeros(len(starts), dtype=np.int64)
    if (starts[1:] >= np.maximum.accumulate(ends)[:-1]).all():
        return found
    found[:] = list(_choose_lanes(zip(starts.tolist(), ends.tolist(), strict=True)))
    return found


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
            fits = len(lanes) < _MOST_LANES
            if fits:
                lanes.append([end])
            yield len(lanes) - 1 if fits else 0
