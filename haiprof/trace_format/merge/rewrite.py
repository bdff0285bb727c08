"""One rank's events as they go into the merged trace: its own processes, ids and clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from haiprof.base.arrays import Ints
from haiprof.run_format.added_ranges import is_phase
from haiprof.trace_format.kineto.decode import Damage, decode
from haiprof.trace_format.kineto.events import Decoder
from haiprof.trace_format.kineto.scan import is_utf8, scrub
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.kineto.times import Flags, exact_ns
from haiprof.trace_format.merge.ids import ranked_id
from haiprof.trace_format.merge.lanes import Fields, Lanes
from haiprof.trace_format.merge.overlaps import StreamLanes
from haiprof.trace_format.merge.timestamps import shift_time

_EVENTS: Decoder = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_META, _ZERO = b'"M"', msgspec.Raw(b"0")
_TAIL_EVENTS = 1000

Range = tuple[int, int]
"""Start and end in ns."""


@dataclass(slots=True)
class RankEvents:
    """Rewrites one rank's events."""

    path: Path
    rank: int
    shift_ns: int
    between: Range | None
    without_phases: bool = False
    streams: StreamLanes = field(default_factory=StreamLanes)
    text: TraceText = field(init=False)
    lanes: Lanes = field(init=False)
    damage: Damage = field(default_factory=Damage)
    event_count: int = 0
    """Of the file, that could be read."""
    passed_count: int = 0
    """Of those, that are in the merged trace."""
    added_count: int = 0
    """Added events that name processes without a name in the file, and lanes beside streams."""
    range_ns: Range | None = None
    """First and last start of the written events, in the merged trace's times."""

    def __post_init__(self) -> None:
        """Creates the mutable state; the file is opened by `pieces`."""
        self.text, self.lanes = TraceText(self.path), Lanes(self.rank)

    def pieces(self) -> Iterator[bytes]:
        """The events' new text, separated by commas; no piece is empty."""
        for piece in self.text.pieces():
            events: list[Fields] = decode(piece, self.text, self.damage, _EVENTS)
            self.streams.move(events, self.event_count)
            self.event_count += len(events)
            if self.without_phases:
                events = [event for event in events if not is_phase(event)]
            whole = b",\n".join(self._rewrite(self._choose(events)))
            if whole:
                yield whole if whole.isascii() or is_utf8(whole) else scrub(whole)
        held = list(self.lanes.deferred_events())
        self.passed_count += len(held)
        pids = {pid: int(self.lanes.pid(b"%d" % pid)) for pid, _, _ in self.streams.threads}
        added = [*self.lanes.added_events(), *self.streams.names(pids)]
        self.added_count = len(added)
        for start in range(0, len(held) + len(added), _TAIL_EVENTS):
            yield b",\n".join((held + added)[start : start + _TAIL_EVENTS])

    def notes(self) -> list[str]:
        """Notes on what could not be read of the file, for people."""
        damage, cut = self.damage, self.text.truncated_bytes
        found = list(self.text.notes)
        if cut is not None:
            found.append(f"the file is cut off: {cut} bytes after the last whole event left out")
        if damage.lost_count:
            found.append(
                f"{damage.lost_count} events cannot be read and are left out, such as "
                f"{damage.examples[0]!r}"
            )
        if damage.repaired_count:
            found.append(
                f"{damage.repaired_count} pieces held values that are no JSON (NaN, stray bytes): "
                "they are null"
            )
        if not self.event_count:
            found.append("it holds no events")
        return [f"{self.path}: {note}" for note in found]

    def _rewrite(self, events: Sequence[Fields]) -> list[bytes]:
        shift_ns, rank, lanes = self.shift_ns, self.rank, self.lanes
        encode, found = msgspec.json.Encoder().encode, []
        for event in events:
            if shift_ns and "ts" in event:
                event["ts"] = msgspec.Raw(shift_time(bytes(event["ts"]), shift_ns))
            if _is_meta(event) and lanes.defer(event):
                continue
            event["pid"] = msgspec.Raw(lanes.pid(bytes(event.get("pid", b""))))
            if "id" in event:
                event["id"] = msgspec.Raw(ranked_id(rank, bytes(event["id"])))
            if "bind_id" in event:
                event["bind_id"] = msgspec.Raw(ranked_id(rank, bytes(event["bind_id"])))
            found.append(encode(event))
        self.passed_count += len(found)
        return found

    def _choose(self, events: list[Fields]) -> list[Fields]:
        """The events within the range; extends the range of written times by theirs."""
        timed = [event for event in events if "ts" in event and not _is_meta(event)]
        if not timed:
            return events
        start, passes = exact_ns([bytes(event["ts"]) for event in timed])
        if self.between is not None:
            passes &= self._touches(timed, start)
            dropped = {id(timed[at]) for at in (~passes).nonzero()[0].tolist()}
            events = [event for event in events if id(event) not in dropped]
        if passes.any():
            first, last = int(start[passes].min()), int(start[passes].max())
            first, last = first + self.shift_ns, last + self.shift_ns
            known = self.range_ns or (first, last)
            self.range_ns = min(first, known[0]), max(last, known[1])
        return events

    def _touches(self, events: list[Fields], start: Ints) -> Flags:
        """Which events are, in part at least, within the range."""
        first, after = self.between or (0, 0)
        dur, has_dur = exact_ns([bytes(event.get("dur", _ZERO)) for event in events])
        return (start + dur * has_dur >= first) & (start < after)


def _is_meta(event: Fields) -> bool:
    return bytes(event.get("ph", b"")) == _META
