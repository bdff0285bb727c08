"""Turns what ranks recorded raw into finished traces: compressed, whole or absent; beside the job.

A child of the launcher at the lowest priority, so that neither the job's threads nor its disk wait.
It may be killed at any moment: a finished file comes into its place by one rename, its raw file
goes after that, and the sidecar goes last, so that the next one goes on where this one stopped.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.parts import Part, complete_parts, list_names, parse_stem
from haiprof.rundir.writer import LineWriter

# Of torch traces of 9 to 33 MB (benchmarks/finish.py): 390 MB/s of CPU time and 1/15 of the size;
# level 1: 412 and 1/13, level 6: 160 and 1/19, level 9: 37 and 1/22.
GZIP_LEVEL = 3
CHUNK_BYTES = 1 << 20
# Neither a link nor a pipe that somebody has put in a file's place leads us astray.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GZIP_BITS = 31  # zlib's way to ask for gzip's header and checksum
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # Linux, syscall tables; glibc has no wrapper
_IOPRIO_IDLE = 3 << 13  # linux/ioprio.h: class idle
_IOPRIO_WHO_PROCESS = 1

Note = Callable[[Mapping[str, object]], None]


class _DamagedError(Exception):
    """A part that is not what its sidecar says; nothing is made of it."""


def main(words: list[str]) -> int:
    """Finishes all parts of one host: `RUN HOST`, and `last` once its ranks have ended."""
    run, host = RunPaths(Path(words[0])), words[1]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that we tidy up
    _step_back()
    with _events(run, host) as note:
        finish_parts(run, note, host=host)
        if words[2:] == ["last"]:
            remove_torn(run, note, host=host)
    return 0


def finish_parts(run: RunPaths, note: Note, *, host: str | None = None) -> list[Path]:
    """Finishes whole parts, one after the other.

    Args:
        run: The run directory.
        note: Takes a line for each: `trace_written` or `trace_kept_raw`.
        host: Only parts of this host; another host's launcher may be at work on its own.

    Returns:
        The traces that are finished now.
    """
    found = []
    for part in complete_parts(run, host):
        with _claim(part) as mine:
            if mine and _finish(part, note):
                found.append(part.trace)
    return found


def _finish(part: Part, note: Note) -> bool:
    """Finishes one part; what cannot be finished stays as it is, with a line that says so."""
    began_s = time.monotonic()
    stem = part.stem.text
    try:
        facts = part.facts()
        for left in part.run.traces.glob(f".{stem}.*.gz.*"):
            if left.suffix[1:].isdigit():  # a pid: of one that was killed; this part is ours now
                left.unlink()
        raw_bytes = _compress(part.raw, part.trace, facts.get("raw_bytes"))
        if facts.get("et_bytes") is not None or part.et_raw.exists():
            _compress(part.et_raw, part.et, facts.get("et_bytes"))
        line = {
            "path": str(part.trace.relative_to(part.run.root)),
            "bytes": part.trace.stat().st_size,
            "raw_bytes": facts.get("raw_bytes") if raw_bytes is None else raw_bytes,
            "et_bytes": part.et.stat().st_size if part.et.exists() else None,
            "seconds": round(time.monotonic() - began_s, 3),
            "part": dict(facts),
        }
    except (OSError, RunFormatError, _DamagedError) as error:
        where = {"stem": stem, "path": str(part.raw.relative_to(part.run.root))}
        note({"type": "trace_kept_raw", **where, "reason": _reason(error)})
        return False
    note({"type": "trace_written", "stem": stem, **line})
    for path in (part.raw, part.et_raw, part.sidecar):  # the sidecar last: it says what is whole
        path.unlink(missing_ok=True)
    return True


def remove_torn(run: RunPaths, note: Note, *, host: str) -> None:
    """Removes what killed ranks of this host left half written, with a line for each window."""
    whole = {part.stem.text for part in complete_parts(run)}
    torn: dict[str, int] = {}
    for name in list_names(run.trace_parts):
        stem = parse_stem(name)
        if stem is None or stem.text in whole or not stem.is_of(host):
            continue
        if Path(f"/proc/{stem.pid}").exists():
            continue  # of another job on this machine that shares the run: it is being written
        path = run.trace_parts / name
        with suppress(OSError):
            size = path.lstat().st_size
            path.unlink()
            torn[stem.text] = torn.get(stem.text, 0) + size
    for text, size in torn.items():
        reason = "the process ended before its trace was whole"
        note({"type": "trace_dropped", "stem": text, "bytes": size, "reason": reason})


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error)


def _compress(raw: Path, finished: Path, expected: object) -> int | None:
    """Writes one file compressed, unless that has been done.

    Returns:
        Length of the raw file; null where it is gone because the finished one is there.

    Raises:
        OSError: It cannot be read, or there is no room for the finished one.
        _DamagedError: It is not the file that the rank wrote.
    """
    try:
        source = os.open(raw, _READ)
    except FileNotFoundError:
        if finished.exists():
            return None
        raise
    with os.fdopen(source, "rb", buffering=0) as file:
        size, mode = os.fstat(source).st_size, os.fstat(source).st_mode
        if not stat.S_ISREG(mode):
            raise _DamagedError(f"not a regular file: {raw}")
        if type(expected) is int and expected != size:
            raise _DamagedError(f"{size} bytes, but the rank wrote {expected}")
        temporary = finished.with_name(f".{finished.name}.{os.getpid()}")
        try:
            with temporary.open("xb", buffering=0) as target:
                for piece in _compressed(iter(lambda: file.read(CHUNK_BYTES), b"")):
                    _write_all(target.fileno(), piece)
                os.fsync(target.fileno())
            temporary.rename(finished)
        finally:
            temporary.unlink(missing_ok=True)
    return size


def _compressed(pieces: Iterator[bytes]) -> Iterator[bytes]:
    packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, _GZIP_BITS)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextmanager
def _claim(part: Part) -> Iterator[bool]:
    """Whether this part is ours for now; the kernel lets go of it when we die."""
    try:
        fd = os.open(part.sidecar, _READ)
    except OSError:
        yield False  # finished meanwhile, or no file at all
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    except OSError:
        yield True  # a file system without locks: done twice is the same as done once
    else:
        yield part.sidecar.exists()
    finally:
        os.close(fd)


@contextmanager
def _events(run: RunPaths, host: str) -> Iterator[Note]:
    """Where a line goes: the node's events; a disk that is full keeps it."""
    node = run.node(host)
    node.root.mkdir(parents=True, exist_ok=True)
    writer = LineWriter(node.events)
    try:
        yield lambda line: writer.append({"time_ns": time.perf_counter_ns(), **line})
    finally:
        writer.close()


def _step_back() -> None:
    """Runs when nobody else wants the CPU, and writes when nobody else wants the disk."""
    with suppress(OSError):
        os.nice(19)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)
