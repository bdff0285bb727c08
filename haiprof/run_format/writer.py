"""Appends records and lines; a full disk loses records, but never the job or the alignment."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

from haiprof.base.descriptors import OwnFile
from haiprof.base.safe_files import create_file, open_to_append, write_file
from haiprof.run_format.reader import read_records
from haiprof.run_format.schema import FORMAT_NAME, SCHEMA_VERSION, ClockAnchor, Table

_HEADER_ALIGN_BYTES = 64
_DEPTH = 2  # files are in RUN/ranks/RANK and RUN/nodes/HOST: neither folder may be a link


class RecordWriter:
    """Appends whole records of one table to one file.

    Its first line is the header, padded so that records start on a 64-byte boundary.
    """

    def __init__(
        self, path: Path, table: Table, *, clock: ClockAnchor, extra: Mapping[str, object]
    ) -> None:
        self.record_bytes = table.record_bytes
        self.written_bytes = self.dropped_bytes = 0
        self.file = OwnFile(path, partial(create_file, below=path.parents[_DEPTH], append=True))
        content = {
            "format": FORMAT_NAME, "version": SCHEMA_VERSION, "table": table.name,
            "record_bytes": table.record_bytes,
            "columns": [[c.name, c.type, c.unit, c.kind] for c in table.columns],
            "clock": asdict(clock), **extra,
        }  # fmt: skip
        text = json.dumps(content).encode()
        header = text + b" " * (-(len(text) + 1) % _HEADER_ALIGN_BYTES) + b"\n"
        if self.file.write(header) != len(header):
            self.file.close()
            raise OSError(28, "no space for the header", str(path))
        self._size = len(header)

    def append(self, data: bytes | memoryview) -> None:
        """Writes whole records; what does not fit on the disk is counted and dropped."""
        if not self.file.is_open:
            self.dropped_bytes += len(data)
            return
        try:
            written = self.file.write(data)
        except OSError:
            written = 0
        whole = written - written % self.record_bytes
        if whole != written:  # a torn record is cut off, so that later ones stay aligned
            try:
                self.file.cut(self._size + whole)
            except OSError:
                self.file.close()
                whole = 0
        self._size += whole
        self.written_bytes += whole
        self.dropped_bytes += len(data) - whole

    def close(self) -> None:
        """Closes the file; further records count as dropped."""
        self.file.close()


def add_records(path: Path, table: Table, data: bytes) -> int:
    """Adds records to a file whose writer has ended; a torn record at its end makes room."""
    torn = read_records(path, first=-1).torn_bytes
    file = OwnFile(path, partial(open_to_append, below=path.parents[_DEPTH]))
    try:
        size = os.stat(path).st_size - torn
        if torn:
            file.cut(size)
        written = file.write(data)
        whole = written - written % table.record_bytes
        if whole != written:
            file.cut(size + whole)
        return whole
    finally:
        file.close()


class LineWriter:
    """Appends JSON lines to one file, each in one write."""

    def __init__(self, path: Path) -> None:
        self.file = OwnFile(path, partial(open_to_append, below=path.parents[_DEPTH]))

    def append(self, line: Mapping[str, object]) -> None:
        """Writes one line; a full disk loses it."""
        data = json.dumps(line).encode() + b"\n"
        with contextlib.suppress(OSError):
            self.file.write(data)

    def close(self) -> None:
        """Closes the file."""
        self.file.close()


def append_line(path: Path, line: Mapping[str, object]) -> None:
    """Appends one line to a file; raises OSError where that cannot be opened."""
    writer = LineWriter(path)
    writer.append(line)
    writer.close()


def note_line(path: Path, line: Mapping[str, object]) -> None:
    """The same; on a full disk, and in a run that was removed, the line is lost."""
    with contextlib.suppress(OSError):
        append_line(path, line)


def write_json(path: Path, content: Mapping[str, object], *, below: Path) -> None:
    """Replaces a JSON file at once: a reader sees the old one or the new one."""
    write_file(path, (json.dumps(content, indent=1) + "\n").encode(), below=below)
