"""What the job prints into files, read from beside: last lines, errors, losses, rates.

A pipe or a terminal is somebody else's: nothing is read there, and the job's own is never changed.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from haiprof.agent.printed_words import LINE_CHARS, Stream, Word, take_mark
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.writer import note_line

STDOUT, STDERR = 1, 2
TURN_S = 2.0
TURN_BYTES = 1 << 17
"""So much of a file is read in a turn; of what is more, the end."""
TAIL_BYTES, FAILED_LINES, CLEAN_LINES = 1 << 14, 60, 5
MOST_FILES = 256
_MOST = {"loss": 1, "traceback": 8, "nccl": 8, "memory": 8, "rate": 200}
"""So many words of a kind of one rank in one file are written down: the first ones."""
_RATE_GAP_S = 10.0


class OutputFile(NamedTuple):
    """A file that a process prints into."""

    path: str
    device: int
    inode: int
    begun: int
    """How long it was when the process was first seen."""


class _Source:
    """What is known of one file."""

    def __init__(self, number: int, file: OutputFile) -> None:
        self.number, self.file = number, file
        self.offset, self.rest, self.skipped = file.begun, b"", 0
        self.told: dict[str, Any] = {}
        self.streams: dict[int | None, Stream] = {}
        self.counts: dict[tuple[str, int | None], int] = {}
        self.rate_at: dict[str, float] = {}


class JobOutput:
    """Reads the files that the processes of a node print into, in a thread of its own."""

    def __init__(self, events: Path, proc: Path, rank_of: Callable[[int], int | None]) -> None:
        self._events, self._proc, self._rank_of = events, proc, rank_of
        self._files: dict[int, dict[int, OutputFile]] = {}
        self._sources: dict[tuple[int, int], _Source] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haiprof-output", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """Reads what is left, and ends."""
        self._stop.set()
        self._thread.join(wait_s)

    def find(self, pid: int) -> None:
        """Notes the files that a process prints into: a shell may have put them there later."""
        known = self._files.setdefault(pid, {})
        for stream in (STDOUT, STDERR):
            if stream not in known and (found := _open_file(pid, stream, self._proc)):
                known[stream] = found
                number = len(self._sources)
                if number < MOST_FILES:
                    self._sources.setdefault(found[1:3], _Source(number, found))

    def last_lines(self, pid: int, rank: int | None, *, failed: bool) -> dict[str, list[str]]:
        """What a process printed last, by stream, as far as it is its own.

        In a file that others print to as well, only torch's `[rank1]:` tells whose a line is.
        """
        found, own = {}, self._files.get(pid, {})
        same = own.get(STDOUT, ())[1:3] == own.get(STDERR, ())[1:3]
        for stream, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
            if stream not in own or (stream == STDOUT and same):
                continue  # in the one file errors stand, too
            ranks = self._ranks(own[stream][1:3], but=pid)
            shared = any(rank is None or other not in (None, rank) for other in ranks)
            text = _read(own[stream], None, TAIL_BYTES)[0].decode(errors="replace")
            lines = [line[:LINE_CHARS] for line in text.splitlines()]
            if shared:
                mark = f"[rank{rank}]:"
                lines = [line.removeprefix(mark).removeprefix(" ")
                         for line in lines if line.startswith(mark)]  # fmt: skip
            lines = [line for line in lines if not line.startswith("haiprof: ")]
            kept = lines[-(FAILED_LINES if failed else CLEAN_LINES) :]
            found[name] = [mask_text(line) for line in kept]
        return found

    def _ranks(self, file: tuple[int, ...], but: int | None = None) -> list[int | None]:
        """Of all other processes that print into a file; None for one that is no rank."""
        return [
            self._rank_of(pid)
            for pid, own in list(self._files.items())
            if pid != but and any(each[1:3] == file for each in list(own.values()))
        ]

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(TURN_S)
            for source in list(self._sources.values()):
                with contextlib.suppress(OSError):
                    self._read_on(source, is_last)

    def _read_on(self, source: _Source, is_last: bool) -> None:
        """Reads whole lines that were added; at the end also one that nobody ended."""
        new, begin, source.offset = _read(source.file, source.offset, TURN_BYTES)
        if begin:
            source.skipped, source.rest = source.skipped + begin, b""
        *lines, rest = (source.rest + new).replace(b"\r", b"\n").split(b"\n")
        source.rest = b"" if is_last else rest[:LINE_CHARS]
        for raw in [*lines, rest] if is_last else lines:
            line, rank, process = take_mark(raw[: 2 * LINE_CHARS].decode(errors="replace"))
            if line.startswith("haiprof: "):
                continue
            rank = self._rank_of(process) if rank is None and process is not None else rank
            for word in source.streams.setdefault(rank, Stream()).read_line(line):
                self._note(source, word, rank)
        ranks = sorted({rank for rank in self._ranks(source.file[1:3]) if rank is not None})
        told = {"file": Path(source.file.path).name, "ranks": ranks, "skipped": source.skipped}
        if told != source.told:  # the last one holds: ranks are known once they report in
            source.told = told
            self._write({"type": "output", "output": source.number, **told})

    def _note(self, source: _Source, word: Word, rank: int | None) -> None:
        """Writes a word down, unless there are enough of its kind."""
        place, now = (word.kind, rank), time.monotonic()
        if source.counts.get(place, 0) >= _MOST[word.kind]:
            return
        if word.unit is not None:
            if now < source.rate_at.get(word.unit, 0.0) + _RATE_GAP_S:
                return
            source.rate_at[word.unit] = now
        source.counts[place] = source.counts.get(place, 0) + 1
        self._write({"type": "printed", "output": source.number, "rank": rank, **word._asdict(),
                     "text": mask_text(word.text)})  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        note_line(self._events, {"wall_ns": time.time_ns(), **line})


def _open_file(pid: int, stream: int, proc: Path) -> OutputFile | None:
    """Of a process; None where it is no file (a terminal, a pipe), or cannot be seen."""
    link = proc / str(pid) / "fd" / str(stream)
    try:
        found = link.stat()
        path = os.readlink(link)
    except OSError:
        return None
    is_file = stat.S_ISREG(found.st_mode)
    return OutputFile(path, found.st_dev, found.st_ino, found.st_size) if is_file else None


def _read(file: OutputFile, offset: int | None, limit: int) -> tuple[bytes, int, int]:
    """Bytes from an offset on, or the end of what was printed; what was skipped; the new offset."""
    try:
        number = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", 0, offset or 0
    try:
        found = os.fstat(number)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            return b"", 0, offset or 0
        start = file.begun if offset is None else offset
        start = 0 if start > found.st_size else start  # it was emptied meanwhile
        begin = max(start, found.st_size - limit)
        content = os.pread(number, limit, begin)
        return content, begin - start, begin + len(content)
    except OSError:
        return b"", 0, offset or 0
    finally:
        os.close(number)
