"""The columns of a trace on disk: beside the file, or in the user's cache where that is read-only.

A cache is a folder that appears whole, by a rename: readers see all of it or nothing, and of two
processes that build the same one the second discards its own. Its name holds the format's version
and a key of the file: size, time of change, and a hash of its beginning, its end and 64 places in
between. Hashing all of a large file would take as long as reading it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.errors import TraceFormatError
from haiprof.traces.columns import finished
from haiprof.traces.load import LoadReport, read_trace
from haiprof.traces.tables import TABLES, TRACE_VERSION

_PART_ROWS = 1 << 18
_SAMPLE_BYTES, _SAMPLE_COUNT = 4096, 64
_META = "trace.json"


class TraceColumns:
    """The tables of one file, read when they are asked for.

    Args:
        folder: A cache folder that is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        content = json.loads((folder / _META).read_text(encoding="utf-8"))
        self.metadata: dict[str, Any] = content["metadata"]
        self.report = LoadReport(**{**content["report"], "examples": tuple(
            content["report"]["examples"])})  # fmt: skip
        self._texts = pl.Enum(content["texts"])

    def table(self, name: str) -> pl.DataFrame:
        """One table whole; columns in `tables.TABLES`, texts as an Enum."""
        paths = sorted(self.folder.glob(f"{name}.*.arrow"))
        parts = [pl.read_ipc(path) for path in paths]
        if not parts:
            types = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.UInt32}
            parts = [pl.DataFrame(schema={c.name: types[c.type] for c in TABLES[name]})]
        return finished(name, pl.concat(parts, rechunk=True), self._texts)

    def parts(self, name: str) -> Iterator[pl.DataFrame]:
        """The same in pieces of at most a quarter of a million rows, in the file's order."""
        for path in sorted(self.folder.glob(f"{name}.*.arrow")):
            yield finished(name, pl.read_ipc(path), self._texts)


def open_columns(path: Path) -> TraceColumns:
    """The columns of a trace file, from its cache or read now.

    Raises:
        TraceFormatError: It is not a trace, or cannot be read.
    """
    key = content_key(path)
    for folder in cache_folders(path, key):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return TraceColumns(folder)
    return _built(path, key)


def content_key(path: Path) -> str:
    """What tells this file's content from another's.

    Raises:
        TraceFormatError: It cannot be read.
    """
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found = hashlib.blake2b(digest_size=12)
            found.update(f"{status.st_size} {status.st_mtime_ns}".encode())
            last = max(0, status.st_size - _SAMPLE_BYTES)
            for place in range(_SAMPLE_COUNT + 1):
                file.seek(last * place // _SAMPLE_COUNT)
                found.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise TraceFormatError(f"{path}: {error.strerror or error}") from None
    return f"{TRACE_VERSION}-{found.hexdigest()}"


def cache_folders(path: Path, key: str) -> tuple[Path, Path]:
    """Where the cache of a file may stand: beside it, or in the user's cache folder."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return path.parent / f".{path.name}.haiprof" / key, home / "haiprof" / "traces" / key


def _built(path: Path, key: str) -> TraceColumns:
    """Reads the file into a cache at the first place that can be written."""
    beside, in_home = cache_folders(path, key)
    for target in (beside, in_home):
        try:
            if target is beside and not path.parent.stat().st_mode & stat.S_IWUSR:
                continue  # meant to be read only, also by root
            target.parent.mkdir(parents=True, exist_ok=True)
            building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        except OSError:
            continue
        try:
            _write(path, building)
            return TraceColumns(_placed(building, target))
        finally:
            shutil.rmtree(building, ignore_errors=True)
    raise TraceFormatError(
        f"{path}: no room for its columns beside it or in {in_home.parent}",
        hint="set XDG_CACHE_HOME to a folder that can be written",
    )


def _placed(building: Path, target: Path) -> Path:
    """Puts a finished cache in place and drops those of the file's earlier content."""
    try:
        os.rename(building, target)
    except OSError:
        if not target.is_dir():  # somebody else was first, or it cannot be placed at all
            raise
    if target.parent.name.startswith("."):
        for other in target.parent.iterdir():
            if other != target and not other.name.startswith(".building-"):
                shutil.rmtree(other, ignore_errors=True)
    return target


def _write(path: Path, folder: Path) -> None:
    writer = _PartWriter(folder)
    metadata, texts, report = read_trace(path, writer.add)
    writer.close()
    content = {"metadata": metadata, "texts": texts, "report": asdict(report)}
    (folder / _META).write_text(json.dumps(content), encoding="utf-8")


class _PartWriter:
    """Collects a table's parts and writes a file when there are enough rows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self._rows: dict[str, int] = {}
        self._count: dict[str, int] = {}

    def add(self, table: str, part: pl.DataFrame) -> None:
        """Takes a part."""
        self._waiting.setdefault(table, []).append(part)
        self._rows[table] = self._rows.get(table, 0) + part.height
        if self._rows[table] >= _PART_ROWS:
            self._flush(table)

    def close(self) -> None:
        """Writes what is left."""
        for table in list(self._waiting):
            self._flush(table)

    def _flush(self, table: str) -> None:
        parts, self._waiting[table], self._rows[table] = self._waiting[table], [], 0
        if parts:
            number = self._count.get(table, 0)
            self._count[table] = number + 1
            path = self._folder / f"{table}.{number:05}.arrow"
            pl.concat(parts).write_ipc(path, compression="lz4")
