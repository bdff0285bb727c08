"""The columns of a trace on disk: beside the file, or in the user's cache where that is read-only.

A cache is a folder that appears whole, by a rename: readers see all of it or nothing, and of two
processes that build the same one the second discards its own. Its name holds the format's version
and a key of the file: size, times of change, and a hash of its beginning, its end and 64 places in
between. Hashing all of a large file would take as long as reading it. Every part has a checksum;
what does not fit is built anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.errors import TraceFormatError
from haiprof.traces.columns import by_start, finished, merged
from haiprof.traces.load import LoadReport, read_trace
from haiprof.traces.tables import TABLES, TRACE_VERSION

_PART_ROWS = 1 << 15
_SAMPLE_BYTES, _SAMPLE_COUNT = 4096, 64
_META, _TEXTS = "trace.json", "texts"
_BUILDING = ".building-"
_UNFINISHED_S = 24 * 3600.0
"""After this long nobody is at work any more in a folder that was not finished."""
_UNUSED_S = 30 * 24 * 3600.0
"""After this long without a use a cache in the user's cache folder is dropped."""

Parts = dict[str, list[bytes]]
"""Tables as Arrow IPC, in memory."""


class TraceColumns:
    """The tables of one file, read when they are asked for.

    Args:
        path: The trace.
        key: Its `content_key`.
        content: What `_META` holds.
        source: The folder with the parts, or the parts themselves.
    """

    def __init__(self, path: Path, key: str, content: dict[str, Any], source: Path | Parts) -> None:
        self._path, self._key, self._source = path, key, source
        self._parts: dict[str, list[list[Any]]] = content["parts"]
        """Of each table: checksum and columns of each part."""
        self.metadata: dict[str, Any] = content["metadata"]
        told = content["report"]
        lists = {name: tuple(told[name]) for name in ("examples", "file_notes")}
        self.report = LoadReport(**{**told, **lists, "path": str(path)})
        self._texts = pl.Enum(self._part(_TEXTS, 0).frame()["text"])

    def table(self, name: str) -> pl.DataFrame:
        """One table by start, the longer event first; columns in `tables.TABLES`, texts as Enum.

        Raises:
            TraceFormatError: The trace has changed since it was opened.
        """
        parts = [self._part_or_again(name, at) for at in range(len(self._parts.get(name, [])))]
        if not parts:
            return finished(name, pl.DataFrame(), self._texts)
        if len(parts) == 1:
            whole = parts[0].frame()
            return finished(name, whole[_order(whole["ts_ns"], whole["dur_ns"])], self._texts)
        ts_ns, dur_ns = _column(parts, "ts_ns"), _column(parts, "dur_ns")
        order = _order(ts_ns, dur_ns)
        del ts_ns, dur_ns
        columns = [  # one after the other, for memory
            _column(parts, column.name)[order]
            for column in TABLES[name]
            if any(part.holds(column.name) for part in parts)
        ]
        return finished(name, pl.DataFrame(columns), self._texts)

    def parts(self, name: str) -> Iterator[pl.DataFrame]:
        """The same in the file's order, in pieces of bounded size."""
        for number in range(len(self._parts.get(name, []))):
            part = self._part_or_again(name, number)
            yield finished(name, part.frame(), self._texts)

    def _part_or_again(self, name: str, number: int) -> _Part:
        for places in (cache_folders(self._path, self._key), []):
            try:
                return self._part(name, number)
            except (OSError, ValueError):  # noqa: PERF203 - twice at most
                self._build_again(places)
        return self._part(name, number)

    def _part(self, name: str, number: int) -> _Part:
        """A part, if it is as it was written; a ValueError says that it is not."""
        if isinstance(self._source, Path):
            data = (self._source / _part_name(name, number)).read_bytes()
        else:
            data = self._source[name][number]
        checksum, columns = self._parts[name][number]
        if zlib.crc32(data) != checksum:
            raise ValueError(f"{name} {number} is damaged")
        return _Part(data, columns)

    def _build_again(self, places: list[Path]) -> None:
        """Somebody has removed or damaged the cache since it was opened."""
        if content_key(self._path) != self._key:
            raise TraceFormatError(
                f"{self._path}: it has changed since it was opened", hint="open it once more"
            )
        if isinstance(self._source, Path):
            shutil.rmtree(self._source, ignore_errors=True)
        again = _built(self._path, self._key, places)
        self._source, self._parts = again._source, again._parts


def open_columns(path: Path) -> TraceColumns:
    """The columns of a trace file, from its cache or read now.

    Raises:
        TraceFormatError: It is not a trace, or cannot be read.
    """
    key = content_key(path)
    for folder in cache_folders(path, key):
        with contextlib.suppress(
            OSError, ValueError, KeyError, TypeError, pl.exceptions.PolarsError
        ):
            return _opened(path, key, folder)
    return _built(path, key, cache_folders(path, key))


def _opened(path: Path, key: str, folder: Path) -> TraceColumns:
    content = json.loads((folder / _META).read_text(encoding="utf-8"))
    found = TraceColumns(path, key, content, folder)
    with contextlib.suppress(OSError):
        os.utime(folder)  # in use
    return found


def content_key(path: Path) -> str:
    """What tells this file's content from another's.

    Raises:
        TraceFormatError: It cannot be read.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            kind = "a folder" if path.is_dir() else "no regular file"
            raise TraceFormatError(f"{path}: it is {kind}, not a trace")
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            found = hashlib.blake2b(digest_size=12)
            found.update(f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())
            last = max(0, status.st_size - _SAMPLE_BYTES)
            for place in range(_SAMPLE_COUNT + 1):
                file.seek(last * place // _SAMPLE_COUNT)
                found.update(file.read(_SAMPLE_BYTES))
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise TraceFormatError(f"{path}: {reason or error}") from None
    return f"{TRACE_VERSION}-{found.hexdigest()}"


def cache_folders(path: Path, key: str) -> list[Path]:
    """Where the cache of a file may stand: beside it, or in the user's cache folder."""
    beside = path.parent / f".{path.name}.haiprof" / key
    home = _home()
    return [beside, home / "haiprof" / "traces" / key] if home else [beside]


def _home() -> Path | None:
    """The user's cache folder; None for a user without a home."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        return None


def _built(path: Path, key: str, places: list[Path]) -> TraceColumns:
    """Reads the file into a cache at the first place that can be written, else into memory."""
    for target in places:
        with contextlib.suppress(OSError):
            if _is_meant_read_only(target, path):
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            _tidy(target)
            building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=target.parent))
            try:
                _write(path, key, _FolderParts(building))
                _place(building, target)
                return _opened(path, key, target)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    parts = _MemoryParts()
    content = _write(path, key, parts)
    return TraceColumns(path, key, content, parts.parts)


def _is_meant_read_only(target: Path, path: Path) -> bool:
    """Whether the trace's folder is not to be written, which root could do all the same."""
    beside = target.parent.parent == path.parent
    return beside and not path.parent.stat().st_mode & stat.S_IWUSR


def _place(building: Path, target: Path) -> None:
    """Puts a finished cache in place; one that stands there is whole, or has just been refused."""
    os.chmod(building, target.parent.stat().st_mode & 0o777)
    try:
        os.rename(building, target)
    except OSError:
        aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=target.parent))
        try:
            os.rename(target, aside / "old")
            os.rename(building, target)
        except OSError:
            if not target.is_dir():  # else somebody else was faster
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _tidy(target: Path) -> None:
    """Drops caches of the file's earlier content, of files long unused, and remains of the dead."""
    beside = target.parent.name.startswith(".")
    for other in target.parent.iterdir():
        age_s = time.time() - other.stat().st_mtime
        limit_s = (
            _UNFINISHED_S if other.name.startswith(_BUILDING) else 0.0 if beside else _UNUSED_S
        )
        if other != target and age_s > limit_s:
            shutil.rmtree(other, ignore_errors=True)


def _write(path: Path, key: str, parts: _FolderParts | _MemoryParts) -> dict[str, Any]:
    writer = _PartWriter(parts)
    metadata, texts, report = read_trace(path, writer.add)
    writer.close(texts)
    if content_key(path) != key:
        raise TraceFormatError(
            f"{path}: it changed while it was read", hint="wait until it is written"
        )
    report = replace(report, path="")
    content = {"metadata": metadata, "report": asdict(report), "parts": writer.written}
    parts.finish(content)
    return content


class _Part:
    """Some rows of a table as they are stored."""

    def __init__(self, data: bytes, columns: list[str]) -> None:
        self._data = io.BytesIO(data)
        self._columns = columns

    def holds(self, name: str) -> bool:
        """Whether some row has a value in a column."""
        return name in self._columns

    def column(self, name: str) -> pl.DataFrame:
        """One column; another one, for its height, where it is not held."""
        return self.frame([name if self.holds(name) else "event"])

    def frame(self, columns: list[str] | None = None) -> pl.DataFrame:
        """Some columns, or all that are held."""
        self._data.seek(0)
        return pl.read_ipc_stream(self._data, columns=columns)


def _order(ts_ns: pl.Series, dur_ns: pl.Series) -> pl.Series:
    return pl.Series(by_start(ts_ns.to_numpy(), dur_ns.to_numpy()), dtype=pl.UInt32)


def _column(parts: list[_Part], name: str) -> pl.Series:
    """One column of all parts in one piece; null in those that hold nothing of it."""
    return merged([part.column(name) for part in parts])[name].rechunk()


def _part_name(name: str, number: int) -> str:
    return f"{name}.{number:05}.arrow"


class _FolderParts:
    """Parts as files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep(self, name: str, number: int, data: bytes) -> None:
        (self._folder / _part_name(name, number)).write_bytes(data)

    def finish(self, content: dict[str, Any]) -> None:
        (self._folder / _META).write_text(json.dumps(content), encoding="utf-8")


class _MemoryParts:
    """Parts where nothing can be written."""

    def __init__(self) -> None:
        self.parts: Parts = {}

    def keep(self, name: str, number: int, data: bytes) -> None:
        self.parts.setdefault(name, []).append(data)

    def finish(self, content: dict[str, Any]) -> None:
        pass


class _PartWriter:
    """Collects a table's frames and writes a part when there are enough rows."""

    def __init__(self, parts: _FolderParts | _MemoryParts) -> None:
        self._parts = parts
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self._rows: dict[str, int] = {}
        self.written: dict[str, list[list[Any]]] = {}

    def add(self, table: str, frame: pl.DataFrame) -> None:
        """Takes some rows."""
        self._waiting.setdefault(table, []).append(frame)
        self._rows[table] = self._rows.get(table, 0) + frame.height
        if self._rows[table] >= _PART_ROWS:
            self._flush(table)

    def close(self, texts: list[str]) -> None:
        """Writes what is left."""
        for table in list(self._waiting):
            self._flush(table)
        self._keep(_TEXTS, pl.DataFrame({"text": texts}, schema={"text": pl.String}))

    def _flush(self, table: str) -> None:
        frames, self._waiting[table], self._rows[table] = self._waiting[table], [], 0
        if frames:
            self._keep(table, merged(frames))

    def _keep(self, name: str, frame: pl.DataFrame) -> None:
        buffer = io.BytesIO()
        frame.write_ipc_stream(buffer, compression="lz4")
        data = buffer.getvalue()
        written = self.written.setdefault(name, [])
        self._parts.keep(name, len(written), data)
        written.append([zlib.crc32(data), frame.columns])
