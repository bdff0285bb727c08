"""From decoded events to polars frames, one per table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from haiprof.errors import TraceFormatError
from haiprof.traces.events import NO_JSON, argument_names
from haiprof.traces.tables import TABLES, TraceColumn
from haiprof.traces.times import Ints, as_floats

BATCH_ROWS = 1 << 13
"""Rows of a table that are kept as Python objects before they become a frame."""
_NAME_LIMIT_BYTES = 1 << 30  # of all distinct texts of a file, with what keeps them
_NAME_COST_BYTES = 300
_UNKNOWN = (TypeError, OverflowError)  # what polars raises for a value that is not of a type
_STORED = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.UInt32}

Getter = Callable[[Sequence[Any]], list[Any]]


class Names(dict[Any, int | None]):
    """Texts as codes, in order of their first appearance; no text has no code.

    Args:
        path: Of the trace, for the error if it holds too many.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._codes: dict[str, int] = {}
        self._cost_bytes = 0

    def __missing__(self, value: Any) -> int | None:  # noqa: ANN401 - whatever a name is in the file
        text = _json_text(value) if isinstance(value, bytes) else value
        code = None if text is None else self._code(str(text))
        self[value] = code
        return code

    def texts(self) -> list[str]:
        """The texts by code."""
        return list(self._codes)

    def _code(self, text: str) -> int:
        self._cost_bytes += len(text) + _NAME_COST_BYTES
        if self._cost_bytes > _NAME_LIMIT_BYTES:
            raise TraceFormatError(
                f"{self._path}: more than {_NAME_LIMIT_BYTES >> 30} GiB of distinct names",
                hint="every event seems to have a name of its own",
            )
        return self._codes.setdefault(text, len(self._codes))


def _json_text(raw: bytes) -> str | None:
    """A JSON value as text: a string's own, None of null, all else as it is written."""
    if not raw:
        return None
    if raw[:1] in (b'"', b"n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(raw, type=str | None)
    return " ".join(raw.decode("utf-8", "replace").split())


def _getter(name: str) -> Getter:
    """A loop over one attribute; compiled, it takes half the time of `attrgetter`."""
    found: Getter = eval(f"lambda rows: [row.{name} for row in rows]")  # a name of our own schema
    return found


class _Column:
    """The values of one column until they become a series."""

    def __init__(self, column: TraceColumn) -> None:
        self.column = column
        self.is_own = column.field.startswith(".")
        names = [column.field[1:]] if self.is_own else argument_names(column)
        self._getters = [_getter(name) for name in names]
        self._values: list[Any] = []

    def add(self, rows: Sequence[Any], names: Names) -> None:
        """Takes the values of some rows."""
        values = self._getters[0](rows)
        for getter in self._getters[1:]:
            if None in values:  # in an older spelling, perhaps
                others = getter(rows)
                values = [b if a is None else a for a, b in zip(values, others, strict=True)]
        if self.column.type == "str":
            if self.is_own and None in values:  # an event without a name has an empty one
                values = ["" if value is None else value for value in values]
            values = self._codes(values, names)
        self._values += values

    def _codes(self, values: list[Any], names: Names) -> list[Any]:
        nothing = NO_JSON if self.column.is_json else None
        if values.count(nothing) == len(values):
            return [None] * len(values)
        if self.column.is_json:
            values = [bytes(value) for value in values]  # a Raw keeps its whole piece alive
        return list(map(names.__getitem__, values))

    def take(self) -> pl.Series:
        """The values so far, which are forgotten."""
        values, self._values = self._values, []
        if self.column.type == "f64":
            return self._floats(values)
        try:
            return pl.Series(self.column.name, values, dtype=_STORED[self.column.type])
        except _UNKNOWN:
            return pl.Series(self.column.name, [_integer(v) for v in values], dtype=pl.Int64)

    def _floats(self, values: list[Any]) -> pl.Series:
        floats = as_floats(values) * self.column.scale
        known = np.where(np.isfinite(floats), floats, np.nan)
        return pl.Series(self.column.name, known, dtype=pl.Float64, nan_to_null=True)


def _integer(value: object) -> int | None:
    """A whole number; of a text such as `stream 7` its last digits; None where there is none."""
    if isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) and value.is_integer() else None
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None


class TableBatch:
    """Some rows of one table on their way from events to a frame.

    Args:
        table: Its name in `TABLES`.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        self.row_count = 0
        self._columns = [_Column(column) for column in TABLES[table]
                         if column.name not in ("event", "ts_ns", "dur_ns")]  # fmt: skip
        self._common: list[tuple[Ints, Ints, Ints]] = []

    def add(
        self, heads: Sequence[Any], args: Sequence[Any], common: tuple[Ints, Ints, Ints],
        names: Names,
    ) -> None:  # fmt: skip
        """Takes rows.

        Args:
            heads: Of this table only.
            args: Of the same events.
            common: Place among the file's events, start and duration of the same events in ns.
            names: Grows.
        """
        self.row_count += len(heads)
        self._common.append(common)
        for column in self._columns:
            column.add(heads if column.is_own else args, names)

    def take(self) -> pl.DataFrame:
        """The rows so far, which are forgotten; texts are codes."""
        arrays = [np.concatenate(parts) for parts in zip(*self._common, strict=True)]
        self._common, self.row_count = [], 0
        common = dict(zip(("event", "ts_ns", "dur_ns"), arrays, strict=True))
        found = {name: pl.Series(name, values, dtype=pl.Int64) for name, values in common.items()}
        found |= {own.column.name: own.take() for own in self._columns}
        return pl.DataFrame([found[column.name] for column in TABLES[self.table]])


def without_empty(part: pl.DataFrame) -> pl.DataFrame:
    """Only the columns that hold something."""
    return part.select(name for name in part.columns if part[name].null_count() < part.height)


def joined(table: str, parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Parts of a table from `without_empty` as one frame with all columns; texts are codes."""
    found = pl.concat(parts, how="diagonal") if parts else pl.DataFrame()
    kinds = {column.name: _STORED[column.type] for column in TABLES[table]}
    missing = [pl.lit(None, kind).alias(name) for name, kind in kinds.items()
               if name not in found.columns]  # fmt: skip
    return found.with_columns(missing).select(list(kinds)) if parts else pl.DataFrame(schema=kinds)


def with_texts(table: str, part: pl.DataFrame, texts: pl.Enum) -> pl.DataFrame:
    """A table with its texts in place of codes.

    Args:
        table: Its name in `TABLES`.
        part: From `TableBatch.take`, or several of them joined.
        texts: The names by code.
    """
    coded = [column.name for column in TABLES[table] if _STORED[column.type] == pl.UInt32]
    return part.with_columns(_as_text_of(name, texts) for name in coded)


def _as_text_of(name: str, texts: pl.Enum) -> pl.Expr:
    column = pl.col(name)
    # polars 2 has a method for it, where polars 1 (Python 3.10) casts.
    return column.cat.to(texts) if hasattr(column.cat, "to") else column.cast(texts)
