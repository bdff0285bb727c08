"""Memory of each NUMA node, and where its pages were allocated."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

from haiprof.agent.samplers.sampler import Node
from haiprof.agent.samplers.table import TableSampler
from haiprof.linux.procfs import file_reading
from haiprof.linux.readings import Clock, Entity, Unavailable, Value
from haiprof.run_format.tables.numa import NUMA

_NODE = re.compile(r"node(\d+)\Z")
_PAGES = (b"numa_hit", b"numa_miss", b"numa_foreign", b"local_node", b"other_node")


class NumaSampler(TableSampler):
    """One record per NUMA node.

    Pages are counted where they are allocated: how often they are used from where is in the tables
    `memory_bandwidth` and `remote_memory`.
    """

    name = "numa"
    recorder = "numa"
    every = 10
    table = NUMA

    def __init__(self, *, root: Path = Path("/"), clock: Clock = time.perf_counter_ns) -> None:
        super().__init__(clock=clock)
        self._nodes = root / "sys/devices/system/node"

    @classmethod
    def for_node(cls, node: Node) -> NumaSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def find(self) -> Iterable[Entity]:
        """The NUMA nodes in /sys."""
        try:
            found = [int(m[1]) for each in self._nodes.iterdir() if (m := _NODE.match(each.name))]
        except OSError:
            found = []
        if not found:
            raise Unavailable(f"{self._nodes}: no NUMA nodes (a kernel without CONFIG_NUMA)")
        return [self._entity(number) for number in sorted(found)]

    def _entity(self, number: int) -> Entity:
        folder = self._nodes / f"node{number}"
        columns = [column.name for column in NUMA.metrics]
        return Entity(
            key=(number,),
            name=f"node {number}",
            readings=(
                file_reading(folder / "meminfo", columns[:2], parse_node_memory),
                file_reading(folder / "numastat", columns[2:], parse_numastat),
            ),
        )


def parse_node_memory(content: bytes) -> tuple[Value, ...]:
    """MemTotal and MemFree in bytes; lines are `Node 0 MemTotal: 11102424 kB`, kB are KiB."""
    words = content.split()
    return tuple(
        int(words[words.index(name) + 1]) * 1024 if name in words else None
        for name in (b"MemTotal:", b"MemFree:")
    )


def parse_numastat(content: bytes) -> tuple[Value, ...]:
    """Pages by where they were meant for and allocated.

    Source: Linux Documentation/admin-guide/numastat.rst.
    """
    words = content.split()
    values = dict(zip(words[0::2], words[1::2], strict=False))
    return tuple(int(values[name]) if name in values else None for name in _PAGES)
