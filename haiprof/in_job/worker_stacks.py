"""Samples of DataLoader workers: which line of a dataset or of a collate function each is at."""

from __future__ import annotations

import _thread
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any

from haiprof.in_job.identity import rank_and_world
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.stack_sampler import PACE, StackSampler, why_not_sampled
from haiprof.in_job.threads import start_deaf_thread
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import try_read_json
from haiprof.run_format.stack_lines import END, FILE_LIMIT_BYTES
from haiprof.run_format.writer import LineWriter

WRITE_EVERY_NS = 2_000_000_000
EXIT_WAIT_S = 0.5  # so long the last samples may hold the exit of a worker
SHARE = 0.2  # of the training thread's rate, what the workers of a loader have together
MAX_HZ = 10.0
MIN_HZ = 1.0
SEARCHED_RANKS = 64
_HEADER_LIMIT_BYTES = 1 << 16
_BLOCK_BYTES = 512  # what `st_blocks` counts
_WORKER_MODULE = "torch.utils.data._utils.worker"


def wrap_worker_loop(original: Callable[..., Any], recorder: Recorder) -> Any:
    """The body of a DataLoader worker, sampled by a thread in that worker until it ends."""
    # It runs in a forked child, which has this recorder, or in one that was started anew and has
    # its own; both write to the folder of the rank that started them.
    until = original.__code__

    @functools.wraps(original)
    def _worker_loop(*args: Any, **kwargs: Any) -> Any:
        sampler = None
        with contextlib.suppress(Exception):  # no thread can be started, or it is no worker
            if not recorder.closed and not why_not_sampled():
                sampler = WorkerSampler(recorder, until).start()
        try:
            return original(*args, **kwargs)
        finally:
            if sampler is not None:
                sampler.finish()

    return _worker_loop


class WorkerSampler:
    """Samples the thread that it is made on, below `until`, and writes to the rank's folder."""

    def __init__(self, recorder: Recorder, until: CodeType) -> None:
        ident = _thread.get_ident()
        self._run = recorder.run
        self._hz = recorder.stacks_hz
        self._until = until
        self._sampler = StackSampler(lambda: ident, hz=self._hz, note=lambda _: None, until=until)
        process = sys.modules.get("multiprocessing.process")
        parent = process.parent_process() if process is not None else None
        self._parent = None if parent is None else parent.pid
        """The process that made this worker, also where another one forked it (forkserver)."""
        self._worker: int | None = None
        self._paths: RankPaths | None = None
        self._writer: LineWriter | None = None
        self._ended = _thread.allocate_lock()

    def start(self) -> WorkerSampler:
        """Starts the thread."""
        self._sampler.prepare()
        self._sampler.begin_steps()
        self._ended.acquire()
        start_deaf_thread(self._loop)
        return self

    def finish(self) -> None:
        """Has the thread write what is left, and waits a moment for it; at the worker's end."""
        self._sampler.stop()
        self._ended.acquire(timeout=EXIT_WAIT_S)

    def _loop(self) -> None:
        """Body of the thread; whatever fails ends it, and leaves the worker as it is."""
        with contextlib.suppress(Exception):
            # Workers of a loader share a fifth of the training thread's rate, from their start on.
            self._sampler.sample_until(WRITE_EVERY_NS // 10)
            info = getattr(sys.modules.get(_WORKER_MODULE), "_worker_info", None)
            count = getattr(info, "num_workers", None) or 1
            self._worker = getattr(info, "id", None)
            self._sampler.hz = min(max(SHARE * self._hz / count, MIN_HZ), MAX_HZ, self._hz)
            if self._worker is not None:
                self._open(self._worker)
            while self._sampler.sample_until(WRITE_EVERY_NS) and self._write():
                continue
            self._write(last=True)
        self._ended.release()

    def _write(self, *, last: bool = False) -> bool:
        """Writes what was sampled; False where there is no more to do."""
        if self._worker is None:
            return False
        if self._writer is None:
            self._open(self._worker)
        writer, paths = self._writer, self._paths
        if writer is None or paths is None:
            return not last  # the rank has not reported in yet
        if paths.sampling_over.exists():
            return False
        line = self._sampler.take_line()
        if line is None:
            return True
        used = paths.worker_stacks(self._worker).stat().st_blocks * _BLOCK_BYTES  # without holes
        room = used < FILE_LIMIT_BYTES
        if room:
            writer.append(line)
        if last or not room:
            writer.append({"type": END, "pid": os.getpid(), "full": not room})
        return room

    def _open(self, worker: int) -> None:
        self._paths = find_rank(self._run, self._parent)
        if self._paths is not None and not self._paths.sampling_over.exists():
            path = self._paths.worker_stacks(worker)
            self._sampler.begin_steps(_age_s(path))
            self._writer = LineWriter(path)
            self._writer.append(self._sampler.header(worker))


def _age_s(path: Path) -> float:
    """How long ago the first worker of that number began: later epochs go on at its pace."""
    # Where its beginning was folded, that is the longest age there is.
    try:
        with path.open("rb") as file:
            began_ns = json.loads(file.readline(_HEADER_LIMIT_BYTES))["time_ns"]
        return max(time.perf_counter_ns() - int(began_ns), 0) / 1e9
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, TypeError, LookupError):
        return PACE[-2][0]


def find_rank(run: RunPaths, pid: int | None) -> RankPaths | None:
    """The folder of the rank whose process has that number on this host; None without any."""
    # Its own rank is looked for first: by torch.distributed, or by the launcher's variables.
    if pid is None:
        return None
    rank, _ = rank_and_world()
    folders = run.rank_folders()
    likely = [paths for number, _, paths in reversed(folders) if number == rank]
    others = [paths for number, _, paths in reversed(folders) if number != rank]
    for paths in (*likely, *others)[:SEARCHED_RANKS]:
        report = try_read_json(paths.report)
        if (report.get("pid"), report.get("host")) == (pid, os.uname().nodename):
            return paths
    return None
