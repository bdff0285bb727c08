"""Per-rank CPU, memory and read/write bytes, children included, read from outside the process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RankPaths, RunPaths
from haiprof.rundir.reader import read_json
from haiprof.rundir.tables.process import PROCESS
from haiprof.samplers.base import (
    ALL_METRICS,
    Clock,
    CounterState,
    Missing,
    MissingLog,
    Node,
    or_null,
)
from haiprof.samplers.family import Family, FamilyTotals
from haiprof.samplers.procfs import ProcessReading, read_process
from haiprof.samplers.proctree import ProcessTree

_IO_COLUMNS = ("read_bytes", "write_bytes", "storage_read_bytes", "storage_write_bytes")


class ProcessSampler:
    """One record per rank process of this host; ranks are found as they report in.

    Resident memory is summed over processes: pages that workers share with the rank count for
    each of them. Reads through mmap, GPUDirect storage and RDMA are not in the byte counters.

    Args:
        run: Whose ranks.
        host: This host as the ranks name it.
        root: Where /proc is.
        clock: CLOCK_MONOTONIC in ns.
    """

    name = "process"
    recorder = "process"
    every = 1
    table = PROCESS
    read_limit_ns = 50_000_000

    def __init__(
        self,
        run: RunPaths,
        host: str,
        *,
        root: Path = Path("/"),
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._ranks = run.ranks
        self._host = host
        self._root = root
        self._clock = clock
        self._record = PROCESS.struct
        self._tree = ProcessTree(root)
        self._missing = MissingLog()
        self._read_folders: set[str] = set()
        self._families: dict[int, Family] = {}

    @classmethod
    def for_node(cls, node: Node) -> ProcessSampler:
        """The sampler of a node."""
        return cls(node.run, node.host, root=node.root, clock=node.clock)

    def open(self) -> list[Missing]:
        """Sees whether there is a /proc."""
        if (self._root / "proc").is_dir():
            return []
        return [Missing(ALL_METRICS, f"{self._root / 'proc'}: no such folder")]

    def header(self) -> dict[str, object]:
        """Nothing beyond the columns."""
        return {}

    def urgent(self) -> bool:
        """Whether a rank has reported in since the last sample."""
        return any(self._report(name).exists() for name in self._new_folders())

    def sample(self) -> bytes:
        """One record per rank process that is alive."""
        for name in sorted(self._new_folders()):
            self._find_rank(name)
        if not self._families:
            return b""
        self._tree.refresh()
        return b"".join([self._sample_family(family) for family in list(self._families.values())])

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call."""
        return self._missing.drain()

    def drain_lines(self) -> list[Mapping[str, object]]:
        """Nothing: ranks report in themselves."""
        return []

    def states(self) -> list[CounterState]:
        """Of the ranks that reported in."""
        return []

    def close(self) -> None:
        """Holds nothing open between samples: a rank may have hundreds of workers."""

    def _new_folders(self) -> set[str]:
        try:
            return set(os.listdir(self._ranks)) - self._read_folders
        except OSError:
            return set()  # no rank has reported in yet, or the run directory was deleted

    def _report(self, name: str) -> Path:
        return RankPaths(self._ranks / name).report

    def _find_rank(self, name: str) -> None:
        """Takes up the process that a rank folder names; a folder without a report waits."""
        report = self._report(name)
        if not report.exists():
            return
        self._read_folders.add(name)
        try:
            content = read_json(report)
            if content["host"] == self._host:
                self._add_family(name, content)
        except (RunFormatError, KeyError, TypeError, ValueError) as error:
            self._missing.note(f"rank {name}", f"its report cannot be used: {error!r}")

    def _add_family(self, name: str, content: dict[str, Any]) -> None:
        pid, start_ticks = int(content["pid"]), int(content["start_ticks"])
        reading = read_process(self._root, pid)
        if reading is None:
            reason = f"no process {pid} (it has ended, or it runs in another PID namespace)"
        elif reading.start_ticks != start_ticks:
            reason = f"process {pid} is not the one that reported in (it started at another time)"
        else:
            self._families[pid] = Family(pid, start_ticks)
            return
        self._missing.note(f"rank {name}", reason)

    def _sample_family(self, family: Family) -> bytes:
        before = self._clock()
        totals = family.update(self._tree.children, self._read, others=self._families)
        if totals is None:
            del self._families[family.pid]
            return b""
        for reason in totals.io_reasons:
            for column in _IO_COLUMNS:
                self._missing.note(column, f"rank process {family.pid}: {reason}")
        return self._pack(before, family, totals)

    def _read(self, pid: int) -> ProcessReading | None:
        return read_process(self._root, pid)

    def _pack(self, before: int, family: Family, totals: FamilyTotals) -> bytes:
        io_bytes = totals.io_bytes or (None, None, None, None)
        return self._record.pack(
            before,
            self._clock() - before,
            family.pid,
            family.start_ticks,
            totals.process_count,
            totals.cpu_ns,
            totals.cpu_main_ns,
            totals.rss_bytes,
            *map(or_null, io_bytes),
            totals.thread_count,
        )
