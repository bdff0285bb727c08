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

from haiprof.errors import HaiprofError
from haiprof.traces.trace import Trace

_Result = TypeVar("_Result")
Question = Callable[..., _Result]
"""A function of the module level: (trace, **options) to something small that can be pickled."""
Progress = Callable[[int, int], None]
"""Told (files done, files in all) after each file."""

SMALL_BYTES = 32 << 20
"""Files smaller than this in sum are read in this process: starting others takes longer."""


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
    """In this process; traces are kept, so that a second question need not open them again."""

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
            answers.append(_answer(question, self._trace(path), options))
            tell(progress, len(answers), len(paths))
        return answers

    def _trace(self, path: Path) -> Trace:
        if path not in self._traces:
            self._traces[path] = Trace(path)
        return self._traces[path]


class LocalProcesses:
    """In processes of this machine.

    Args:
        count: How many; None takes one per core that this process may use.
    """

    def __init__(self, count: int | None = None) -> None:
        self._count = count or len(os.sched_getaffinity(0))

    def map(
        self,
        question: Question[_Result],
        paths: Sequence[Path],
        options: Mapping[str, Any],
        progress: Progress | None = None,
    ) -> list[_Result]:
        """Several files at a time; each answer is the same as in one process.

        Raises:
            HaiprofError: A process was killed, for want of memory for example.
        """
        workers = min(self._count, len(paths))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            with _caller_not_run_again(question):
                started = {
                    at: executor.submit(ask, question, paths[at], dict(options))
                    for at in _largest_first(paths)
                }
            tasks = [started[at] for at in range(len(paths))]
            _watch(tasks, progress)
            try:
                return [task.result() for task in tasks]
            except BrokenProcessPool:
                raise _killed(tasks, paths) from None
            finally:
                for task in tasks:
                    task.cancel()


def _largest_first(paths: Sequence[Path]) -> list[int]:
    """Places of the files: a large one that comes last keeps one process busy alone."""

    def size(at: int) -> int:
        try:
            return paths[at].stat().st_size
        except OSError:  # whoever reads it says so
            return 0

    return sorted(range(len(paths)), key=size, reverse=True)


def default_pool(paths: Sequence[Path]) -> Pool:
    """Processes of this machine for several files that are large together; else this process."""
    large = sum(path.stat().st_size for path in paths) > SMALL_BYTES
    return LocalProcesses() if large and len(paths) > 1 else Serial()


def ask(question: Question[_Result], path: Path, options: dict[str, Any]) -> _Result:
    """What a worker does: opens one file and answers one question about it."""
    return _answer(question, Trace(path), options)


def _answer(question: Question[_Result], trace: Trace, options: Mapping[str, Any]) -> _Result:
    """The question's answer; what nobody foresaw is an error that names the file."""
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


def _watch(tasks: Sequence[Future[Any]], progress: Progress | None) -> None:
    if progress is not None:
        for done, _ in enumerate(as_completed(tasks), start=1):
            tell(progress, done, len(tasks))


def tell(progress: Progress | None, done: int, count: int) -> None:
    """Tells whoever wants to know that so many files are done."""
    if progress is not None:
        progress(done, count)


def _killed(tasks: Sequence[Future[Any]], paths: Sequence[Path]) -> HaiprofError:
    """A worker is gone; which of the open files it had at hand is not known."""
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
def _caller_not_run_again(question: Question[Any]) -> Iterator[None]:
    """Spawned processes do not run the caller's script: it may have no `__main__` guard.

    A new process imports what the parent has as `__main__`, which asks its questions again.
    Questions of haiprof do not need it; only one that the script itself defines does.
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
