"""Appends records and lines; a full disk costs records, never the job, and never the alignment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from haiprof.rundir.clock import ClockAnchor
from haiprof.rundir.schema import FORMAT_NAME, SCHEMA_VERSION, Table

_HEADER_ALIGN_BYTES = 64
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def header_line(table: Table, extra: Mapping[str, object]) -> bytes:
    """The first line of a record file, padded so that records start on a 64-byte boundary."""
    header = {
        "format": FORMAT_NAME,
        "version": SCHEMA_VERSION,
        "table": table.name,
        "record_bytes": table.record_bytes,
        "columns": [[c.name, c.type, c.unit, c.kind] for c in table.columns],
        **extra,
    }
    text = json.dumps(header).encode()
    return text + b" " * (-(len(text) + 1) % _HEADER_ALIGN_BYTES) + b"\n"


class RecordWriter:
    """Appends whole records of one table to one file.

    Args:
        path: The file; it must not exist yet.
        table: What a record holds.
        clock: Anchors the records' monotonic times.
        extra: More for the header, such as `host` and `pid`.

    Raises:
        OSError: The file cannot be created. Later failures only count in `dropped_bytes`.
    """

    def __init__(
        self, path: Path, table: Table, *, clock: ClockAnchor, extra: Mapping[str, object]
    ) -> None:
        self.record_bytes = table.record_bytes
        self.written_bytes = 0
        self.dropped_bytes = 0
        self._fd = os.open(path, _APPEND | os.O_EXCL, 0o644)
        clock_pair = {"wall_ns": clock.wall_ns, "mono_ns": clock.mono_ns}
        header = header_line(table, {"clock": clock_pair, **extra})
        if os.write(self._fd, header) != len(header):
            self._give_up()
            raise OSError(28, "no space for the header", str(path))
        self._size = len(header)

    def append(self, data: bytes | memoryview) -> None:
        """Writes whole records; what does not fit on the disk is counted and dropped."""
        if self._fd < 0:
            self.dropped_bytes += len(data)
            return
        try:
            written = os.write(self._fd, data)
        except OSError:
            written = 0
        whole = written - written % self.record_bytes
        if whole != written and not self._cut(self._size + whole):
            whole = 0
        self._size += whole
        self.written_bytes += whole
        self.dropped_bytes += len(data) - whole

    def close(self) -> None:
        """Closes the file; further records count as dropped."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _cut(self, size: int) -> bool:
        """Removes a torn record so that later ones stay aligned; gives up where that fails."""
        try:
            os.ftruncate(self._fd, size)
        except OSError:
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        os.close(self._fd)
        self._fd = -1


class LineWriter:
    """Appends JSON lines to one file, each in one write.

    Raises:
        OSError: The file cannot be created. Later failures only count in `dropped_count`.
    """

    def __init__(self, path: Path) -> None:
        self.dropped_count = 0
        self._fd = os.open(path, _APPEND, 0o644)

    def append(self, line: Mapping[str, object]) -> None:
        """Writes one line."""
        data = json.dumps(line).encode() + b"\n"
        try:
            if os.write(self._fd, data) != len(data):
                self.dropped_count += 1
        except OSError:
            self.dropped_count += 1

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Puts a whole JSON file in place at once: a reader sees the old one or the new one.

    Raises:
        OSError: The folder is gone, read-only or full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
