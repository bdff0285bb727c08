"""Which processes that are not the job's use the node's cores, looked at once a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from haiprof.agent.node_agent import LiveRank
from haiprof.linux.processes import ProcessTree
from haiprof.linux.procfs import process_ids, read_stat, read_text
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import note_line

_FIRST_S, _LONGEST_S = 5.0, 60.0
"""The first look; each later one waits twice as long as the one before, and at most so long."""
_LEAST_CORES, _MOST_NAMED = 0.1, 4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OtherProcesses:
    """Notes names and cores of the busiest ones.

    A look reads a file for each process of the node: 25 us each, less than 0.01 % of a core.
    """

    def __init__(
        self, run: RunPaths, host: str, job_pid: int, *, root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._run, self._host, self._root, self._clock = run, host, root, clock
        self._own = os.getpid(), job_pid
        self._tree = ProcessTree(root)
        self._wait_s = _FIRST_S / 2
        self._looked_s: float | None = None
        self._ticks: dict[tuple[int, bytes], int] = {}
        """CPU time by process and when it started."""

    def tick(self, ranks: Iterable[LiveRank]) -> None:
        """Looks, where it is time to."""
        now = self._clock()
        if self._looked_s is not None and now - self._looked_s < self._wait_s:
            return
        found = self._read(ranks)
        before, elapsed_s = self._ticks, now - (self._looked_s or now)
        self._ticks, self._looked_s = found, now
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)
        if not before:
            return
        cores = {
            pid: (ticks - before.get((pid, started), 0)) / _TICKS_PER_S / elapsed_s
            for (pid, started), ticks in found.items()
        }
        busiest = sorted(cores, key=lambda pid: -cores[pid])[:_MOST_NAMED]
        named = [
            {"pid": pid, "name": name.strip(), "cores": round(cores[pid], 3)}
            for pid in busiest
            if cores[pid] >= _LEAST_CORES
            and (name := read_text(self._root / f"proc/{pid}/comm")) is not None
        ]
        line = {"type": "other_processes", "time_ns": time.monotonic_ns(),
                "elapsed_ns": round(elapsed_s * 1e9), "processes": named}  # fmt: skip
        note_line(self._run.node(self._host).events, line)

    def _read(self, ranks: Iterable[LiveRank]) -> dict[tuple[int, bytes], int]:
        """CPU time of each process that is neither haiprof's nor the job's: torchrun, a rank."""
        self._tree.refresh()
        own = {pid for each in (*self._own, *(rank.pid for rank in ranks))
               for pid in self._tree.below(each)}  # fmt: skip
        found = {}
        for pid in process_ids(self._root / "proc"):
            if pid not in own and (fields := read_stat(self._root, pid)) is not None:
                found[pid, fields[19]] = int(fields[11]) + int(fields[12])
        return found
