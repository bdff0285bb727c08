"""The rank processes of a node: found as they report in, one entity each in a table by process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from haiprof.agent.samplers.rank_reports import RankProcess, RankReports
from haiprof.agent.samplers.sampler import Node
from haiprof.agent.samplers.table import TableSampler
from haiprof.base.errors import RunFormatError
from haiprof.linux.procfs import read_start_ticks
from haiprof.linux.readings import Clock, Entity, Reading, Unavailable
from haiprof.run_format.layout import RunPaths

_OTHER_NAMESPACE = "run haiprof where the rank runs, in the same container"


class RankSampler(TableSampler):
    """Samples a table with the keys `pid, start_ticks`; a subclass gives the readings.

    A restarted rank and a reused pid have another key, so that no rate spans both. The first
    reading of a rank has to raise `EntityGone` when the process has ended.
    """

    recorder = "process"

    def __init__(
        self,
        run: RunPaths,
        host: str,
        *,
        pid: int | None = None,
        root: Path = Path("/"),
        clock: Clock = time.perf_counter_ns,
        reports: RankReports | None = None,
    ) -> None:
        super().__init__(clock=clock)
        self.root = root
        self._reports = reports or RankReports(run.ranks, clock=clock)
        self._host = host
        self._pid = pid
        self._read_folders: set[str] = set()

    @classmethod
    def for_node(cls, node: Node) -> RankSampler:
        """The sampler of a node."""
        return cls(
            node.run,
            node.host,
            pid=node.pid,
            root=node.root,
            clock=node.clock,
            reports=node.reports,
        )

    def readings(self, process: RankProcess) -> tuple[Reading, ...]:
        """What is read of one process."""
        raise NotImplementedError

    def find(self) -> Iterable[Entity]:
        """The process that was asked for; ranks come with `refresh`."""
        if not (self.root / "proc").is_dir():
            raise Unavailable(f"{self.root / 'proc'}: no such folder")
        if self._pid is None:
            return []
        start_ticks = read_start_ticks(self.root, self._pid)
        if start_ticks is None:
            raise Unavailable(f"no process {self._pid}")
        name = f"process {self._pid}"
        return [self._entity(RankProcess(name=name, pid=self._pid, start_ticks=start_ticks))]

    def refresh(self) -> None:
        """Adds the ranks that have reported in since."""
        for folder in sorted(self._new_folders()):
            self._find_rank(folder)

    def urgent(self) -> bool:
        """Whether a rank has reported in since the last sample."""
        return any(self._reports.is_there(folder) for folder in self._new_folders())

    def _new_folders(self) -> frozenset[str]:
        return self._reports.folders() - self._read_folders

    def _find_rank(self, folder: str) -> None:
        """Adds the process of a rank folder; a folder without a report waits."""
        if not self._reports.is_there(folder):
            return
        self._read_folders.add(folder)
        rank, _, attempt = folder.partition(".")
        name = f"rank {rank}" + (f" attempt {attempt}" if attempt else "")
        try:
            content = self._reports.content(folder)
            if content["host"] != self._host:
                return
            uuid = content.get("gpu_uuid")
            process = RankProcess(
                name=name,
                pid=int(content["pid"]),
                start_ticks=int(content["start_ticks"]),
                gpu_uuid=uuid if isinstance(uuid, str) else None,
            )
        except (RunFormatError, KeyError, TypeError, ValueError) as error:
            self.missing.note(name, f"its report cannot be used: {error!r}")
            return
        self._check(process)

    def _check(self, process: RankProcess) -> None:
        pid, start_ticks = process.pid, read_start_ticks(self.root, process.pid)
        if start_ticks is None:
            reason = f"no process {pid} (it has ended, or it runs in another PID namespace)"
            self.missing.note(process.name, reason, remedy=_OTHER_NAMESPACE)
        elif start_ticks != process.start_ticks:
            reason = f"process {pid} is not the one that reported in (it started at another time)"
            self.missing.note(process.name, reason)
        elif (pid, start_ticks) not in {entity.key for entity in self.entities}:
            self.add(self._entity(process))

    def _entity(self, process: RankProcess) -> Entity:
        key = (process.pid, process.start_ticks)
        return Entity(key=key, name=process.name, readings=self.readings(process))
