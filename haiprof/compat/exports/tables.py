"""Several tables as CSV files in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from haiprof.base.errors import UsageError
from haiprof.base.output_file import output_file
from haiprof.base.safe_files import make_named_folder
from haiprof.compat.exports.tabular import write_csv


def write_tables(tables: Mapping[str, pl.DataFrame], folder: Path, *, force: bool) -> list[Path]:
    """Writes one file per table, named after it."""
    try:
        make_named_folder(folder)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}") from None
    paths = {name: folder / f"{name}.csv" for name in tables}
    for path in paths.values():  # before anything is written
        if path.exists() and not force:
            raise UsageError(f"{path}: already exists", hint="--force replaces it")
    for name, path in paths.items():
        with output_file(path, force=force, below=folder) as file:
            write_csv(tables[name], file)
    return list(paths.values())
