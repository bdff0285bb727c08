"""Several tables as CSV files in one folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from haiprof.errors import UsageError
from haiprof.report.exports.tabular import write_csv
from haiprof.report.exports.whole_file import whole_file


def write_tables(tables: Mapping[str, pl.DataFrame], folder: Path, *, force: bool) -> list[Path]:
    """Writes one file per table, named after it.

    Args:
        tables: By name.
        folder: Where; it is made where it is not there.
        force: Whether files that are there may be replaced.

    Returns:
        The files.

    Raises:
        UsageError: One is there already, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}") from None
    paths = {name: folder / f"{name}.csv" for name in tables}
    for path in paths.values():  # before anything is written
        if path.exists() and not force:
            raise UsageError(f"{path}: is there already", hint="--force replaces it")
    for name, path in paths.items():
        with whole_file(path, force=force) as file:
            write_csv(tables[name], file)
    return list(paths.values())
