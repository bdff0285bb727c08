"""Frames as CSV and Parquet: the columns that `Analyzer` documents, missing values left empty."""

from __future__ import annotations

from typing import BinaryIO

import polars as pl

_LIST_SEPARATOR = "; "
_ROWS_AT_ONCE = 100_000


def write_csv(frame: pl.DataFrame, file: BinaryIO) -> None:
    """Writes a header line and one line per row; lists of words are joined by semicolons."""
    lists = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    joined = [pl.col(name).list.join(_LIST_SEPARATOR) for name in lists]
    table = frame.with_columns(joined)
    file.write(table.clear().write_csv().encode())
    for part in table.iter_slices(_ROWS_AT_ONCE):
        file.write(part.write_csv(include_header=False).encode())


def write_parquet(frame: pl.DataFrame, file: BinaryIO) -> None:
    """Writes the frame with its types; times are integers in ns of Unix time."""
    frame.write_parquet(file)
