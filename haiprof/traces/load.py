"""Reads one trace file into frames, piece by piece, with a report of what was read and what not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.errors import TraceFormatError
from haiprof.traces.columns import BATCH_ROWS, Names, TableBatch
from haiprof.traces.decode import Damage, arguments, decode
from haiprof.traces.events import EXACT_HEADS, HEADS
from haiprof.traces.tables import MEMORY, REDUNDANT_CATEGORIES, TABLE_OF_CATEGORY, TABLES
from haiprof.traces.text import TraceText
from haiprof.traces.times import Flags, Ints, exact_times, times

Sink = Callable[[str, pl.DataFrame], None]
"""Takes a part of a table; texts are codes."""

_MEMORY_NAME = "[memory]"  # before 2022 such events had no category
# Halves of an event, whose duration would have to be put together. Kineto writes none.
_HALF_PHASES = frozenset("BEben")
_KINDS_LIMIT = 1000  # of events that no table holds, by phase and category

# Categories as small numbers: those of a table, those that are redundant, and all others.
_CATEGORIES = (*TABLE_OF_CATEGORY, *REDUNDANT_CATEGORIES)
_OTHER = len(_CATEGORIES)
_TABLE_NAMES = tuple(TABLES)
_MEMORY = _TABLE_NAMES.index(MEMORY)
_TABLE_OF_CODE = np.array(
    [_TABLE_NAMES.index(table) for table in TABLE_OF_CATEGORY.values()]
    + [-1] * (len(REDUNDANT_CATEGORIES) + 1),
    dtype=np.int8,
)


class _Codes(dict[Any, int]):
    def __missing__(self, category: object) -> int:
        return _OTHER


_CODES = _Codes({category: code for code, category in enumerate(_CATEGORIES)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of a file's events; the counts add up to `event_count`."""

    path: str
    text_bytes: int
    """Of JSON, decompressed."""
    event_count: int
    """Seen in the file, lost ones included."""
    kept: Mapping[str, int]
    """By table."""
    redundant: Mapping[str, int]
    """By category: arrows that say what correlations say."""
    not_used: Mapping[str, int]
    """By phase and category: metadata, counters, marks that no table holds."""
    bad_time_count: int
    """Events without a usable time: not a number, negative or beyond a century."""
    lost_count: int
    """Events that are no JSON, or not of the form of an event."""
    repaired_count: int
    """Pieces of text read after values that are no JSON were taken out."""
    truncated_bytes: int | None
    """Of an unfinished last event, where the file ends without closing its events; else null."""
    odd_arguments_count: int
    """Events some of whose arguments are of a wrong type and missing for it."""
    examples: tuple[str, ...]
    """The beginning of the first lost events."""
    file_notes: tuple[str, ...]
    """What is wrong with the file beside its events."""

    @property
    def notes(self) -> list[str]:
        """What a person must know, for people."""
        counted = (
            (self.truncated_bytes is not None,
             f"the file is cut off: {self.truncated_bytes} bytes after the last whole event"),
            (self.lost_count, f"{self.lost_count} events cannot be read, such as "
                              + " and ".join(map(repr, self.examples[:1]))),
            (self.repaired_count, f"{self.repaired_count} pieces held values that are no JSON "
                                  "(NaN, stray bytes): read without them"),
            (self.odd_arguments_count, f"{self.odd_arguments_count} events had arguments of a "
                                       "wrong type: those are missing"),
            (self.bad_time_count,
             f"{self.bad_time_count} events without a usable time were left out"),
            (not self.event_count, "it holds no events"),
        )  # fmt: skip
        found = [*self.file_notes, *(note for is_so, note in counted if is_so)]
        return [f"{self.path}: {note}" for note in found]


@dataclass(slots=True)
class _Reading:
    """A file that is being read."""

    names: Names
    sink: Sink
    damage: Damage = field(default_factory=Damage)
    events: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    not_used: Counter[str] = field(default_factory=Counter)
    bad_time: int = 0
    batches: list[TableBatch] = field(
        default_factory=lambda: [TableBatch(table) for table in _TABLE_NAMES]
    )


def read_trace(path: Path, sink: Sink) -> tuple[dict[str, Any], list[str], LoadReport]:
    """Reads a file once.

    Args:
        path: A trace of Kineto, plain or gzip.
        sink: Gets the tables' parts, in the file's order.

    Returns:
        The metadata around the events, the texts by code, and the report.

    Raises:
        TraceFormatError: It is not a trace or cannot be read.
    """
    text, reading = TraceText(path), _Reading(Names(path), sink)
    decoder = HEADS
    for piece in text.pieces():
        events = _sorted_out(decode(piece, text, reading.damage, decoder))
        found = exact_times(events.own) if decoder is EXACT_HEADS else times(events.own)
        if found is None:
            decoder = EXACT_HEADS
            events = _sorted_out(decode(piece, text, Damage(), decoder))
            found = exact_times(events.own)
        _count(events, reading)
        if events.own:
            _add(events, found, reading)
        reading.events += len(events.heads)
    for batch in reading.batches:
        if batch.row_count:
            sink(batch.table, batch.take())
    report = _report(text, reading)
    _refuse_strangers(report)
    return text.metadata, reading.names.texts(), report


@dataclass(frozen=True, slots=True)
class _Events:
    """The events of one piece by what becomes of them."""

    heads: list[Any]
    codes: npt.NDArray[np.uint8]
    """Of their categories."""
    others: list[Any]
    """Those that no table has and that are not redundant."""
    places: Ints
    """Of those that a table has, among `heads`."""
    tables: npt.NDArray[np.int8]
    """Which, by place in `_TABLE_NAMES`."""
    own: list[Any]
    """Those themselves."""


def _sorted_out(heads: list[Any]) -> _Events:
    codes = np.frombuffer(bytes(map(_CODES.__getitem__, [head.cat for head in heads])), np.uint8)
    tables, others = _TABLE_OF_CODE[codes], []
    for at in np.flatnonzero(codes == _OTHER).tolist():
        if heads[at].name == _MEMORY_NAME:
            tables[at] = _MEMORY
        else:
            others.append(heads[at])
    places = np.flatnonzero(tables >= 0)
    own = [heads[at] for at in places.tolist()]
    if not _HALF_PHASES.isdisjoint({head.ph for head in own}):
        others += [head for head in own if head.ph in _HALF_PHASES]
        places = places[[head.ph not in _HALF_PHASES for head in own]]
        own = [heads[at] for at in places.tolist()]
    return _Events(heads, codes, others, places, tables[places], own)


def _count(events: _Events, reading: _Reading) -> None:
    """What does not go into a table."""
    for code, count in enumerate(np.bincount(events.codes, minlength=_OTHER).tolist()):
        if count and code < _OTHER and _CATEGORIES[code] in REDUNDANT_CATEGORIES:
            reading.redundant[_CATEGORIES[code]] += count
    unused = reading.not_used
    for head in events.others:
        kind = f"{head.ph or '?'} {head.cat or ''}".rstrip()
        unused[kind if kind in unused or len(unused) < _KINDS_LIMIT else "of other kinds"] += 1


def _add(events: _Events, found: tuple[Ints, Ints, Flags], reading: _Reading) -> None:
    """What goes into tables."""
    ts_ns, dur_ns, good = found
    reading.bad_time += int((~good).sum())
    for number in np.unique(events.tables).tolist():
        rows = np.flatnonzero((events.tables == number) & good)
        if not len(rows):
            continue
        own, batch = [events.own[at] for at in rows.tolist()], reading.batches[number]
        args = arguments(batch.table, [head.args for head in own], reading.damage)
        place = events.places[rows] + reading.events
        batch.add(own, args, (place, ts_ns[rows], dur_ns[rows]), reading.names)
        reading.kept[batch.table] += len(own)
        if batch.row_count >= BATCH_ROWS:
            reading.sink(batch.table, batch.take())


def _report(text: TraceText, reading: _Reading) -> LoadReport:
    damage = reading.damage
    return LoadReport(
        path=str(text.path),
        text_bytes=text.size_bytes,
        event_count=reading.events + damage.lost_count,
        kept={table: reading.kept[table] for table in TABLES},
        redundant=dict(reading.redundant),
        not_used=dict(reading.not_used),
        bad_time_count=reading.bad_time,
        lost_count=damage.lost_count,
        repaired_count=damage.repaired_count,
        truncated_bytes=text.truncated_bytes,
        odd_arguments_count=damage.odd_arguments_count,
        examples=tuple(damage.examples),
        file_notes=tuple(text.notes),
    )


def _refuse_strangers(report: LoadReport) -> None:
    """Other JSON may hold a list as well: not one of its elements has a phase or a category."""
    strange = report.not_used.get("?", 0) + report.lost_count
    if report.event_count and strange == report.event_count:
        raise TraceFormatError(
            f"{report.path}: none of its {strange} events is one of a profiler",
            hint="expected a trace of torch.profiler (JSON, plain or gzip)",
        )
