"""Reads one trace file into frames, piece by piece, with a report of what was read and what not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.traces.columns import EXACT_ABOVE_US, Ints, Names, frame, times
from haiprof.traces.decode import Damage, decode
from haiprof.traces.tables import MEMORY, REDUNDANT_CATEGORIES, TABLE_OF_CATEGORY, TABLES
from haiprof.traces.text import TraceText

Sink = Callable[[str, pl.DataFrame], None]
"""Takes a part of a table; texts are codes."""

_MEMORY_NAME = "[memory]"  # before 2022 such events had no category


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
    """Events that are no JSON."""
    repaired_count: int
    """Pieces of text read after values that are no JSON were taken out."""
    truncated_bytes: int | None
    """Of an unfinished last event, where the file ends without closing its events; else null."""
    examples: tuple[str, ...]
    """The beginning of the first lost events."""

    @property
    def notes(self) -> list[str]:
        """What a person must know, for people."""
        found = []
        if self.truncated_bytes is not None:
            found.append(f"the file is cut off: {self.truncated_bytes} bytes after the last event")
        if self.lost_count:
            found.append(f"{self.lost_count} events are no JSON, such as {self.examples[0]}")
        if self.repaired_count:
            found.append(f"{self.repaired_count} pieces held values that are no JSON (NaN, stray "
                         "bytes): read without them")  # fmt: skip
        if self.bad_time_count:
            found.append(f"{self.bad_time_count} events without a usable time were left out")
        return [f"{self.path}: {note}" for note in found]


@dataclass(slots=True)
class _Counts:
    """While a file is being read."""

    events: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    not_used: Counter[str] = field(default_factory=Counter)
    bad_time: int = 0


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
    text, damage, names, counts = TraceText(path), Damage(), Names(), _Counts()
    exact = False
    for piece in text.pieces():
        events = decode(piece, text, damage, exact=exact)
        if not exact and _needs_exact(events):
            exact = True
            events = decode(piece, text, damage, exact=True)
        for table, part in _tables(events, names, counts, exact=exact):
            sink(table, part)
    return text.metadata, names.texts(), _report(text, damage, counts)


def _needs_exact(events: Sequence[Any]) -> bool:
    """Whether a stamp has more digits than a float holds to 1 ns."""
    return any(
        type(event.ts) is float and abs(event.ts) > EXACT_ABOVE_US and not event.ts.is_integer()
        for event in events
    )


def _tables(
    events: Sequence[Any], names: Names, counts: _Counts, *, exact: bool
) -> Iterator[tuple[str, pl.DataFrame]]:
    """The tables' parts of one piece."""
    if not events:
        return
    first, counts.events = counts.events, counts.events + len(events)
    categories = list(map(attrgetter("cat"), events))
    places: dict[str, list[int]] = {}
    for category, count in Counter(categories).items():
        table = TABLE_OF_CATEGORY.get(category)
        if table is not None:
            places.setdefault(table, [])
        elif category in REDUNDANT_CATEGORIES:
            counts.redundant[category] += count
        else:
            _other_places(category, categories, events, places, counts)
    own = {category: places[table] for category, table in TABLE_OF_CATEGORY.items()
           if table in places}  # fmt: skip
    for at, category in enumerate(categories):
        if category in own:
            own[category].append(at)
    for table, rows in places.items():
        kept = [events[at] for at in rows]
        yield from _table_part(table, kept, rows, first, names, counts, exact=exact)


def _other_places(
    category: str,
    categories: Sequence[str],
    events: Sequence[Any],
    places: dict[str, list[int]],
    counts: _Counts,
) -> None:
    """Events of a category that no table has: counted, but for memory events of before 2022."""
    for at, own in enumerate(categories):
        if own != category:
            continue
        event = events[at]
        if event.name == _MEMORY_NAME:
            places.setdefault(MEMORY, []).append(at)
        else:
            counts.not_used[f"{event.ph or '?'} {category}".rstrip()] += 1


def _table_part(
    table: str,
    events: list[Any],
    rows: list[int],
    first: int,
    names: Names,
    counts: _Counts,
    *,
    exact: bool,
) -> Iterator[tuple[str, pl.DataFrame]]:
    place: Ints = np.array(rows, dtype=np.int64) + first
    ts, dur, good = times(events, exact=exact)
    if not good.all():
        counts.bad_time += int((~good).sum())
        events = [event for event, fine in zip(events, good, strict=True) if fine]
        place, ts, dur = place[good], ts[good], dur[good]
    if events:
        counts.kept[table] += len(events)
        yield table, frame(table, events, {"event": place, "ts_ns": ts, "dur_ns": dur}, names)


def _report(text: TraceText, damage: Damage, counts: _Counts) -> LoadReport:
    return LoadReport(
        path=str(text.path),
        text_bytes=text.size_bytes,
        event_count=counts.events + damage.lost_count,
        kept={table: counts.kept[table] for table in TABLES},
        redundant=dict(counts.redundant),
        not_used=dict(counts.not_used),
        bad_time_count=counts.bad_time,
        lost_count=damage.lost_count,
        repaired_count=damage.repaired_count,
        truncated_bytes=text.truncated_bytes if text.is_truncated else None,
        examples=tuple(damage.examples),
    )
