"""Writes the merged trace: every rank's events, tracks, and notes on what was changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from haiprof.trace_format.file_ranks import MERGED_KEY
from haiprof.trace_format.merge.inputs import TraceInput
from haiprof.trace_format.merge.overlaps import StreamLanes
from haiprof.trace_format.merge.packed_file import Sink, packed_file
from haiprof.trace_format.merge.rewrite import Range, RankEvents
from haiprof.trace_format.merge.tracks import Track, track_events

VERSION = 1
"""Of what stands under `MERGED_KEY` and `RANKS_KEY`. 1: first."""
RANKS_KEY = "haiprof_ranks"
"""Metadata of the merged trace: of each rank its file, clock, losses and own metadata."""
_BATCH = 1000
_TAKEN_OUT = ("distributedInfo", "deviceProperties")

Progress = Callable[[int, int], None]
"""Called from time to time with (rank, bytes of text read so far)."""
Tracks = Callable[[Mapping[int, Range]], Iterable[Track]]
"""Tracks for the time that each rank's trace covers: Unix time on the merged trace's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How one rank's file is to be merged."""

    source: TraceInput
    rank: int
    shift_ns: int
    """Added to its times."""
    between: Range | None
    """Only what touches this range of its own times; None takes all."""
    clock: Mapping[str, Any]
    """How its clock was found, for the output's metadata."""
    streams: StreamLanes = field(default_factory=StreamLanes)
    """Events that leave the lane of their stream."""
    without_phases: bool = False
    """Leaves out the forward and backward ranges that haiprof added: a track shows them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRank:
    """The result of merging one rank's file."""

    rank: int
    path: Path
    text_bytes: int
    event_count: int
    """That could be read."""
    passed_count: int
    """Of those, that are in the merged trace."""
    lost_count: int
    added_count: int
    range_ns: Range | None
    """First and last start, in Unix time on the merged trace's clock; None without events."""
    notes: tuple[str, ...]
    metadata: Mapping[str, Any]
    """Everything in the file other than its events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrace:
    """What was written."""

    ranks: tuple[MergedRank, ...]
    track_event_count: int
    """Of counters and phases, with the names of their processes."""
    text_bytes: int
    """Of the output, before packing."""

    @property
    def event_count(self) -> int:
        """All events of the output."""
        own = sum(rank.passed_count + rank.added_count for rank in self.ranks)
        return own + self.track_event_count


def write_merged(
    path: Path,
    plans: Sequence[RankPlan],
    *,
    base_ns: int,
    about: Mapping[str, Any],
    tracks: Tracks | None = None,
    progress: Progress | None = None,
) -> MergedTrace:
    """Writes all ranks into one file, each read once and in pieces."""
    with packed_file(path) as sink:
        writer = _Writer(sink)
        head = {
            "schemaVersion": 1,
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": base_ns,
            MERGED_KEY: {"version": VERSION, **about},
        }
        sink.write(msgspec.json.encode(head)[:-1] + b',\n"traceEvents": [\n')
        ranks = [_write_rank(writer, plan, base_ns, progress) for plan in plans]
        ranges = {rank.rank: rank.range_ns for rank in ranks if rank.range_ns is not None}
        count = 0
        for track in tracks(ranges) if tracks else ():
            count += writer.events(track_events(track, base_ns))
        merged = MergedTrace(ranks=tuple(ranks), track_event_count=count, text_bytes=0)
        tail = {RANKS_KEY: _about(plans, merged)}
        sink.write(b"\n],\n" + msgspec.json.encode(tail)[1:] + b"\n")
    return replace(merged, text_bytes=sink.text_bytes)


class _Writer:
    """Writes pieces with commas in between."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._separator = b""

    def piece(self, text: bytes) -> None:
        """Events separated by commas."""
        self._sink.write(self._separator + text)
        self._separator = b",\n"

    def events(self, events: Iterator[bytes]) -> int:
        """Events one by one; returns how many."""
        count, batch = 0, []
        for event in events:
            batch.append(event)
            count += 1
            if len(batch) == _BATCH:
                self.piece(b",\n".join(batch))
                batch = []
        if batch:
            self.piece(b",\n".join(batch))
        return count


def _write_rank(
    writer: _Writer, plan: RankPlan, base_ns: int, progress: Progress | None
) -> MergedRank:
    events = RankEvents(
        plan.source.path, plan.rank, plan.shift_ns, plan.between,
        without_phases=plan.without_phases, streams=plan.streams,
    )  # fmt: skip
    for piece in events.pieces():
        writer.piece(piece)
        if progress is not None:
            progress(plan.rank, events.text.size_bytes)
    found = events.range_ns
    return MergedRank(
        rank=plan.rank,
        path=plan.source.path,
        text_bytes=events.text.size_bytes,
        event_count=events.event_count,
        passed_count=events.passed_count,
        lost_count=events.damage.lost_count,
        added_count=events.added_count,
        range_ns=(found[0] + base_ns, found[1] + base_ns) if found else None,
        notes=tuple(events.notes()),
        metadata=events.text.metadata,
    )


def _about(plans: Sequence[RankPlan], merged: MergedTrace) -> list[dict[str, Any]]:
    """Metadata on where the events are from, and how their times were changed."""
    ranks = []
    for plan, rank in zip(plans, merged.ranks, strict=True):
        said = rank.metadata
        ranks.append(
            {
                "rank": rank.rank,
                "file": rank.path.name,
                "clock": plan.clock,
                "event_count": rank.event_count,
                "passed_count": rank.passed_count,
                "lost_count": rank.lost_count,
                "notes": rank.notes,
                **{key: said[key] for key in _TAKEN_OUT if key in said},
                "metadata": {key: said[key] for key in said if key not in _TAKEN_OUT},
            }
        )
    return ranks
