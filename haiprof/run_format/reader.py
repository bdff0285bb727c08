"""Reads the whole records and lines of a run directory's files, and notes what was damaged."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError, convert_os_errors
from haiprof.run_format.schema import FORMAT_NAME, SCHEMA_VERSION, ClockAnchor

_HEADER_LIMIT_BYTES = 1 << 20
_TYPE_BYTES = {"i64": 8, "f64": 8, "f32": 4, "u32": 4}
_CLOCK_LIMIT_NS = 1 << 62  # sums and differences of two clocks stay within 64 bits


@dataclass(frozen=True)
class RecordFile:
    """The whole records of one file."""

    path: Path
    table: str
    columns: tuple[tuple[str, str, str, str], ...]  # (name, type, unit, kind) by the writer
    header: dict[str, Any]
    data: bytes  # whole records only
    notes: tuple[str, ...]  # notes on what had to be left out, for people
    first: int = 0  # place in the file of the first record that was read
    torn_bytes: int = 0  # what follows the last whole record
    start: int = 0  # where in the file its first record begins

    @property
    def clock(self) -> ClockAnchor:
        """The anchor of the records' monotonic times."""
        return ClockAnchor(self.header["clock"]["wall_ns"], self.header["clock"]["mono_ns"])

    @property
    def record_bytes(self) -> int:
        """Length of one record."""
        return int(self.header["record_bytes"])

    @property
    def count(self) -> int:
        """Number of whole records."""
        return len(self.data) // self.record_bytes


def read_records(path: Path, *, first: int = 0, limit: int | None = None) -> RecordFile:
    """Reads a `.rec` file; a torn tail is cut at the last whole record and noted."""
    with convert_os_errors(RunFormatError, str(path)), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.readline(_HEADER_LIMIT_BYTES)
        if not start.endswith(b"\n"):
            raise RunFormatError(f"{path}: no complete header line: {_shape(start, size)}")
        text = start[:-1]
        header = parse_object(text)
        if header is None or header.get("format") != FORMAT_NAME:
            raise RunFormatError(f"{path}: not a haiprof record file: {_shape(text)}")
        check_version(path, header.get("version"))
        if not is_consistent(header):
            raise RunFormatError(f"{path}: damaged header: {_shape(text)}")
        length = header["record_bytes"]
        count, torn = divmod(max(size - len(start), 0), length)
        place = min(max(count + first, 0) if first < 0 else first, count)
        wanted = count - place if limit is None else min(limit, count - place)
        file.seek(len(start) + place * length)
        body = file.read(wanted * length)
    columns = tuple((str(n), str(t), str(u), str(k)) for n, t, u, k in header["columns"])
    body = body[: len(body) - len(body) % length]
    notes = (f"{path}: cut {torn} bytes of a torn last record",) if torn and not first else ()
    return RecordFile(path, header["table"], columns, header, body, notes, place, torn, len(start))


def read_lines(path: Path, *, first: int = 0) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The lines of a `.jsonl` file, if any, that are JSON objects, and notes on the others.

    What is before `first`, the place of a line's begin, is not read.
    """
    if not os.path.lexists(path):
        return [], ()
    found = [parse_object(text) for text in _read_bytes(path, first).split(b"\n") if text.strip()]
    bad = found.count(None)
    lines = [line for line in found if line is not None]
    return lines, (f"{path}: {bad} damaged lines left out",) if bad else ()


def parse_object(text: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_failures(path: Path) -> list[str]:
    """Lines of a text log; a missing or unreadable one has none."""
    if not os.path.lexists(path):
        return []
    try:
        return _read_bytes(path).decode("utf-8", "replace").splitlines()
    except RunFormatError as error:
        return [str(error)]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file that holds one object."""
    content = _read_bytes(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunFormatError(f"{path}: not JSON ({error}): {_shape(content)}") from None
    if not isinstance(value, dict):
        raise RunFormatError(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


def try_read_json(path: Path) -> dict[str, Any]:
    """The same; empty where it is not there or not whole (it is being written, a disk is full)."""
    try:
        return read_json(path)
    except RunFormatError:
        return {}


def try_read_lines(path: Path) -> list[dict[str, Any]]:
    """Lines as `read_lines` reads them; none where the file cannot be read."""
    try:
        return read_lines(path)[0]
    except RunFormatError:
        return []


def check_version(path: Path, version: object) -> None:
    """Refuses a file of another version."""
    if version != SCHEMA_VERSION:
        raise RunFormatError(
            f"{path}: written in format version {version!r}, this haiprof reads {SCHEMA_VERSION}",
            hint="open it with the haiprof that recorded it",
        )


def _read_bytes(path: Path, first: int = 0) -> bytes:
    with convert_os_errors(RunFormatError, str(path)), open_regular(path) as file:
        file.seek(first)
        return file.read()


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read; nothing else than a regular file."""
    # Not blocking: a pipe or a device in a file's place must not block the reader.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise RunFormatError(f"{path}: not a regular file")
    return file


def is_consistent(header: dict[str, Any]) -> bool:
    """Whether a header says all that is needed to read its records."""
    try:
        words = [tuple(column) for column in header["columns"]]
        names = [name for name, _, _, _ in words]
        sizes = [_TYPE_BYTES[column_type] for _, column_type, _, _ in words]
        clock = (header["clock"]["wall_ns"], header["clock"]["mono_ns"])
        return bool(
            isinstance(header["table"], str)
            and sizes
            and all(isinstance(word, str) and word for column in words for word in column)
            and len(set(names)) == len(names)
            and type(header["record_bytes"]) is int
            and header["record_bytes"] == sum(sizes)
            and all(type(time) is int and 0 <= time < _CLOCK_LIMIT_NS for time in clock)
        )
    except (KeyError, TypeError, ValueError):
        return False


def _shape(content: bytes, size: int | None = None) -> str:
    """The file's length and beginning, for people to recognize it."""
    length, begin = len(content) if size is None else size, content[:24].decode(errors="replace")
    return f"{length} bytes, begins {begin!r}" if content else "it is empty"
