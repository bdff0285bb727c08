"""Node CPU, memory, paging, pressure, disks and network from /proc, one record per sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from haiprof.agent.samplers import cpu, disks, net
from haiprof.agent.samplers.sampler import Node
from haiprof.agent.samplers.table import TableSampler
from haiprof.linux import memory
from haiprof.linux.procfs import file_reading
from haiprof.linux.readings import Clock, Entity, Reading, Value
from haiprof.run_format.tables.host import HOST

PSI_REMEDY = "a kernel with CONFIG_PSI, booted with psi=1"
_NO_PSI = "the kernel has no pressure stall information"


class HostSampler(TableSampler):
    """One record of the node at each sample."""

    name = "host"
    recorder = "host"
    table = HOST

    def __init__(self, *, root: Path = Path("/"), clock: Clock = time.perf_counter_ns) -> None:
        super().__init__(clock=clock)
        self._root = root

    @classmethod
    def for_node(cls, node: Node) -> HostSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def find(self) -> tuple[Entity]:
        """The node."""
        return (Entity(readings=(*_files(self._root), *_pressures(self._root))),)


def _files(root: Path) -> tuple[Reading, ...]:
    def of(
        name: str,
        columns: Sequence[str],
        parse: Callable[[bytes], Sequence[Value]],
        lacking: str = "this kernel does not count it",
    ) -> Reading:
        return file_reading(root / "proc" / name, columns, parse, lacking=lacking)

    tcp = net.ProtocolNumbers("Tcp", net.TCP_FIELDS)
    tcp_trouble = net.ProtocolNumbers("TcpExt", net.TCP_TROUBLE_FIELDS)
    return (
        of("stat", cpu.CPU_COLUMNS, cpu.CpuTimes()),
        of("meminfo", memory.MEMORY_COLUMNS, memory.MemorySizes(), "no such line in it"),
        of("vmstat", memory.PAGING_COLUMNS, memory.Paging()),
        of("diskstats", disks.DISK_COLUMNS, disks.DiskTotals(root), "no whole disk in it"),
        of("net/dev", net.NETWORK_COLUMNS, net.NetworkTotals(root), "no interface beyond lo in it"),
        of("net/snmp", net.TCP_COLUMNS, tcp),
        of("net/netstat", net.TCP_TROUBLE_COLUMNS, tcp_trouble),
    )


def _pressures(root: Path) -> tuple[Reading, ...]:
    def of(what: str, kinds: Sequence[str], parse: Callable[[bytes], Sequence[Value]]) -> Reading:
        columns = [f"pressure_{what}_{kind}_ns" for kind in kinds]
        path = root / "proc" / "pressure" / what
        return file_reading(path, columns, parse, lacking=_NO_PSI, remedy=PSI_REMEDY)

    both = ("some", "full")
    return (
        of("cpu", ("some",), memory.parse_some_pressure),
        of("memory", both, memory.parse_pressure),
        of("io", both, memory.parse_pressure),
    )
