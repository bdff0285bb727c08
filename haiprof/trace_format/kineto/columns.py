"""From decoded events to polars frames, one per table; times exact to the nanosecond."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.ma  # polars imports it for its first series: 30 ms that the first trace need not pay
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.intervals import Bools, Ints
from haiprof.trace_format.kineto.events import GPU, NO_JSON, TABLES, TraceColumn, argument_names

TIME_LIMIT_NS = 1 << 61
"""73 years before or after the clock's zero: beyond the Unix time of any trace."""
DURATION_LIMIT_NS = 1 << 51
"""26 days: no profiler window lasts that long. Corrupted CUPTI records have been seen with
durations of 236 years (HTA PR 325)."""


_PLAIN = r"^[0-8]?[0-9]{1,15}(?:\.[0-9]{0,3})?$"
"""Numbers that hold in 64 bits once they count ns, to the last digit."""


def event_times(heads: Sequence[Any]) -> tuple[Ints, Ints, Bools]:
    """Start and duration of each event in ns, and whether it has usable ones."""
    durations = [bytes(head.dur) for head in heads]
    if b"null" in durations:
        durations = [b"0" if dur == b"null" and head.ph != "X" else dur
                     for dur, head in zip(durations, heads, strict=True)]  # fmt: skip
    times, known = exact_ns([*(bytes(head.ts) for head in heads), *durations])
    (ts_ns, dur_ns), good = np.split(times, 2), np.logical_and(*np.split(known, 2))
    return ts_ns, dur_ns, good & (dur_ns >= 0) & (dur_ns < DURATION_LIMIT_NS)


def _float(value: object) -> float:
    """A number, or a text of one; NaN for everything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan


def exact_ns(us: list[bytes]) -> tuple[Ints, Bools]:
    """Times in ns of texts in us, and which are usable; only digits below 1 ns are rounded."""
    try:
        texts = pl.Series(us, dtype=pl.Binary).cast(pl.String)
    except pl.exceptions.PolarsError:  # some bytes are no text
        return _one_by_one(us)
    parts = texts.str.split_exact(".", 1).struct
    digits = parts.field("field_0") + parts.field("field_1").fill_null("").str.pad_end(3, "0")
    ns: Ints = digits.cast(pl.Int64, strict=False).fill_null(0).to_numpy().copy()
    good: Bools = ns < TIME_LIMIT_NS // 1000 * 1000
    odd = np.flatnonzero(~texts.str.contains(_PLAIN).to_numpy())
    if len(odd):
        ns[odd], good[odd] = _one_by_one([us[at] for at in odd.tolist()])
    return ns, good


def _one_by_one(us: list[bytes]) -> tuple[Ints, Bools]:
    ns, good = np.zeros(len(us), dtype=np.int64), np.zeros(len(us), dtype=bool)
    for at, each in enumerate(us):
        with contextlib.suppress(InvalidOperation, ValueError, OverflowError):
            value = Decimal(each.strip(b'" ').decode("ascii", "replace")) * 1000
            if abs(value) < TIME_LIMIT_NS:
                ns[at], good[at] = int(value.to_integral_value()), True
    return ns, good


_NAME_LIMIT_BYTES = 1 << 30  # of all distinct texts of a file, with their containers
_NAME_COST_BYTES = 300
_UNKNOWN = (TypeError, OverflowError)  # what polars raises for a value that is not of a type
_STORED: dict[str, type[pl.DataType]] = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.UInt32}

Getter = Callable[[Sequence[Any]], list[Any]]


class Names(dict[Any, int | None]):
    """Texts as codes, in order of their first appearance; no text has no code."""

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
    """A JSON value as text: a string's own, None for null, all else as it is written."""
    if not raw:
        return None
    if raw[:1] in (b'"', b"n"):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(raw, type=str | None)
    return " ".join(raw.decode("utf-8", "replace").split())


@cache
def _getter(name: str) -> Getter:
    """A loop over one attribute; compiled once, it takes half the time of `attrgetter`."""
    found: Getter = eval(f"lambda rows: [row.{name} for row in rows]")  # a name of our own schema
    return found


def _series(
    column: TraceColumn, heads: Sequence[Any], args: Sequence[Any], names: Names
) -> pl.Series | None:
    """The values of one column; None where no row has one."""
    is_own = column.field.startswith(".")
    spellings = [column.field[1:]] if is_own else argument_names(column)
    values, *older = (_getter(name)(heads if is_own else args) for name in spellings)
    for others in older:
        if others.count(None) < len(others):
            values = [b if a is None else a for a, b in zip(values, others, strict=True)]
    # The first one first: comparing takes fifty times longer where a value is not None.
    nothing = NO_JSON if column.is_json else None
    if values[0] is nothing and values.count(nothing) == len(values):
        return None
    if column.type == "str":
        values = list(map(names.__getitem__, map(bytes, values) if column.is_json else values))
    kind = _STORED[column.type]
    try:
        found = pl.Series(column.name, values, dtype=kind)
    except _UNKNOWN:
        mended = map(_integer if kind == pl.Int64 else _float, values)
        found = pl.Series(column.name, list(mended), dtype=kind)
    if kind != pl.Float64:
        return found
    floats = found.to_numpy() * column.scale
    known = np.where(np.isfinite(floats), floats, np.nan)
    return pl.Series(column.name, known, dtype=pl.Float64, nan_to_null=True)


def _integer(value: object) -> int | None:
    """A whole number; of a text such as `stream 7` its last digits; None where there is none."""
    if isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        value = int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 19 else None
    if isinstance(value, float):
        value = int(value) if math.isfinite(value) and value.is_integer() else None
    return value if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else None


_COMMON = {"event": pl.Int64, "category": pl.UInt32, "ts_ns": pl.Int64, "dur_ns": pl.Int64}


def make_frame(
    table: str, heads: Sequence[Any], args: Sequence[Any], common: Sequence[npt.NDArray[Any]],
    names: Names,
) -> pl.DataFrame:  # fmt: skip
    """Rows of one table without empty columns; texts and categories are codes."""
    # `common` is what every table has of its rows, in the order of `_COMMON`.
    found = [pl.Series(name, values, kind)
             for (name, kind), values in zip(_COMMON.items(), common, strict=True)]  # fmt: skip
    own = (_series(c, heads, args, names) for c in TABLES[table] if c.name not in _COMMON)
    return pl.DataFrame([*found, *(values for values in own if values is not None)])


def merge_parts(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Parts of a table as one frame with the columns that any of them has."""
    return pl.concat(parts, how="diagonal", rechunk=True)


def by_start(ts_ns: Ints, dur_ns: Ints) -> Ints:
    """The order of events by their start, the longer one first, else as they stand in the file."""
    order: Ints = np.argsort(ts_ns, kind="stable")
    same = np.diff(ts_ns[order]) == 0
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    rows = order[tied]
    order[tied] = rows[np.lexsort((-dur_ns[rows], ts_ns[rows]))]
    return order


def has_name(events: pl.DataFrame, pattern: str) -> pl.Expr:
    """Whether an event's name matches: there are far fewer names than events."""
    names = events["name"].unique()
    return pl.col("name").is_in(names.filter(names.cast(pl.String).str.contains(pattern)).implode())


_BARE_COPY = "Memcpy"
_COPY_KINDS = ("HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "PtoP")
_MEMORIES = ("pageable", "pinned", "device", "array", "managed", "unknown")


def name_copies(names: Names) -> None:
    """Adds what copies are called after whose kind PyTorch's own collector states beside them."""
    known = set(names.texts())
    if _BARE_COPY in known:
        kinds, memories = ([one for one in of if one in known] for of in (_COPY_KINDS, _MEMORIES))
        for kind, source, target in product(kinds, memories, memories):
            # As Kineto writes it.
            _ = names[f"{_BARE_COPY} {kind} ({source.capitalize()} -> {target.capitalize()})"]


def _complete_copies(gpu: pl.DataFrame) -> pl.DataFrame:
    """Copies that say only in their arguments what they copy, with name and bandwidth.

    Source: torch/profiler/_cuspy/trace.py names every copy `Memcpy`.
    """
    parts = ("copy_kind", "source_kind", "target_kind")
    is_bare = pl.col("name").cast(pl.String) == _BARE_COPY
    bare = pl.when(is_bare & pl.all_horizontal(pl.col(*parts).is_not_null()))
    kind, *memories = (pl.col(name).cast(pl.String) for name in parts)
    memories = [memory.str.to_titlecase() for memory in memories]
    name = pl.format(f"{_BARE_COPY} {{}} ({{}} -> {{}})", kind, *memories)
    takes_time = pl.col("dur_ns") > 0
    rate = pl.when(takes_time).then(pl.col("bytes") * 1e9 / pl.col("dur_ns"))
    return gpu.with_columns(
        name=pl.coalesce(bare.then(name.cast(gpu["name"].dtype, strict=False)), "name"),
        bandwidth_bytes_per_s=pl.coalesce("bandwidth_bytes_per_s", bare.then(rate)),
    )


def finish_table(table: str, part: pl.DataFrame, texts: pl.Enum) -> pl.DataFrame:
    """A table with all its columns, and with its texts in place of codes."""
    coded = [each.name for each in TABLES[table] if each.type == "str" and each.name in part]
    # polars 2 has a method for it, where polars 1 (Python 3.10) casts.
    known = part.with_columns(
        code.cat.to(texts) if hasattr(code.cat, "to") else code.cast(texts)
        for code in map(pl.col, coded)
    )
    # One for all columns of a type, since they share its memory.
    nulls = {kind: pl.Series(dtype=texts if kind == "str" else stored)
             .extend_constant(None, part.height) for kind, stored in _STORED.items()}  # fmt: skip
    whole = pl.DataFrame([
        known[each.name] if each.name in part else nulls[each.type].alias(each.name)
        for each in TABLES[table]
    ])  # fmt: skip
    return _complete_copies(whole) if table == GPU and "copy_kind" in part else whole
