"""The compiled scanner from text to columns, where it was built: the same frames, faster."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.trace_format.kineto.columns import Names
from haiprof.trace_format.kineto.events import CATEGORIES, PHASES
from haiprof.trace_format.kineto.tables import LINKS, MEMORY, TABLE_OF_CATEGORY, TABLES, TraceColumn

_VERSION = 2
"""Version of native.c; a scanner that was built from an older one is not used."""

_compiled: ModuleType | None
try:
    from haiprof.trace_format.kineto import _native

    _compiled = _native if getattr(_native, "VERSION", 0) == _VERSION else None
except ImportError:  # haiprof was installed without a compiler
    _compiled = None

NATIVE_ROWS = 1 << 15
"""Rows of a table that are collected as arrays before they become a frame."""

# As native.c counts them.
_KINDS = {"i64": 0, "f64": 1, "str": 2}
_JSON, _KNOWN = 3, 1
_HEADS = (".name", ".pid", ".tid", ".id", ".ph")
_OF_EVENTS = ("event", "category", "ts_ns", "dur_ns")

_TABLE_NAMES = tuple(TABLES)
_COLUMNS = {
    table: [column for column in columns if column.name not in _OF_EVENTS]
    for table, columns in TABLES.items()
}


def _column(column: TraceColumn) -> tuple[int, int, tuple[bytes, ...]]:
    kind = _JSON if column.is_json else _KINDS[column.type]
    if column.field in _HEADS:
        return kind, _HEADS.index(column.field), ()
    return kind, -1, tuple(key.encode() for key in column.field.split("|"))


_SPEC = tuple(
    (PHASES[table], table not in (MEMORY, LINKS), tuple(map(_column, columns)))
    for table, columns in _COLUMNS.items()
)
_CATEGORIES = tuple(
    (
        name.encode(),
        _TABLE_NAMES.index(TABLE_OF_CATEGORY[name]) if name in TABLE_OF_CATEGORY else -1,
    )
    for name in CATEGORIES
)


def is_compiled() -> bool:
    """Whether the scanner was built where haiprof was installed."""
    return _compiled is not None


class NativeColumns:
    """Rows that the compiled scanner has read, until they become frames."""

    def __init__(self, names: Names, name_codes: npt.NDArray[np.uint32]) -> None:
        self._name_codes = name_codes
        self._scanner: Any = _compiled and _compiled.Scanner(_SPEC, _CATEGORIES, names)

    def scan(self, piece: bytes, first: int) -> tuple[tuple[int, ...], bool] | None:
        """Reads the events of a piece, all or none.

        None where Python has to read them.
        """
        return self._scanner.scan(piece, first) if self._scanner else None

    def row_count(self, number: int) -> int:
        """Number of collected rows."""
        return self._scanner.rows(number) if self._scanner else 0

    def take(self, number: int) -> pl.DataFrame:
        """Returns and clears the rows of a table, as `columns.TableBatch.take` does."""
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


def _series(column: TraceColumn, values: bytes) -> tuple[pl.Series, npt.NDArray[np.bool_]]:
    """A column, and which of its values are finite."""
    if column.type == "f64":
        with np.errstate(all="ignore"):
            floats = np.frombuffer(values, np.float64) * column.scale
        return pl.Series(column.name, floats), np.isfinite(floats)
    whole = np.frombuffer(values, np.int64)
    kept = whole.astype(np.uint32) if column.type == "str" else whole
    return pl.Series(column.name, kept), np.ones(len(whole), dtype=bool)
