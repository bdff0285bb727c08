"""Reads one trace file into frames, by the compiled scanner where it was built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.intervals import Bools
from haiprof.trace_format.kineto import events as schema
from haiprof.trace_format.kineto.columns import Names, event_times, make_frame, name_copies
from haiprof.trace_format.kineto.decode import Damage, arguments, decode
from haiprof.trace_format.kineto.text import TraceText

_VERSION = 2  # version of native.c; a scanner that was built from an older one is not used

_compiled: ModuleType | None
try:
    from haiprof.trace_format.kineto import _native

    _compiled = _native if getattr(_native, "VERSION", 0) == _VERSION else None
except ImportError:  # haiprof was installed without a compiler
    _compiled = None

NATIVE_ROWS = 1 << 15  # rows of a table that are collected as arrays before they become a frame

# As native.c counts them.
_KINDS = {"i64": 0, "f64": 1, "str": 2}
_JSON, _KNOWN = 3, 1
_HEADS = (".name", ".pid", ".tid", ".id", ".ph")
_OF_EVENTS = ("event", "category", "ts_ns", "dur_ns")

_TABLE_NAMES = tuple(schema.TABLES)
_COLUMNS = {table: [column for column in columns if column.name not in _OF_EVENTS]
            for table, columns in schema.TABLES.items()}  # fmt: skip


def _column(column: schema.TraceColumn) -> tuple[int, int, tuple[bytes, ...]]:
    kind = _JSON if column.is_json else _KINDS[column.type]
    if column.field in _HEADS:
        return kind, _HEADS.index(column.field), ()
    return kind, -1, tuple(key.encode() for key in column.field.split("|"))


_SPEC = tuple(
    (schema.PHASES[table], table not in schema.WITHOUT_DURATION, tuple(map(_column, columns)))
    for table, columns in _COLUMNS.items()
)
_OTHER_CATEGORIES = [-1] * len(schema.REDUNDANT_CATEGORIES)
_NUMBERS = [*map(_TABLE_NAMES.index, schema.TABLE_OF_CATEGORY.values()), *_OTHER_CATEGORIES]
_CATEGORIES = tuple(zip(map(str.encode, schema.CATEGORIES), _NUMBERS, strict=True))


def is_compiled() -> bool:
    """Whether the scanner was built where haiprof was installed."""
    return _compiled is not None


class NativeColumns:
    """Rows that the compiled scanner has read, until they become frames."""

    def __init__(self, names: Names, name_codes: npt.NDArray[np.uint32]) -> None:
        self._name_codes = name_codes
        self._scanner: Any = _compiled and _compiled.Scanner(_SPEC, _CATEGORIES, names)

    def scan(self, piece: bytes, first: int) -> tuple[tuple[int, ...], bool] | None:
        """Reads the events of a piece, all or none: None where Python has to read them."""
        return self._scanner.scan(piece, first) if self._scanner else None

    def row_count(self, number: int) -> int:
        """Number of collected rows."""
        return self._scanner.rows(number) if self._scanner else 0

    def take(self, number: int) -> pl.DataFrame:
        """Returns and clears the rows of a table, as `columns.make_frame` does."""
        event, category, ts_ns, dur_ns, cells = self._scanner.take(number)
        found = [
            pl.Series("event", np.frombuffer(event, np.int64)),
            pl.Series("category", self._name_codes[np.frombuffer(category, np.int64)]),
            pl.Series("ts_ns", np.frombuffer(ts_ns, np.int64)),
            pl.Series("dur_ns", np.frombuffer(dur_ns, np.int64)),
        ]
        gaps = []
        for column, (values, states) in zip(_COLUMNS[_TABLE_NAMES[number]], cells, strict=True):
            known = np.frombuffer(states, np.uint8) == _KNOWN
            if not known.any():
                continue
            series, finite = _series(column, values)
            found.append(series)
            known &= finite
            if not known.all():
                gaps.append(pl.when(pl.lit(pl.Series(known))).then(pl.col(column.name)))
        return pl.DataFrame(found).with_columns(gaps)


def _series(column: schema.TraceColumn, values: bytes) -> tuple[pl.Series, Bools]:
    """A column, and which of its values are finite."""
    if column.type == "f64":
        with np.errstate(all="ignore"):
            floats = np.frombuffer(values, np.float64) * column.scale
        return pl.Series(column.name, floats), np.isfinite(floats)
    whole = np.frombuffer(values, np.int64)
    kept = whole.astype(np.uint32) if column.type == "str" else whole
    return pl.Series(column.name, kept), np.ones(len(whole), dtype=bool)


_Codes = npt.NDArray[np.uint32]
_Categories = npt.NDArray[np.uint8]  # as indices in `CATEGORIES`
_Tables = npt.NDArray[np.int8]  # as indices in `_TABLE_NAMES`, or -1
Sink = Callable[[str, pl.DataFrame], None]  # takes a part of a table, as `make_frame` makes it

_MEMORY_NAME = "[memory]"  # before 2022 such events had no category
_HALF_PHASES = frozenset("BEben")  # halves of an event, which are not used; Kineto writes none
_KINDS_LIMIT = 1000  # of events that no table holds, by phase and category
_MEMORY, _COUNTERS = map(_TABLE_NAMES.index, (schema.MEMORY, schema.GPU_COUNTERS))
_TABLE_OF_CATEGORY = np.array([*_NUMBERS, -1], dtype=np.int8)


_PLACES: dict[Any, int] = {category: place for place, category in enumerate(schema.CATEGORIES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where the events of a file that is cut off are no longer all there."""

    whole_ns: int | None = None  # steps that end later are not whole; None where all are
    end_ns: int | None = None  # what begins then or later is left out; None where nothing is
    text: str
    effect: str  # what becomes of the answers
    is_device_lost: bool = False  # of a job on GPUs: it ends before their first event


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Counts of a file's events by what was done with them; they add up to `event_count`."""

    path: str
    text_bytes: int  # of JSON, decompressed
    event_count: int  # events in the file, lost ones included
    kept: Mapping[str, int]  # by table
    redundant: Mapping[str, int]  # by category: arrows that repeat what correlations say
    not_used: Mapping[str, int]
    """By phase and category: metadata, counters, marks that no table holds."""
    bad_time_count: int  # events without a usable time: not a number, negative or beyond a century
    lost_count: int  # events that are not JSON, or not in the form of an event
    repaired_count: int  # pieces of text that were read after invalid JSON values were removed
    truncated_bytes: int | None
    """Of an unfinished last event, where the file ends without closing its events; else None."""
    odd_arguments_count: int  # events with arguments of a wrong type, which are missing
    examples: tuple[str, ...]  # the beginnings of the first lost events
    file_notes: tuple[str, ...]  # problems of the file other than those of events
    cut: Cut | None = None
    """Where a trace whose file is cut off is taken to end; `rank_trace` finds it."""

    @property
    def notes(self) -> list[str]:
        """Notes for people."""
        cut = self.cut and f"{self.cut.text}: {self.cut.effect}"
        counted = (
            (self.truncated_bytes is not None, cut or "the file is cut off"),
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

    text: TraceText
    names: Names
    sink: Sink
    damage: Damage = field(default_factory=Damage)
    events: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    redundant: Counter[str] = field(default_factory=Counter)
    not_used: Counter[str] = field(default_factory=Counter)
    bad_time: int = 0


def read_trace(path: Path, sink: Sink) -> tuple[dict[str, Any], list[str], LoadReport]:
    """Reads a file once."""
    reading = _Reading(TraceText(path), Names(path), sink)
    text, damage = reading.text, reading.damage
    names = [reading.names[name] for name in (*schema.CATEGORIES, "")]
    name_codes = np.array(names, dtype=np.uint32)
    native = NativeColumns(reading.names, name_codes)
    for piece in text.pieces():
        scanned = None if text.is_last else native.scan(piece, reading.events)
        if scanned is not None:
            for category, count in zip(schema.CATEGORIES, scanned[0], strict=True):
                if count:
                    of = schema.TABLE_OF_CATEGORY.get(category)
                    (reading.kept if of else reading.redundant)[of or category] += count
            reading.events += sum(scanned[0])
            _flush(native, sink, NATIVE_ROWS)
        else:
            _flush(native, sink)  # what stands before it in the file
            _read_piece(piece, name_codes, reading)
    _flush(native, sink)
    name_copies(reading.names)
    report = LoadReport(
        path=str(path), text_bytes=text.size_bytes, event_count=reading.events + damage.lost_count,
        kept={table: reading.kept[table] for table in schema.TABLES},
        redundant=dict(reading.redundant), not_used=dict(reading.not_used),
        bad_time_count=reading.bad_time, lost_count=damage.lost_count,
        repaired_count=damage.repaired_count, truncated_bytes=text.truncated_bytes,
        odd_arguments_count=damage.odd_arguments_count, examples=tuple(damage.examples),
        file_notes=tuple(text.notes),
    )  # fmt: skip
    _refuse_strangers(report)
    return text.metadata, reading.names.texts(), report


def _flush(native: NativeColumns, sink: Sink, least_rows: int = 1) -> None:
    """Passes on what the scanner has read of tables with at least so many rows."""
    for number, table in enumerate(_TABLE_NAMES):
        if native.row_count(number) >= least_rows:
            sink(table, native.take(number))


def _read_piece(piece: bytes, name_codes: _Codes, reading: _Reading) -> None:
    """Reads the events of a piece in Python."""
    events = decode(piece, reading.text, reading.damage, schema.HEADS)
    categories, tables = _sort_heads(events, reading)
    kept = np.flatnonzero(tables >= 0)
    ts_ns, dur_ns, good = event_times([events[row] for row in kept.tolist()])
    reading.bad_time += len(good) - int(good.sum())
    common = (kept + reading.events, name_codes[categories[kept]], ts_ns, dur_ns)
    for number in np.unique(tables[kept[good]]).tolist():
        table, chosen = _TABLE_NAMES[number], good & (tables[kept] == number)
        own = [events[row] for row in kept[chosen].tolist()]
        args = arguments(table, [event.args for event in own], reading.damage)
        known = tuple(values[chosen] for values in common)
        reading.sink(table, make_frame(table, own, args, known, reading.names))
        reading.kept[table] += len(own)
    reading.events += len(events)


def _sort_heads(heads: list[Any], reading: _Reading) -> tuple[_Categories, _Tables]:
    """Category and table of each event; what no table holds is counted."""
    kinds = [_PLACES.get(head.cat, schema.OTHER_CATEGORY) for head in heads]
    categories = np.array(kinds, dtype=np.uint8)
    tables = _TABLE_OF_CATEGORY[categories]
    reading.redundant.update(x.cat for x in heads if x.cat in schema.REDUNDANT_CATEGORIES)
    for at in np.flatnonzero(categories == schema.OTHER_CATEGORY).tolist():
        if heads[at].name == _MEMORY_NAME and not heads[at].cat:
            tables[at] = _MEMORY
        elif (counter := schema.read_gpu_counter(heads[at])) is not None:
            tables[at], heads[at] = _COUNTERS, counter
        else:
            _count_unused(heads[at], reading)
    for at in np.flatnonzero(tables >= 0).tolist():
        if heads[at].name is None:
            heads[at].name = ""
        if heads[at].ph in _HALF_PHASES:
            tables[at] = -1
            _count_unused(heads[at], reading)
    return categories, tables


def _count_unused(head: schema.Head, reading: _Reading) -> None:
    unused, kind = reading.not_used, f"{head.ph or '?'} {head.cat or ''}".rstrip()
    unused[kind if kind in unused or len(unused) < _KINDS_LIMIT else "of other kinds"] += 1


def _refuse_strangers(report: LoadReport) -> None:
    """Refuses other JSON with a list, of which no element has a phase or a category."""
    without_category = report.not_used.get("X", 0)
    if without_category and not any(report.kept.values()):
        raise TraceFormatError(
            f"{report.path}: {without_category} events without a category, and none of "
            "torch.profiler: a trace of JAX or XLA, or of another tool",
            hint="haiprof reads traces of torch.profiler and exports of Nsight Systems",
        )
    strange = report.not_used.get("?", 0) + report.lost_count
    if report.event_count and strange == report.event_count:
        raise TraceFormatError(
            f"{report.path}: none of its {strange} events is one of a profiler",
            hint="expected a trace of torch.profiler (JSON, plain or gzip)",
        )
