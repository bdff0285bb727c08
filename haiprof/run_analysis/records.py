"""Record files as numpy columns, and values from JSON that may be anything."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.run_format.reader import RecordFile, read_records
from haiprof.run_format.schema import Table

_NUMPY_TYPE = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
_I64_LIMIT = 1 << 63


def record_columns(records: RecordFile) -> dict[str, npt.NDArray[Any]]:
    """The records as one strided array per column, without a copy."""
    row = np.dtype([(name, _NUMPY_TYPE[kind]) for name, kind, _, _ in records.columns])
    table = np.frombuffer(records.data, dtype=row)
    return {name: table[name] for name, _, _, _ in records.columns}


def read_table(path: Path, table: Table, *, first: int = 0, limit: int | None = None) -> RecordFile:
    """Reads a record file that must hold the columns of one table."""
    records = read_records(path, first=first, limit=limit)
    have = {(name, kind) for name, kind, _, _ in records.columns}
    lacking = [c.name for c in table.columns if (c.name, c.type) not in have]
    if records.table != table.name or lacking:
        raise RunFormatError(
            f"{path}: holds the table {records.table!r}, expected {table.name!r}"
            + (f" with the column {lacking[0]!r}" if lacking else "")
        )
    return records


def integer(value: object) -> int | None:
    """A JSON value as an integer of 64 bits; None for anything else."""
    if type(value) is float and math.isfinite(value):
        value = int(value)
    return value if type(value) is int and -_I64_LIMIT < value < _I64_LIMIT else None


def number(value: object) -> float | None:
    """A JSON value as a finite number; None for anything else."""
    if type(value) is int and abs(value) < _I64_LIMIT:
        return float(value)
    return value if type(value) is float and math.isfinite(value) else None


def text(value: object) -> str | None:
    """A JSON value as text that can be encoded; None for anything else."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else None


def clock_offset_ns(anchor: object) -> int | None:
    """Unix time minus the monotonic clock, by a clock anchor in JSON; None without a whole one."""
    if not isinstance(anchor, dict):
        return None
    wall, mono = integer(anchor.get("wall_ns")), integer(anchor.get("mono_ns"))
    return None if wall is None or mono is None else wall - mono


def mean(values: pl.Series) -> float | None:
    """Mean without nulls; None where nothing is left."""
    value = values.mean()
    return float(value) if isinstance(value, (int, float)) else None


def median(values: pl.Series) -> float | None:
    """Median without nulls; None where nothing is left."""
    value = values.median()
    return float(value) if isinstance(value, (int, float)) else None
