"""Finishes raw traces of ranks in a process beside the job: compressed, complete or absent.

It is a child of the launcher with the lowest priority, so that the job waits neither for a CPU nor
for the disk. It may be killed at any moment: a finished file gets its name by one rename, its raw
file is removed after that, and the sidecar last, so that the next child continues where it stopped.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from haiprof.base.errors import RunFormatError
from haiprof.base.safe_files import (
    is_unfinished,
    list_folder,
    make_folder,
    open_to_read,
    remove_file,
    whole_file,
)
from haiprof.linux.procfs import process_exists
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.phase_ranges import KEY, add_phases, parse_ranges
from haiprof.run_format.raw_traces import Part, complete_parts, list_names, parse_stem
from haiprof.run_format.writer import note_line

# Measured on torch traces of 9 to 33 MB: 390 MB/s of CPU time and 1/15 of the size;
# level 1: 412 and 1/13, level 6: 160 and 1/19, level 9: 37 and 1/22.
GZIP_LEVEL = 3
CHUNK_BYTES = 1 << 20
_GZIP_BITS = 31  # zlib's way to ask for gzip's header and checksum
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # Linux, syscall tables; glibc has no wrapper
_IOPRIO_IDLE = 3 << 13  # linux/ioprio.h: class idle
_IOPRIO_WHO_PROCESS = 1

Note = Callable[[Mapping[str, object]], None]
Pieces = Callable[[IO[bytes]], Iterator[bytes]]


class _DamagedError(Exception):
    """A part does not match its sidecar and is left raw."""


def main(words: list[str]) -> int:
    """Finishes all parts of one host: `RUN HOST`, and `last` once its ranks have ended."""
    run, host = RunPaths(Path(words[0])), words[1]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that we clean up
    step_back()
    node = run.node(host)
    make_folder(node.root, below=run.root, trusted=True)

    def note(line: Mapping[str, object]) -> None:
        note_line(node.events, {"time_ns": time.perf_counter_ns(), **line})

    finish_parts(run, note, host=host)
    if words[2:] == ["last"]:
        remove_torn(run, note, host=host)
    return 0


def finish_parts(run: RunPaths, note: Note, *, host: str | None = None) -> list[Path]:
    """Finishes whole parts, one after the other."""
    found = []
    for part in complete_parts(run, host):
        with _claim(part) as mine:
            if mine and _finish(part, note):
                found.append(part.trace)
    return found


def _finish(part: Part, note: Note) -> bool:
    """Finishes one part; one that cannot be finished stays raw, with an event line."""
    began_s = time.monotonic()
    stem, run = part.stem.text, part.run.root
    try:
        sidecar = part.sidecar_content()
        for name in list_folder(part.run.traces, below=run):
            if any(is_unfinished(name, of=path.name) for path in (part.trace, part.et)):
                # Of one that was killed; this part is ours now.
                remove_file(part.run.traces / name, below=run)
        raw_bytes = _compress(
            part.raw, part.trace, sidecar.get("raw_bytes"), run=run, pieces=_with_phases(sidecar)
        )
        if sidecar.get("et_bytes") is not None or part.et_raw.exists():
            _compress(part.et_raw, part.et, sidecar.get("et_bytes"), run=run)
        line = {
            "path": str(part.trace.relative_to(part.run.root)),
            "bytes": part.trace.stat().st_size,
            "raw_bytes": sidecar.get("raw_bytes") if raw_bytes is None else raw_bytes,
            "et_bytes": part.et.stat().st_size if part.et.exists() else None,
            "seconds": round(time.monotonic() - began_s, 3),
            "part": {key: value for key, value in sidecar.items() if key != KEY},
        }
    except (OSError, RunFormatError, _DamagedError) as error:
        where = {"stem": stem, "path": str(part.raw.relative_to(part.run.root))}
        note({"type": "trace_kept_raw", **where, "reason": _reason(error)})
        return False
    note({"type": "trace_written", "stem": stem, **line})
    for path in (part.raw, part.et_raw, part.sidecar):  # the sidecar last: it marks the part
        remove_file(path, below=run)
    return True


def remove_torn(run: RunPaths, note: Note, *, host: str) -> None:
    """Removes incomplete files of killed ranks of this host, with an event line for each window."""
    whole = {part.stem.text for part in complete_parts(run)}
    torn: dict[str, int] = {}
    for name in list_names(run.trace_parts):
        stem = parse_stem(name)
        if stem is None or stem.text in whole or not stem.is_of(host):
            continue
        if process_exists(stem.pid):
            continue  # of another job on this machine that shares the run: it is being written
        path = run.trace_parts / name
        with suppress(OSError):
            size = path.lstat().st_size
            remove_file(path, below=run.root)
            torn[stem.text] = torn.get(stem.text, 0) + size
    for text, size in torn.items():
        reason = "the process ended before its trace was whole"
        note({"type": "trace_dropped", "stem": text, "bytes": size, "reason": reason})


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _with_phases(sidecar: Mapping[str, object]) -> Pieces:
    """Reads a raw trace, and adds the forward and backward ranges that its sidecar has."""
    pid, tid = sidecar.get("pid"), sidecar.get("tid")
    ranges = parse_ranges(sidecar.get(KEY), since_ns=sidecar.get("start_wall_ns"))
    if not ranges or type(pid) is not int or type(tid) is not int:
        return _plain_pieces
    return partial(add_phases, ranges=ranges, pid=pid, tid=tid)


def _plain_pieces(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(CHUNK_BYTES), b"")


def _compress(
    raw: Path, finished: Path, expected: object, *, run: Path, pieces: Pieces = _plain_pieces
) -> int | None:
    """Writes one file compressed, unless that has been done.

    None where it is gone because the finished one is there.
    """
    try:
        source = open_to_read(raw, below=run)
    except FileNotFoundError:
        if finished.exists():
            return None
        raise
    with os.fdopen(source, "rb", buffering=0) as file:
        size = os.fstat(source).st_size
        if type(expected) is int and expected != size:
            raise _DamagedError(f"{size} bytes, but the rank wrote {expected}")
        with whole_file(finished, below=run) as target:
            packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_BITS)
            for piece in pieces(file):
                target.write(packer.compress(piece))
            target.write(packer.flush())
            target.flush()
            os.fsync(target.fileno())
    return size


@contextmanager
def _claim(part: Part) -> Iterator[bool]:
    """Locks a part; the kernel releases the lock when this process dies."""
    try:
        fd = open_to_read(part.sidecar, below=part.run.root)
    except OSError:
        yield False  # finished meanwhile
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    except OSError:
        yield True  # a file system without locks: finishing twice gives the same result
    else:
        yield part.sidecar.exists()
    finally:
        os.close(fd)


def step_back() -> None:
    """Sets the lowest priority for CPU and disk."""
    with suppress(OSError):
        os.nice(19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
