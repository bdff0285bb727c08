"""Frames as CSV and Parquet: the columns that `Analyzer` documents, missing values left empty."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO

import polars as pl

from haiprof.base.units import SPACES, visible

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


def print_text(write: Callable[[BinaryIO], None], stdout: BinaryIO) -> None:
    """Writes text to a pipe or file byte for byte, to a terminal without what would steer that."""
    if stdout.isatty():
        shown = io.BytesIO()
        write(shown)
        text = shown.getvalue().decode("utf-8", "replace")
        stdout.write(visible(text, keep=SPACES).encode())
    else:
        write(stdout)
    stdout.flush()


def write_parquet(frame: pl.DataFrame, file: BinaryIO) -> None:
    """Writes the frame with its types; times are integers in ns of Unix time."""
    frame.write_parquet(file)
