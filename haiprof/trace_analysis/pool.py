"""The same question asked of every rank: in this process, in local processes, or on a cluster."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, TypeVar

from haiprof.base.errors import HaiprofError
from haiprof.trace_format.kineto.rank_trace import Trace

_Result = TypeVar("_Result")
Question = Callable[..., _Result]
"""A module-level function: (trace, **options) to something small that can be pickled."""
Progress = Callable[[int, int], None]
"""Called with (files done, files in all) after each file."""

SMALL_BYTES = 32 << 20
"""Files smaller than this in total are read in this process: starting others takes longer."""


class Pool(Protocol):
    """Where questions are answered."""

    def map(
        self,
        question: Question[_Result],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:
        """The answer for each file, in order."""


class Serial:
    """Answers in this process; traces stay open for further questions."""

    def __init__(self) -> None:
        self._traces: dict[Path, Trace] = {}

    def map(
        self,
        question: Question[_Result],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:
        """One file after the other."""
        answers = []
        for path in paths:
            answers.append(_answer(question, self.trace(path), options))
            report_progress(progress, len(answers), len(paths))
        return answers

    def trace(self, path: Path) -> Trace:
        """The trace of a file, the same at every call."""
        if path not in self._traces:
            self._traces[path] = Trace(path)
        return self._traces[path]


class LocalProcesses:
    """Answers in processes of this machine."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count or len(os.sched_getaffinity(0))

    def map(
        self,
        question: Question[_Result],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:
        """Several files at a time; each answer is the same as in one process."""
        workers = min(self._count, len(paths))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            with _isolate_main(question):
                started = {
                    at: executor.submit(ask, question, paths[at], dict(options))
                    for at in _largest_first(paths)
                }
            tasks = [started[at] for at in range(len(paths))]
            if progress is not None:
                for done, _ in enumerate(as_completed(tasks), start=1):
                    report_progress(progress, done, len(tasks))
            try:
                return [task.result() for task in tasks]
            except BrokenProcessPool:
                raise _killed_error(tasks, paths) from None
            finally:
                for task in tasks:
                    task.cancel()


def _largest_first(paths: Sequence[Path]) -> list[int]:
    """Indices of the files, the largest first: at the end it would occupy one process alone."""

    def size(at: int) -> int:
        try:
            return paths[at].stat().st_size
        except OSError:  # the reader reports it
            return 0

    return sorted(range(len(paths)), key=size, reverse=True)


def default_pool(paths: Sequence[Path]) -> Pool:
    """Local processes for several files that are large in total; else this process."""
    large = sum(path.stat().st_size for path in paths) > SMALL_BYTES
    return LocalProcesses() if large and len(paths) > 1 else Serial()


def ask(question: Question[_Result], path: Path, options: dict[str, Any]) -> _Result:
    """The work of a worker: opens one file and answers one question about it."""
    return _answer(question, Trace(path), options)


def _answer(question: Question[_Result], trace: Trace, options: Mapping[str, Any]) -> _Result:
    """Answers a question; an unexpected exception becomes an error that names the file."""
    try:
        return question(trace, **options)
    except HaiprofError:
        raise
    except Exception as error:
        name = getattr(question, "__name__", "question")
        raise HaiprofError(
            f"{trace.path}: {name}: {type(error).__name__}: {error}",
            hint="HAIPROF_DEBUG=1 shows the traceback; please report it",
        ) from error


def report_progress(progress: Progress | None, done: int, count: int) -> None:
    """Reports how many files are done, if asked to."""
    if progress is not None:
        progress(done, count)


def _killed_error(tasks: Sequence[Future[Any]], paths: Sequence[Path]) -> HaiprofError:
    """The error of a dead worker; which of the unfinished files it was reading is not known."""
    lost = [
        path.name
        for task, path in zip(tasks, paths, strict=True)
        if task.cancelled() or task.exception() is not None
    ]
    return HaiprofError(
        f"{paths[0].parent}: a process was killed while it worked on one of: {', '.join(lost)}",
        hint="if memory is short: TraceAnalysis(path, pool=Serial()), or fewer LocalProcesses(1)",
    )


_MAIN_LOCK = threading.Lock()


@contextmanager
def _isolate_main(question: Question[Any]) -> Iterator[None]:
    """Keeps spawned processes from running the caller's script, which may lack a `__main__` guard.

    A spawned process imports the parent's `__main__`, which would ask the same questions again.
    Only a question that the script itself defines needs that module.
    """
    if getattr(question, "__module__", "") == "__main__":
        yield
        return
    with _MAIN_LOCK:
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main
