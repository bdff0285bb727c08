"""From decoded events to polars frames, one per table; the arithmetic of times is integer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.traces.events import NO_ARGS
from haiprof.traces.tables import NULL, TABLES, TraceColumn

# Above this many us a float no longer holds a nanosecond: such a stamp is read as it is written.
EXACT_ABOVE_US = float(1 << 42)
# A century: corrupted CUPTI records have been seen with durations of 236 years (HTA PR 325).
TIME_LIMIT_NS = 1 << 61
DURATION_LIMIT_NS = 1 << 51
"""26 days: no profiler window lasts that long."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class Names(dict[Any, int]):
    """Texts as codes, in order of their first appearance."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def __missing__(self, value: Any) -> int:  # noqa: ANN401 - whatever a name is in the file
        code = self[value] = self._codes.setdefault(_as_text(value), len(self._codes))
        return code

    def texts(self) -> list[str]:
        """The texts by code."""
        return list(self._codes)


def _as_text(text: object) -> str:
    if isinstance(text, (bytes, msgspec.Raw)):
        return " ".join(bytes(text).decode("utf-8", "replace").split())
    return "" if text is None else str(text).encode("utf-8", "replace").decode()


def times(events: Sequence[Any], *, exact: bool) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    """Start and duration in ns, and which events have usable ones.

    Args:
        events: `Event`, or `ExactEvent` with `exact`.
        exact: Times are texts.
    """
    if exact:
        return _exact_times(events)
    ts, dur = _floats(list(map(attrgetter("ts"), events))), _floats([e.dur for e in events])
    good = np.isfinite(ts) & np.isfinite(dur) & (np.abs(ts) < TIME_LIMIT_NS / 1000)
    ts, dur = np.where(good, ts, 0.0), np.where(good, dur, 0.0)
    return _checked(_to_ns(ts), _to_ns(np.clip(dur, -1e18, 1e18)), good)


def _checked(ts: Ints, dur: Ints, good: npt.NDArray[np.bool_]) -> tuple[Ints, Ints, Any]:
    return ts, dur, good & (dur >= 0) & (dur < DURATION_LIMIT_NS)


def _to_ns(us: Floats) -> Ints:
    """Whole us and their fraction apart, so that neither loses digits."""
    whole = np.floor(us)
    fraction: Ints = np.rint((us - whole) * 1000).astype(np.int64)
    return whole.astype(np.int64) * 1000 + fraction


def _floats(values: list[Any]) -> Floats:
    try:
        return np.fromiter(values, np.float64, len(values))
    except (TypeError, ValueError):
        return np.array([_float(value) for value in values])


def _float(value: object) -> float:
    if value is None:
        return 0.0  # `"dur": null` is no duration
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan


def _exact_times(events: Sequence[Any]) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
    pairs = [(_exact_ns(event.ts), _exact_ns(event.dur)) for event in events]
    good = np.array([ts is not None and dur is not None for ts, dur in pairs], dtype=bool)
    ts = np.array([ts or 0 for ts, _ in pairs], dtype=np.int64)
    return _checked(ts, np.array([dur or 0 for _, dur in pairs], dtype=np.int64), good)


def _exact_ns(raw: msgspec.Raw) -> int | None:
    whole, _, fraction = bytes(raw).partition(b".")
    if whole.isdigit() and fraction.isdigit() and len(fraction) <= 3 and len(whole) < 17:
        return int(whole) * 1000 + int(fraction.ljust(3, b"0"))
    text = bytes(raw).strip(b'" ').decode("ascii", "replace")
    try:
        value = Decimal("0" if text == "null" else text) * 1000
        return int(value.to_integral_value()) if abs(value) < TIME_LIMIT_NS else None
    except (InvalidOperation, ValueError, OverflowError):
        return None


def frame(table: str, events: Sequence[Any], common: dict[str, Any], names: Names) -> pl.DataFrame:
    """The events of one table as one frame; texts are codes (u32), missing integers NULL.

    Args:
        table: Its name in `TABLES`.
        events: Of that table only.
        common: `event`, `ts_ns`, `dur_ns` of these events.
        names: Grows.
    """
    args = list(map(attrgetter("args"), events))
    if None in args:
        args = [NO_ARGS if own is None else own for own in args]
    columns = {name: pl.Series(name, values, dtype=pl.Int64) for name, values in common.items()}
    for column in TABLES[table]:
        if column.name in columns:
            continue
        own = column.field.startswith(".")
        rows = events if own else args
        get = attrgetter(column.field.removeprefix("."))
        columns[column.name] = _series(column, rows, get, names)
    if "external_id" in columns and columns["external_id"].first() == NULL:
        columns["external_id"] = _external_id(columns["external_id"], args)
    return pl.DataFrame([columns[column.name] for column in TABLES[table]])


def _external_id(found: pl.Series, args: Sequence[Any]) -> pl.Series:
    """With the key's spelling of before 2022 where the present one is missing."""
    old = _integers("external_id", args, attrgetter("old_external_id"))
    return pl.select(external_id=pl.when(found == NULL).then(old).otherwise(found)).to_series()


def _series(
    column: TraceColumn, rows: Sequence[Any], get: Callable[[Any], Any], names: Names
) -> pl.Series:
    if column.type == "str":
        return _codes(column.name, rows, get, names)
    if column.type == "f64":
        values = _floats(list(map(get, rows))) * column.scale
        return pl.Series(column.name, values, dtype=pl.Float64).fill_nan(None)
    return _integers(column.name, rows, get)


def _codes(name: str, rows: Sequence[Any], get: Callable[[Any], Any], names: Names) -> pl.Series:
    texts = list(map(get, rows))
    if texts and isinstance(texts[0], msgspec.Raw):
        texts = [bytes(text) for text in texts]  # a Raw keeps its whole piece alive
    codes = np.fromiter(map(names.__getitem__, texts), np.uint32, len(texts))
    return pl.Series(name, codes, dtype=pl.UInt32)


def _integers(name: str, rows: Sequence[Any], get: Callable[[Any], Any]) -> pl.Series:
    """Whole numbers; missing and impossible ones are NULL."""
    values = list(map(get, rows))
    try:
        array = np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        array = np.array([_integer(value) for value in values], dtype=np.int64)
    return pl.Series(name, array, dtype=pl.Int64)


def _integer(value: object) -> int:
    """A number; of a text such as `stream 7` its last digits; NULL where there is none."""
    if isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) else None
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else NULL


def finished(table: str, part: pl.DataFrame, texts: pl.Enum) -> pl.DataFrame:
    """A table with its nulls and texts in place of NULL and codes.

    Args:
        table: Its name in `TABLES`.
        part: From `frame`, or several of them joined.
        texts: The names by code.
    """
    kinds = {column.name: column.type for column in TABLES[table]}
    return part.with_columns(
        *(_no_null(name) for name, kind in kinds.items() if kind == "i64"),
        *(_as_text_of(name, texts) for name, kind in kinds.items() if kind == "str"),
    )


def _as_text_of(name: str, texts: pl.Enum) -> pl.Expr:
    column = pl.col(name)
    # polars 2 has a method for it, where polars 1 (Python 3.10) casts.
    return column.cat.to(texts) if hasattr(column.cat, "to") else column.cast(texts)


def _no_null(name: str) -> pl.Expr:
    return pl.when(pl.col(name) != NULL).then(pl.col(name)).alias(name)
