"""Merges traces of several ranks into one timeline; the text of each is streamed once."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation, localcontext
from itertools import islice
from pathlib import Path
from typing import IO, Any

import msgspec
import polars as pl

from haiprof.base.errors import HaiprofError, UsageError, convert_os_errors
from haiprof.base.safe_files import named_file
from haiprof.run_format.phase_ranges import is_phase
from haiprof.trace_format import merge_inputs
from haiprof.trace_format.find import MERGED_KEY
from haiprof.trace_format.kineto.columns import exact_ns
from haiprof.trace_format.kineto.decode import Damage, decode
from haiprof.trace_format.kineto.events import Decoder
from haiprof.trace_format.kineto.text import TraceText, is_utf8, scrub

ID_STRIDE = 10_000_000_000
"""Rank 3's arrow 4711 is 30000004711: both can be read off. Kineto's ids are of 32 bits."""
_EXACT_LIMIT = 1 << 53  # a browser's numbers are exact below


def ranked_id(rank: int, written: bytes) -> bytes:
    """Makes an id unique to its rank."""
    digits = written.strip(b'"')
    is_plain = digits.isdigit() and (digits[:1] != b"0" or digits == b"0")
    if is_plain and len(digits) < len(str(ID_STRIDE)):
        ranked = rank * ID_STRIDE + int(digits)
        if ranked < _EXACT_LIMIT:
            return b"%d" % ranked
    found = hashlib.blake2b(b"%d " % rank + digits, digest_size=8)
    return b'"0x' + found.hexdigest().encode() + b'"'


_DIGITS_LIMIT = 40  # a number with more digits than this is not a time and stays unchanged
_NS_DIGITS = 3  # of a microsecond
_PLAIN_FROM_NS = 1000  # from here on there is a digit before the dot


def shift_time(us: bytes, shift_ns: int) -> bytes:
    """Shifts a time, also a negative one, one with an exponent or in quotes."""
    whole, _, part = us.partition(b".")
    if len(part) == _NS_DIGITS and whole.isdigit() and part.isdigit() and len(us) < _DIGITS_LIMIT:
        ns = int(whole + part) + shift_ns  # as profilers write it
        if ns >= _PLAIN_FROM_NS:
            text = b"%d" % ns
            return text[:-_NS_DIGITS] + b"." + text[-_NS_DIGITS:]
    try:
        value = Decimal(us.strip(b'"').decode())
    except (InvalidOperation, UnicodeDecodeError):
        return us
    if not value.is_finite() or len(us) > _DIGITS_LIMIT or abs(value.adjusted()) > _DIGITS_LIMIT:
        return us
    with localcontext() as context:
        context.prec = 4 * _DIGITS_LIMIT
        return f"{value + Decimal(shift_ns).scaleb(-_NS_DIGITS):f}".encode()


def us_text(ns: int) -> str:
    """Nanoseconds as a trace writes times: us with three digits behind the dot."""
    return f"{'-' if ns < 0 else ''}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


_EVENTS: Decoder = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_META, _ZERO = b'"M"', msgspec.Raw(b"0")
_TAIL_EVENTS = 1000

Range = tuple[int, int]  # start and end in ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """How one rank's file is to be merged."""

    source: merge_inputs.TraceInput
    rank: int
    shift_ns: int  # added to its times
    between: Range | None  # only what touches this range of its own times; None takes all
    clock: Mapping[str, Any]  # how its clock was found, for the output's metadata
    streams: merge_inputs.StreamLanes = field(default_factory=merge_inputs.StreamLanes)
    """Events that leave the lane of their stream."""
    without_phases: bool = False
    """Leaves out the forward and backward ranges that haiprof added: a track shows them."""


@dataclass(slots=True)
class RankEvents:
    """Rewrites one rank's events."""

    plan: RankPlan
    base_ns: int = 0  # Unix time that the merged trace counts from
    text: TraceText = field(init=False)
    lanes: merge_inputs.Lanes = field(init=False)
    damage: Damage = field(default_factory=Damage)
    event_count: int = 0  # of the file, that could be read
    passed_count: int = 0  # of those, that are in the merged trace
    added_count: int = 0
    """Added events that name processes without a name in the file, and lanes beside streams."""
    range_ns: Range | None = None
    """First and last start of the written events, in Unix time on the merged trace's clock."""

    def __post_init__(self) -> None:
        """Creates the mutable state; the file is opened by `pieces`."""
        self.text, self.lanes = TraceText(self.plan.source.path), merge_inputs.Lanes(self.plan.rank)

    def pieces(self) -> Iterator[bytes]:
        """The events' new text, separated by commas; no piece is empty."""
        streams = self.plan.streams
        for piece in self.text.pieces():
            events: list[merge_inputs.Fields] = decode(piece, self.text, self.damage, _EVENTS)
            streams.move(events, self.event_count)
            self.event_count += len(events)
            if self.plan.without_phases:
                events = [event for event in events if not is_phase(event)]
            whole = b",\n".join(self._rewrite(self._choose(events)))
            if whole:
                yield whole if whole.isascii() or is_utf8(whole) else scrub(whole)
        held = list(self.lanes.deferred_events())
        self.passed_count += len(held)
        pids = {pid: int(self.lanes.pid(b"%d" % pid)) for pid, _, _ in streams.threads}
        added = [*self.lanes.added_events(), *streams.names(pids)]
        self.added_count = len(added)
        for start in range(0, len(held) + len(added), _TAIL_EVENTS):
            yield b",\n".join((held + added)[start : start + _TAIL_EVENTS])

    @property
    def notes(self) -> list[str]:
        """Notes on what could not be read of the file, for people."""
        damage, cut = self.damage, self.text.truncated_bytes
        counted = (
            (cut is not None,
             f"the file is cut off: {cut} bytes after the last whole event left out"),
            (damage.lost_count, f"{damage.lost_count} events cannot be read and are left out, such "
                                f"as {' and '.join(map(repr, damage.examples[:1]))}"),
            (damage.repaired_count, f"{damage.repaired_count} pieces held values that are no JSON "
                                    "(NaN, stray bytes): they are null"),
            (not self.event_count, "it holds no events"),
        )  # fmt: skip
        found = [*self.text.notes, *(note for is_so, note in counted if is_so)]
        return [f"{self.text.path}: {note}" for note in found]

    def _rewrite(self, events: Sequence[merge_inputs.Fields]) -> list[bytes]:
        shift_ns, rank, lanes = self.plan.shift_ns, self.plan.rank, self.lanes
        encode, found = msgspec.json.Encoder().encode, []
        for event in events:
            if shift_ns and "ts" in event:
                event["ts"] = msgspec.Raw(shift_time(bytes(event["ts"]), shift_ns))
            if _is_meta(event) and lanes.defer(event):
                continue
            event["pid"] = msgspec.Raw(lanes.pid(bytes(event.get("pid", b""))))
            for key in ("id", "bind_id"):
                if key in event:
                    event[key] = msgspec.Raw(ranked_id(rank, bytes(event[key])))
            found.append(encode(event))
        self.passed_count += len(found)
        return found

    def _choose(self, events: list[merge_inputs.Fields]) -> list[merge_inputs.Fields]:
        """The events within the range; extends the range of written times by theirs."""
        timed = [event for event in events if "ts" in event and not _is_meta(event)]
        if not timed:
            return events
        start, passes = exact_ns([bytes(event["ts"]) for event in timed])
        if self.plan.between is not None:
            first_ns, after_ns = self.plan.between
            dur, has_dur = exact_ns([bytes(event.get("dur", _ZERO)) for event in timed])
            passes &= (start + dur * has_dur >= first_ns) & (start < after_ns)
            dropped = {id(timed[at]) for at in (~passes).nonzero()[0].tolist()}
            events = [event for event in events if id(event) not in dropped]
        if passes.any():
            first, last = int(start[passes].min()), int(start[passes].max())
            first, last = (ns + self.plan.shift_ns + self.base_ns for ns in (first, last))
            known = self.range_ns or (first, last)
            self.range_ns = min(first, known[0]), max(last, known[1])
        return events


def _is_meta(event: merge_inputs.Fields) -> bool:
    return bytes(event.get("ph", b"")) == _META


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One process of the merged trace that no rank's file has.

    Its times are Unix time on the clock of the merged trace.
    """

    pid: int
    name: str
    sort_index: int
    threads: tuple[str, ...] = ()  # names of its threads, from 0
    counters: pl.DataFrame | None = None
    """`time_ns`, `name`, `unit`, `value`; a row without a value is left out."""
    spans: pl.DataFrame | None = None
    """`thread` (place in `threads`), `name`, `start_ns`, `duration_ns`, and further columns, which
    become arguments where they are not null."""


def track_events(track: Track, base_ns: int) -> Iterator[bytes]:
    """The track's events as JSON, one at a time."""
    yield from merge_inputs.process_events(track.pid, track.name, track.sort_index)
    for place, name in enumerate(track.threads):
        yield merge_inputs.meta_event("thread_name", track.pid, place, {"name": name})
    encode = msgspec.json.Encoder().encode

    def event(phase: str, name: str, start_ns: int, **fields: object) -> bytes:
        ts = msgspec.Raw(us_text(start_ns - base_ns).encode())
        own = {"ph": phase, "cat": "haiprof", "name": name, "pid": track.pid, "ts": ts}
        return encode({**own, **fields})

    if track.counters is not None:
        named = track.counters.select("time_ns", "name", "unit", "value").drop_nulls("value")
        for time_ns, name, unit, value in named.iter_rows():
            yield event("C", name, time_ns, tid=0, args={unit or "value": value})
    for row in () if track.spans is None else track.spans.iter_rows(named=True):
        own = (row.pop(key) for key in ("name", "start_ns", "thread", "duration_ns"))
        name, start_ns, tid, duration_ns = own
        dur = msgspec.Raw(us_text(duration_ns).encode())
        args = {key: value for key, value in row.items() if value is not None}
        yield event("X", name, start_ns, tid=tid, dur=dur, args=args)


STDOUT = Path("-")
_GZIP_LEVEL = 1
_WAITING_PIECES = 8


class Sink:
    """Writes text in a second thread; only a few pieces wait in its queue."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._thread = ThreadPoolExecutor(1)
        self._waiting: deque[Future[int]] = deque()
        self._separator = b""
        self.text_bytes = 0

    def write(self, text: bytes) -> None:
        """Queues a piece; an error of an earlier one is raised here or in `close`."""
        if len(self._waiting) >= _WAITING_PIECES:
            self._waiting.popleft().result()
        self.text_bytes += len(text)
        self._waiting.append(self._thread.submit(self._file.write, text))

    def add_events(self, text: bytes) -> None:
        """Queues events, with a comma behind those before them."""
        self.write(self._separator + text)
        self._separator = b",\n"

    def close(self) -> None:
        """Waits until all is written."""
        try:
            while self._waiting:
                self._waiting.popleft().result()
        finally:
            self._thread.shutdown(cancel_futures=True)


@contextmanager
def packed_file(path: Path) -> Iterator[Sink]:
    """A sink for a file that gets its name only once it is complete."""
    if path == STDOUT:
        with closing(Sink(sys.stdout.buffer)) as sink:
            yield sink
        sys.stdout.buffer.flush()
        return
    hint = "name a file that can be written: -o FILE"
    with convert_os_errors(HaiprofError, str(path), hint=hint), ExitStack() as files:
        file: Any = files.enter_context(named_file(path))
        if path.name.endswith(".gz"):
            file = files.enter_context(gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
        yield files.enter_context(closing(Sink(file)))


def check_target(path: Path, inputs: list[Path], *, force: bool) -> None:
    """Refuses an output path that would overwrite something."""
    if path == STDOUT:
        return
    for given in inputs:
        if path.exists() and path.samefile(given):
            raise UsageError(f"{path}: it is one of the traces to merge", hint="-o OTHER.json.gz")
    if path.is_dir():
        raise UsageError(f"{path}: it is a folder", hint=f"-o {path / 'merged.json.gz'}")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path}: it already exists", hint="--force replaces it")


VERSION = 1  # of what stands under `MERGED_KEY` and `RANKS_KEY`; 1: first
RANKS_KEY = "haiprof_ranks"
"""Metadata of the merged trace: of each rank its file, clock, losses and own metadata."""
_BATCH = 1000
_TAKEN_OUT = ("distributedInfo", "deviceProperties")

Progress = Callable[[int, int], None]
"""Called from time to time with (rank, bytes of text read so far)."""
Tracks = Callable[[Mapping[int, Range]], Iterable[Track]]
"""Tracks for the time that each rank's trace covers: Unix time on the merged trace's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedTrace:
    """What was written."""

    ranks: tuple[RankEvents, ...]
    track_event_count: int  # of counters and phases, with the names of their processes
    text_bytes: int  # of the output, before packing

    @property
    def event_count(self) -> int:
        """All events of the output."""
        own = sum(rank.passed_count + rank.added_count for rank in self.ranks)
        return own + self.track_event_count


def write_merged(
    path: Path, plans: Sequence[RankPlan], *, base_ns: int, about: Mapping[str, Any],
    tracks: Tracks | None = None, progress: Progress | None = None,
) -> MergedTrace:  # fmt: skip
    """Writes all ranks into one file, each read once and in pieces."""
    ranks, count = [RankEvents(plan, base_ns) for plan in plans], 0
    with packed_file(path) as sink:
        head = {
            "schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns,
            MERGED_KEY: {"version": VERSION, **about},
        }  # fmt: skip
        sink.write(msgspec.json.encode(head)[:-1] + b',\n"traceEvents": [\n')
        for rank in ranks:
            for piece in rank.pieces():
                sink.add_events(piece)
                if progress is not None:
                    progress(rank.plan.rank, rank.text.size_bytes)
        ranges = {rank.plan.rank: rank.range_ns for rank in ranks if rank.range_ns is not None}
        for track in tracks(ranges) if tracks else ():
            events = track_events(track, base_ns)
            while batch := list(islice(events, _BATCH)):
                sink.add_events(b",\n".join(batch))
                count += len(batch)
        # Where the events are from, and how their times were changed.
        said = ((each, each.text.metadata) for each in ranks)
        tail = {RANKS_KEY: [
            {
                "rank": each.plan.rank, "file": each.text.path.name, "clock": each.plan.clock,
                "event_count": each.event_count, "passed_count": each.passed_count,
                "lost_count": each.damage.lost_count, "notes": each.notes,
                **{key: own[key] for key in _TAKEN_OUT if key in own},
                "metadata": {key: own[key] for key in own if key not in _TAKEN_OUT},
            }
            for each, own in said
        ]}  # fmt: skip
        sink.write(b"\n],\n" + msgspec.json.encode(tail)[1:] + b"\n")
    return MergedTrace(ranks=tuple(ranks), track_event_count=count, text_bytes=sink.text_bytes)
