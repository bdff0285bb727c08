"""DRAM and cross-socket traffic of each socket, from the best source that works here."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from haiprof.agent.samplers.sampler import Node
from haiprof.agent.samplers.socket_counters import Uncore, worst
from haiprof.agent.samplers.table import TableSampler
from haiprof.linux.perf_events import Kernel, LinuxKernel
from haiprof.linux.readings import Clock, Entity, Status, Unavailable
from haiprof.linux.resctrl import resctrl_entities
from haiprof.run_format.tables.memory_bandwidth import MEMORY_BANDWIDTH


class MemoryBandwidthSampler(TableSampler):
    """One record per socket: resctrl where it is mounted, else the memory controllers' counters.

    The two do not count the same: see the columns of the table.
    """

    name = "memory_bandwidth"
    recorder = "numa"
    table = MEMORY_BANDWIDTH

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        kernel: Kernel | None = None,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        super().__init__(clock=clock)
        self._root = root
        self._kernel = kernel or LinuxKernel()

    @classmethod
    def for_node(cls, node: Node) -> MemoryBandwidthSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def find(self) -> Iterable[Entity]:
        """The sockets, from the first source that gives a total."""
        try:
            return resctrl_entities(self._root)
        except Unavailable as why:
            first = why
        try:
            return Uncore(self._root, self._kernel).entities()
        except Unavailable as why:
            raise _neither(first, why) from None


def _neither(resctrl: Unavailable, uncore: Unavailable) -> Unavailable:
    status: Status = worst([uncore, resctrl]).status
    remedies = [why.remedy for why in (uncore, resctrl) if why.remedy]
    reason = f"{uncore.reason}; {resctrl.reason}"
    return Unavailable(reason, status=status, remedy=", or ".join(remedies))
