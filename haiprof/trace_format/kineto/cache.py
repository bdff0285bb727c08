"""The columns of a trace, and what was found of it, in the user's own cache folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import polars as pl

from haiprof.base import safe_files
from haiprof.base.errors import TraceFormatError
from haiprof.base.options import cache_limit_bytes
from haiprof.trace_format.find import is_parquet_export
from haiprof.trace_format.kineto.columns import by_start, finish_table, merge_parts
from haiprof.trace_format.kineto.events import TABLES, TRACE_VERSION
from haiprof.trace_format.kineto.load import LoadReport, read_trace
from haiprof.trace_format.launch_checks import Finding
from haiprof.trace_format.nsight import export_files, is_nsight_export, read_nsight

_ENTRY = re.compile(r"[0-9a-z-]{8,80}\.(columns|answers|findings)")
_UNFINISHED_S = 24 * 3600.0  # after this time an unfinished file is taken for abandoned


def user_folder() -> Path:
    """The folder for caches that the user has: $XDG_CACHE_HOME, else ~/.cache."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from None


def trace_folder() -> Path:
    """Where entries about traces are."""
    return user_folder() / "haiprof" / "traces"


@contextlib.contextmanager
def read_entry(name: str) -> Iterator[BinaryIO]:
    """Opens an entry to read, and marks it as used now."""
    with open(
        safe_files.open_to_read(trace_folder() / name, below=user_folder(), own=True), "rb"
    ) as file:
        with contextlib.suppress(OSError):
            os.utime(file.fileno())
        yield file


@contextlib.contextmanager
def new_entry(name: str) -> Iterator[BinaryIO]:
    """An entry to write; the folder is made where it is missing."""
    limit = cache_limit_bytes(os.environ)
    if not limit:
        raise OSError(errno.EDQUOT, "the user wants no cache", name)
    folder, home = trace_folder(), user_folder()
    safe_files.make_named_folder(home, mode=safe_files.PRIVATE)
    safe_files.make_folder(folder, below=home, mode=safe_files.PRIVATE, own=True)
    with safe_files.whole_file(folder / name, below=home, mode=0o600, own=True) as file:
        yield file
        _make_room(folder, limit - file.tell(), home=home, but=name)


def _make_room(folder: Path, size: int, *, home: Path, but: str) -> None:
    """Removes entries beyond `size` bytes, and unfinished files of processes that have ended."""
    entries, now_s = [], time.time()
    with safe_files.open_folder(folder, below=home, own=True) as fd, os.scandir(fd) as found:
        for entry in found:
            with contextlib.suppress(OSError):  # somebody else was faster
                status = entry.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if safe_files.is_unfinished(entry.name) and now_s - status.st_mtime > _UNFINISHED_S:
                    safe_files.remove_file(folder / entry.name, below=home)
                elif _ENTRY.fullmatch(entry.name) and entry.name != but:
                    entries.append((status.st_mtime_ns, status.st_size, entry.name))
    total = sum(size for _, size, _ in entries)
    for _, freed, name in sorted(entries):
        if total <= size:
            return
        with contextlib.suppress(OSError):
            safe_files.remove_file(folder / name, below=home)
            total -= freed


_PART_ROWS = 1 << 15
_SAMPLE_BYTES, _SAMPLE_COUNT = 4096, 64
_TEXTS = "texts"
_ENDING = ".columns"
_TIMES = ("ts_ns", "dur_ns")
_TRAILER = struct.Struct("<QI")
"""The last bytes of a cache: length of the JSON before them, and its checksum."""
UNFIT = (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error,
         pl.exceptions.PolarsError)  # fmt: skip
"""What reading a damaged cache raises."""


_Read = Callable[[int, int], bytes]  # reads so many bytes from a place, where the parts are


class TraceColumns:
    """The tables of one file, each read on demand."""

    def __init__(self, path: Path, key: str, content: dict[str, Any], read: _Read) -> None:
        self._path, self._read = path, read
        self.key = key  # the `content_key` of the file
        self._parts: dict[str, list[list[Any]]] = content["parts"]
        """Of each table: checksum, columns, place and length of each part."""
        self.metadata: dict[str, Any] = content["metadata"]
        self.report = replace(msgspec.convert(content["report"], LoadReport), path=str(path))
        self._texts = pl.Enum(self._part(_TEXTS, 0).frame()["text"])

    def table(self, name: str) -> pl.DataFrame:
        """One table by start, the longer event first; columns in `tables.TABLES`, texts as Enum."""
        parts = [self._part_or_again(name, at) for at in range(len(self._parts.get(name, [])))]
        if not parts:
            return finish_table(name, pl.DataFrame(), self._texts)
        whole = parts[0].frame() if len(parts) == 1 else None
        times = (_column(parts, name) if whole is None else whole[name] for name in _TIMES)
        order = pl.Series(by_start(*(each.to_numpy() for each in times)), dtype=pl.UInt32)
        if whole is not None:
            return finish_table(name, whole[order], self._texts)
        columns = [  # one after the other, for memory
            _column(parts, column.name)[order]
            for column in TABLES[name]
            if any(column.name in part.columns for part in parts)
        ]
        return finish_table(name, pl.DataFrame(columns), self._texts)

    def _part_or_again(self, name: str, number: int) -> _Part:
        """A part; the cache is built again where it was evicted or damaged since it was opened."""
        for keep in (True, False):
            try:
                return self._part(name, number)
            except (OSError, ValueError) as error:  # noqa: PERF203 - twice at most
                if content_key(self._path) != self.key:
                    raise TraceFormatError(
                        f"{self._path}: it has changed since it was opened",
                        hint="open it once more",
                    ) from error
                again = _build_cache(self._path, self.key, keep=keep)
                self._read, self._parts = again._read, again._parts
        return self._part(name, number)

    def _part(self, name: str, number: int) -> _Part:
        """A part, if it is as it was written; a ValueError says that it is not."""
        checksum, columns, place, length = self._parts[name][number]
        data = self._read(place, length)
        if zlib.crc32(data) != checksum:
            raise ValueError(f"{name} {number} is damaged")
        return _Part(data, columns)


def open_columns(path: Path) -> TraceColumns:
    """The columns of a trace file, from its cache or read now."""
    key = content_key(path)
    with contextlib.suppress(*UNFIT):
        return _open_cache(path, key)
    return _build_cache(path, key, keep=True)


def _open_cache(path: Path, key: str) -> TraceColumns:
    with read_entry(key + _ENDING) as file:
        end = file.seek(-_TRAILER.size, os.SEEK_END)
        length, checksum = _TRAILER.unpack(file.read(_TRAILER.size))
        if length > end:
            raise ValueError(f"{path}: its cache is damaged")
        file.seek(end - length)
        text = file.read(length)
    if zlib.crc32(text) != checksum:
        raise ValueError(f"{path}: its cache is damaged")
    return TraceColumns(path, key, json.loads(text), partial(_read_cached, key + _ENDING))


def _read_cached(name: str, place: int, length: int) -> bytes:
    """A part of a cache, which is opened for each: there may be more traces than descriptors."""
    with read_entry(name) as file:
        return os.pread(file.fileno(), length, place)


def content_key(path: Path) -> str:
    """Identifies a file's content without reading all of it."""
    try:
        if is_parquet_export(path):  # a folder is its files
            keys = [content_key(file) for file in export_files(path)]
            found = hashlib.blake2b("\n".join(keys).encode(), digest_size=12)
            return f"{TRACE_VERSION}-{found.hexdigest()}"
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


def _build_cache(path: Path, key: str, *, keep: bool) -> TraceColumns:
    """Reads the file into a cache, else into memory."""
    if keep:
        with contextlib.suppress(OSError):
            with new_entry(key + _ENDING) as file:
                content = _write(path, key, file)
                text = json.dumps(content).encode()
                file.write(text + _TRAILER.pack(len(text), zlib.crc32(text)))
            return _open_cache(path, key)
    parts = io.BytesIO()
    content = _write(path, key, parts)
    whole = parts.getbuffer()
    return TraceColumns(path, key, content, lambda place, length: bytes(whole[place:][:length]))


def _write(path: Path, key: str, file: BinaryIO) -> dict[str, Any]:
    writer = _PartWriter(file)
    read = read_nsight if is_nsight_export(path) else read_trace
    metadata, texts, report = read(path, writer.add)
    writer.close(texts)
    if content_key(path) != key:
        raise TraceFormatError(
            f"{path}: it changed while it was read", hint="wait until it is written"
        )
    report = replace(report, path="")
    return {"metadata": metadata, "report": asdict(report), "parts": writer.written}


class _Part(NamedTuple):
    """Some rows of a table as they are stored."""

    data: bytes
    columns: list[str]  # those in which some row has a value

    def frame(self, columns: list[str] | None = None) -> pl.DataFrame:
        """Some columns, or all that there are."""
        return pl.read_ipc_stream(io.BytesIO(self.data), columns=columns)


def _column(parts: list[_Part], name: str) -> pl.Series:
    """One column of all parts in one piece; null in parts without it."""
    # Where a part lacks it, another column has the height.
    own = [part.frame([name if name in part.columns else "event"]) for part in parts]
    return merge_parts(own)[name].rechunk()


class _PartWriter:
    """Collects a table's frames and writes a part when there are enough rows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self.written: dict[str, list[list[Any]]] = {}

    def add(self, table: str, frame: pl.DataFrame) -> None:
        """Takes some rows."""
        frames = self._waiting.setdefault(table, [])
        frames.append(frame)
        if sum(map(len, frames)) >= _PART_ROWS:
            self._keep(table, merge_parts(self._waiting.pop(table)))

    def close(self, texts: list[str]) -> None:
        """Writes what is left."""
        for table, frames in self._waiting.items():
            self._keep(table, merge_parts(frames))
        self._keep(_TEXTS, pl.DataFrame({"text": texts}, schema={"text": pl.String}))

    def _keep(self, name: str, frame: pl.DataFrame) -> None:
        buffer = io.BytesIO()
        frame.write_ipc_stream(buffer, compression="lz4")
        data = buffer.getvalue()
        part = [zlib.crc32(data), frame.columns, self._file.tell(), len(data)]
        self.written.setdefault(name, []).append(part)
        self._file.write(data)


_VERSION = 4  # of the checks: findings of another one are worked out anew
_SIZE_LIMIT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptFindings:
    """What was found of one trace."""

    findings: tuple[Finding, ...]
    corrected: frozenset[str]  # tables that hold something else than the file
    window: tuple[int, int] | None
    """First start and last end of calls and GPU events, or else of operators."""


def recall_findings(key: str) -> KeptFindings | None:
    """What was kept; None where nothing was, or something damaged."""
    with contextlib.suppress(*UNFIT), read_entry(_name(key)) as file:
        data = file.read(_SIZE_LIMIT_BYTES)
        is_sound = int(data[:8], 16) == zlib.crc32(data[8:])
        return msgspec.json.decode(data[8:], type=KeptFindings) if is_sound else None
    return None


def keep_findings(key: str, kept: KeptFindings) -> None:
    """Keeps what was found, if anything can be kept."""
    body = msgspec.json.encode(kept, order="deterministic")
    if len(body) + 8 < _SIZE_LIMIT_BYTES:
        with contextlib.suppress(OSError), new_entry(_name(key)) as file:
            file.write(b"%08x" % zlib.crc32(body) + body)


def _name(key: str) -> str:
    return f"{key}-{_VERSION}.findings"
