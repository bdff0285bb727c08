"""The same question asked of every rank: in this process, in local processes, or on a cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol, TypeVar

from haiprof.traces.trace import Trace

_Result = TypeVar("_Result")
Question = Callable[..., _Result]
"""A function of the module level: (trace, **options) to something small that can be pickled."""

SMALL_BYTES = 32 << 20
"""Files smaller than this in sum are read in this process: starting others takes longer."""


class Pool(Protocol):
    """Where questions are answered."""

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any]
    ) -> list[_Result]:
        """The answer for each file, in order."""


class Serial:
    """In this process; traces are kept, so that a second question need not open them again."""

    def __init__(self) -> None:
        self._traces: dict[Path, Trace] = {}

    def map(
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any]
    ) -> list[_Result]:
        """One file after the other."""
        return [question(self._trace(path), **options) for path in paths]

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
        self, question: Question[_Result], paths: Sequence[Path], options: Mapping[str, Any]
    ) -> list[_Result]:
        """Several files at a time; each answer is the same as in one process."""
        workers = min(self._count, len(paths))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as executor:
            tasks = [executor.submit(_ask, question, path, dict(options)) for path in paths]
            return [task.result() for task in tasks]


def _ask(question: Question[_Result], path: Path, options: dict[str, Any]) -> _Result:
    return question(Trace(path), **options)
