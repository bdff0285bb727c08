"""What every sampler is: a table, a probe with reasons, and samples as whole records."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from haiprof.rundir.layout import RunPaths
from haiprof.rundir.schema import NULL_I64, Table

ALL_METRICS = "all"  # the metric of a `Missing` that leaves nothing of the sampler

Clock = Callable[[], int]
"""Reads CLOCK_MONOTONIC in ns."""


class Missing(NamedTuple):
    """One metric that cannot be measured here."""

    metric: str
    """A column of the table, one entity of the source (`gpu 0`, `rank 1`), or `ALL_METRICS`."""
    reason: str
    """Why, with the file or call that refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The surroundings of a sampler; tests put fakes in."""

    run: RunPaths
    """The run that is recorded."""
    host: str
    """This node's name, as the ranks report it."""
    root: Path = Path("/")
    """Where /proc and /sys are."""
    nvml: ModuleType | None = None
    """A module like pynvml; None imports that."""
    clock: Clock = time.perf_counter_ns
    """CLOCK_MONOTONIC in ns."""


class Sampler(Protocol):
    """Reads one source; owned and called by one thread."""

    name: str
    """Name of the source, its record file and its recorder in `config.RECORDERS`."""
    table: Table
    """What a record holds."""
    read_limit_ns: int
    """A sample that takes longer makes the loop sample less often."""

    def open(self) -> list[Missing]:
        """Finds the source.

        Returns:
            What cannot be measured; with `ALL_METRICS` in it there will be no samples at all.
        """

    def header(self) -> Mapping[str, object]:
        """What the record file's header says about the source; after `open`."""

    def urgent(self) -> bool:
        """Whether something new is worth a sample before the next one is due."""

    def sample(self) -> bytes:
        """Whole records of the table, none or several; a value that cannot be read is null."""

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call, each metric and reason once."""

    def close(self) -> None:
        """Lets go of files and libraries."""


class MissingLog:
    """Collects what cannot be read and hands each metric and reason out once."""

    def __init__(self) -> None:
        self._said: set[Missing] = set()
        self._new: list[Missing] = []

    def note(self, metric: str, reason: str) -> None:
        """Remembers it, unless it was noted before."""
        missing = Missing(metric, reason)
        if missing not in self._said:
            self._said.add(missing)
            self._new.append(missing)

    def drain(self) -> list[Missing]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new


def or_null(value: int | None) -> int:
    """The value as an i64 column stores it."""
    return NULL_I64 if value is None else value
