"""The reports of a node's ranks (rank.json), read once for all samplers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.linux.readings import Clock
from haiprof.run_format.layout import RankPaths
from haiprof.run_format.reader import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProcess:
    """One process to look at."""

    name: str
    """For people: `rank 0`, `rank 0 attempt 1`."""
    pid: int
    start_ticks: int
    """Its start time (stat field 22): with the pid it names a process for good."""
    gpu_uuid: str | None = None
    """The GPU that it uses, as it reported."""


class RankReports:
    """The reports of all ranks of a run, for all samplers of a node.

    The run directory may be on a file system that hundreds of nodes share: the list is asked for
    once for all samplers, and each report is read once.
    """

    def __init__(self, ranks: Path, *, clock: Clock, fresh_ns: int = 0) -> None:
        self._ranks = ranks
        self._clock = clock
        self._fresh_ns = fresh_ns
        self._listed_ns: int | None = None
        self._names: frozenset[str] = frozenset()
        self._contents: dict[str, Mapping[str, Any]] = {}

    def folders(self) -> frozenset[str]:
        """Names of the rank folders; none before a rank has reported in."""
        if self._is_old():
            try:
                self._names = frozenset(os.listdir(self._ranks))
            except OSError:  # no rank has reported in yet, or the run directory was deleted
                self._names = frozenset()
        return self._names

    def _is_old(self) -> bool:
        if not self._fresh_ns:
            return True
        now, before = self._clock(), self._listed_ns
        is_old = before is None or now - before >= self._fresh_ns
        self._listed_ns = now if is_old else before
        return is_old

    def is_there(self, folder: str) -> bool:
        """Whether a rank folder has its report."""
        return folder in self._contents or self._path(folder).exists()

    def content(self, folder: str) -> Mapping[str, Any]:
        """The report."""
        if folder not in self._contents:
            self._contents[folder] = read_json(self._path(folder))
        return self._contents[folder]

    def _path(self, folder: str) -> Path:
        return RankPaths(self._ranks / folder).report
