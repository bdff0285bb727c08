"""Child processes beside the job, one at a time: finish raw traces, fold old records."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

from haiprof.base import safe_files
from haiprof.base.errors import RunFormatError
from haiprof.base.messages import print_message
from haiprof.base.subcommand import end_child
from haiprof.base.version import PACKAGE
from haiprof.linux.procfs import process_exists
from haiprof.run_format.layout import AGREED_PREFIX, RankPaths, RunPaths
from haiprof.run_format.phase_ranges import KEY, add_phases, parse_ranges
from haiprof.run_format.raw_traces import Part, Stem, complete_parts, list_names, parse_stem
from haiprof.run_format.reader import read_json, read_lines, try_read_json
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


def main(words: list[str]) -> int:
    """Finishes all parts of one host: `RUN HOST`, and `last` once its ranks have ended."""
    run, host = RunPaths(Path(words[0])), words[1]
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that we clean up
    step_back()
    node = run.node(host)
    safe_files.make_folder(node.root, below=run.root, trusted=True)

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
        for name in safe_files.list_folder(part.run.traces, below=run):
            if any(safe_files.is_unfinished(name, of=path.name) for path in (part.trace, part.et)):
                # Of one that was killed; this part is ours now.
                safe_files.remove_file(part.run.traces / name, below=run)
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
    except (OSError, RunFormatError) as error:
        where = {"stem": stem, "path": str(part.raw.relative_to(part.run.root))}
        note({"type": "trace_kept_raw", **where, "reason": _reason(error)})
        return False
    note({"type": "trace_written", "stem": stem, **line})
    for path in (part.raw, part.et_raw, part.sidecar):  # the sidecar last: it marks the part
        safe_files.remove_file(path, below=run)
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
            safe_files.remove_file(path, below=run.root)
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
    """Writes a file compressed, unless that is done: None where the finished one is alone."""
    try:
        source = safe_files.open_to_read(raw, below=run)
    except FileNotFoundError:
        if finished.exists():
            return None
        raise
    with os.fdopen(source, "rb", buffering=0) as file:
        size = os.fstat(source).st_size
        if type(expected) is int and expected != size:
            raise RunFormatError(f"{size} bytes, but the rank wrote {expected}")
        with safe_files.whole_file(finished, below=run) as target:
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
        fd = safe_files.open_to_read(part.sidecar, below=part.run.root)
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
    if (number := _IOPRIO_SET.get(platform.machine())) is not None:
        ctypes.CDLL(None).syscall(number, _IOPRIO_WHO_PROCESS, 0, _IOPRIO_IDLE)


QUIET_S = 2.0
GRACE_S = 60.0  # for a rank to report the result of its window, once the recording is over
LIMIT_S = 600.0  # for all traces of a node, after the job
_PROGRAM = "from haiprof.agent.trace_finisher import main; raise SystemExit(main(sys.argv[1:]))"


class Helper:
    """Runs a program of haiprof's beside the job, one at a time, out of reach of Ctrl-C."""

    def __init__(
        self, program: str, in_child: Callable[[], None] | None, *, task: str, otherwise: str
    ) -> None:
        self._program = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); {program}"
        self._in_child, self._task, self._otherwise = in_child, task, otherwise
        self.child: subprocess.Popen[bytes] | None = None  # the process that runs, or ran last

    def is_working(self) -> bool:
        """Whether a process of it runs."""
        if self.child is not None and self.child.poll() is not None:
            self.child = None
        return self.child is not None

    def start(self, words: Sequence[str]) -> None:
        """Starts one; says what is left undone where that fails."""
        try:
            self.child = subprocess.Popen(
                [sys.executable, "-I", "-c", self._program, *words], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                preexec_fn=self._in_child,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            print_message(f"cannot {self._task}: {error}; {self._otherwise}")

    def end(self) -> None:
        """Ends the one that runs."""
        child, self.child = self.child, None
        if child is not None and child.poll() is None:
            end_child(child)


@dataclass
class Finisher:
    """Finishes the traces of one host while the job runs, and the rest when it has ended."""

    run: RunPaths
    host: str
    in_child: Callable[[], None] | None = None
    _tried: set[str] = field(default_factory=set)
    _asked_s: float | None = None

    def __post_init__(self) -> None:
        left = f"they stay in {self.run.trace_parts}"
        self._helper = Helper(_PROGRAM, self.in_child, task="compress traces", otherwise=left)

    def tick(self) -> None:
        """Starts a child where a rank has written a trace; called about twice a second."""
        if self._helper.is_working():
            return
        waiting = self._waiting()
        if waiting - self._tried:
            self._tried |= waiting  # what a child could not finish is only tried again at the end
            self._start()

    def is_settled(self) -> bool:
        """Whether every rank of this host is done with its window, and its files are finished."""
        # Called once the recording is over. A rank that never reports the result of its window is
        # waited for at most `GRACE_S`.
        now = time.monotonic()
        self._asked_s = now if self._asked_s is None else self._asked_s
        stems = {stem.text for stem in self._stems() if process_exists(stem.pid)}
        if self._helper.is_working() or stems - self._tried or self._waiting() - self._tried:
            return False
        if now > self._asked_s + GRACE_S:
            return True
        return all(self._is_reported(paths) for _, _, paths in self.run.rank_folders())

    def finish(self, asked_to_end: Callable[[], bool], *, quiet: bool) -> None:
        """Called when the job is over: finishes what is left and prints the progress."""
        try:
            total = len(self._waiting())
            if not self._helper.is_working() and not self._stems():
                return
            began = said = time.monotonic()
            last = False  # a child that knows that all ranks have ended
            while time.monotonic() < began + LIMIT_S:
                if not self._helper.is_working():
                    if last:
                        break
                    last = True
                    self._start("last")
                if not quiet and time.monotonic() > said + QUIET_S:
                    said = time.monotonic()
                    print_message(f"writing traces: {total - len(self._waiting())} of {total}")
                if asked_to_end():
                    break
            self._helper.end()
            left = len(self._waiting())
            if left and not quiet:
                print_message(
                    f"{left} of {total} traces stay uncompressed in {self.run.trace_parts}"
                )
        finally:
            self._tidy()

    def _start(self, *words: str) -> None:
        self._helper.start((str(self.run.root), self.host, *words))

    def _waiting(self) -> set[str]:
        return {part.stem.text for part in complete_parts(self.run, self.host)}

    def _stems(self) -> list[Stem]:
        """Everything of this host's ranks that is not finished, whole or not."""
        found = (parse_stem(name) for name in list_names(self.run.trace_parts))
        return [stem for stem in found if stem is not None and stem.is_of(self.host)]

    def _tidy(self) -> None:
        """Removes the folder of parts once it holds only the files of agreements."""
        folder = self.run.trace_parts
        names = list_names(folder)
        settled = all(name.startswith(AGREED_PREFIX) for name in names)
        reports = (try_read_json(paths.report) for _, _, paths in self.run.rank_folders())
        # A rank of another host may still run.
        ended = (r.get("host") == self.host and not process_exists(r.get("pid")) for r in reports)
        if not settled or not all(ended):
            return
        with suppress(OSError):  # read-only by now, or somebody has just written into it
            for name in names:
                safe_files.remove_file(folder / name, below=self.run.root)
            safe_files.remove_folder(folder, below=self.run.root)

    def _is_reported(self, paths: RankPaths) -> bool:
        """Whether a rank of this host reported the result of a window, or cannot any more."""
        try:
            report = read_json(paths.report)
            lines, _ = read_lines(paths.events)
        except RunFormatError:
            return True
        if report.get("host") != self.host or not process_exists(report.get("pid")):
            return True
        return any(line.get("type") == "trace_window" for line in lines)


EVERY_S = 3600.0
_FOLD_PROGRAM = (
    "from haiprof.agent.trace_finisher import step_back; step_back(); "
    "from haiprof.run_analysis.folding import main; main(sys.argv[1:])"
)


@dataclass
class RunFolder:
    """Folds what one host's ranks and samplers have written, while the job runs."""

    run: RunPaths
    host: str
    detail_h: float
    in_child: Callable[[], None] | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._words = (str(self.run.root), self.host, str(self.detail_h))
        task = f"fold old records of {self.run.root}"
        self._helper = Helper(_FOLD_PROGRAM, self.in_child, task=task, otherwise="they are kept")
        detail_s = self.detail_h * 3600.0
        self._every_s = min(EVERY_S, detail_s)
        self._due_s = self.clock() + detail_s + self._every_s

    def tick(self) -> None:
        """Starts a child when it is due, and none runs."""
        # The child has the lowest priority, and is what the kernel ends first where memory runs
        # out: what it had not put in place by then is folded an hour later.
        if not self._helper.is_working() and self.clock() >= self._due_s:
            self._due_s = self.clock() + self._every_s
            self._helper.start(self._words)

    def close(self) -> None:
        """Ends a child that still works, at the end of the job."""
        self._helper.end()
