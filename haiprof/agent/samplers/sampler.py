"""The interface of samplers: a table, what is missing and why, and samples as whole records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, Protocol

from haiprof.agent.samplers.rank_reports import RankReports
from haiprof.linux.readings import Clock, Status
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import Table

REASONS_PER_METRIC = 200
ALL_METRICS = "all"  # the metric of a `Missing` that leaves nothing of the sampler


class Missing(NamedTuple):
    """One metric that cannot be measured here."""

    metric: str
    """A column of the table, one entity of the source (`gpu 0`, `rank 1`), or `ALL_METRICS`."""
    reason: str
    """Why, with the file or call that refused."""
    status: Status = "absent"
    remedy: str = ""
    """What a user or an administrator would have to set; empty where nothing helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterState:
    """One counter as `haiprof doctor` lists it."""

    source: str
    """The sampler's name."""
    entity: str
    """What of it, such as `gpu 0` or `mlx5_0 port 1`; empty for the node as a whole."""
    metric: str
    """The column, or `ALL_METRICS` where nothing of the sampler is there."""
    unit: str
    status: Status
    value: float | int | None
    """As read now: of a counter that only grows, its present count."""
    origin: str
    """The file or call that it is read from."""
    read_ns: int | None
    """What that read takes, with the other columns that it fills."""
    reason: str = ""
    remedy: str = ""


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
    pid: int | None = None
    """A process to treat as a rank though it did not report in: `haiprof doctor`'s own."""
    reports: RankReports | None = None
    """What ranks reported, read once for all samplers."""


class Sampler(Protocol):
    """Reads one source; owned and called by one thread."""

    name: str
    """Name of the source and of its record file."""
    recorder: str
    """The recorder in `config.RECORDERS` that switches it."""
    every: int
    """It samples at every Nth interval of its recorder."""
    table: Table
    """What a record holds."""
    read_limit_ns: int
    """A sample that takes longer makes the loop sample less often."""

    def open(self) -> list[Missing]:
        """Finds the source."""

    def header(self) -> Mapping[str, object]:
        """What the record file's header says about the source; after `open`."""

    def urgent(self) -> bool:
        """Whether something new needs a sample before the next one is due."""

    def sample(self) -> bytes:
        """Whole records of the table, none or several; values that cannot be read are missing."""

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call, each metric and reason once."""

    def drain_lines(self) -> list[Mapping[str, object]]:
        """What else happened since the last call, as lines for the node's events file.

        Each has a `type`: `entity` for an entity that appeared later (with `key` and `name`), or
        one that the sampler documents.
        """

    def states(self) -> list[CounterState]:
        """Every counter with its present value and the cost of its read, or why there is none.

        Called after `open`, by `haiprof doctor` only: it reads each source once more, timed.
        """

    def close(self) -> None:
        """Closes files and libraries."""


class MissingLog:
    """Collects what cannot be read, and returns each metric and reason once.

    A reason may hold a number that differs each time: only the first `REASONS_PER_METRIC` of one
    metric are stored, so that neither this nor the events file grows without bound.
    """

    def __init__(self) -> None:
        self._said: dict[str, set[Missing]] = {}
        self._new: list[Missing] = []

    def note(self, metric: str, reason: str, status: Status = "absent", remedy: str = "") -> None:
        """Remembers it, unless it was noted before."""
        missing = Missing(metric, reason, status, remedy)
        said = self._said.setdefault(metric, set())
        if missing not in said and len(said) < REASONS_PER_METRIC:
            said.add(missing)
            self._new.append(missing)

    def drain(self) -> list[Missing]:
        """What is new since the last call."""
        new, self._new = self._new, []
        return new
