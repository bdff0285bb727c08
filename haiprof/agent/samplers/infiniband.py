"""InfiniBand and RoCE: traffic and congestion of each port, its errors and link more seldom."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from haiprof.agent.samplers.rdma import (
    HEALTH,
    TRAFFIC,
    Attribute,
    Port,
    Pread,
    Source,
    choose_source,
    find_ports,
    link_rate,
    port_details,
)
from haiprof.agent.samplers.sampler import Node
from haiprof.agent.samplers.table import TableSampler
from haiprof.linux.readings import Clock, Entity, Reading, Unavailable, Value, refused_reading
from haiprof.linux.sysfs import inode
from haiprof.run_format.tables.infiniband import INFINIBAND, INFINIBAND_HEALTH

_LOOK_EVERY = 60  # seconds, at the default interval, after which a new port is noticed


class _PortSampler(TableSampler):
    """One record per port.

    On mlx5 each file read is a query to the adapter's firmware: only what is recorded is read. A
    port whose device was registered again (driver reload, hot-plug) is another one: it gets a new
    `port_index` under the same name, and no rate spans both.
    """

    recorder = "infiniband"
    sources: Mapping[str, tuple[Source, ...]]
    keep_open: bool

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        clock: Clock = time.perf_counter_ns,
        pread: Pread = os.pread,
    ) -> None:
        super().__init__(clock=clock)
        self._root = root
        self._pread = pread
        self._ports: dict[int, Port] = {}
        self._next_index = 0
        self._samples = 0

    def find(self) -> Iterable[Entity]:
        """Every port."""
        return [self._take_up(port) for port in find_ports(self._root)]

    def refresh(self) -> None:
        """Drops ports that were registered again or are gone; looks for new ones at intervals."""
        lost = [i for i, port in self._ports.items() if inode(port.folder) != port.inode]
        gone = {self._let_go(index) for index in lost}
        self._samples += 1
        if lost or not self._ports or self._samples % max(1, _LOOK_EVERY // self.every) == 0:
            self._look()
        for name in sorted(gone - {port.name for port in self._ports.values()}):
            self.missing.note(name, "the port is gone: its device was removed")

    def _let_go(self, index: int) -> str:
        self.drop((index,))
        return self._ports.pop(index).name

    def _look(self) -> None:
        try:
            found = find_ports(self._root)
        except Unavailable as why:
            self.missing.note("ports", why.reason, why.status, why.remedy)
            return
        known = {(port.name, port.inode) for port in self._ports.values()}
        for port in found:
            if (port.name, port.inode) not in known:
                self.add(self._take_up(port))

    def _take_up(self, port: Port) -> Entity:
        index, self._next_index = self._next_index, self._next_index + 1
        self._ports[index] = port
        facts = port_details(port)
        readings = (*self.first_readings(port), *self._counters(port, facts["driver"]))
        return Entity(key=(index,), name=port.name, readings=readings, details=facts)

    def first_readings(self, port: Port) -> Sequence[Reading]:
        """Readings that are not counters; none, unless overridden."""
        return ()

    def _counters(self, port: Port, driver: object) -> Iterable[Reading]:
        lacking = []
        for column, sources in self.sources.items():
            source = choose_source(port, sources)
            if source is None:
                lacking.append(column)
            else:
                yield self._reading(port.folder / source.path, column, source.unit)
        if lacking:
            who = f"the driver {driver or 'of this device'}"
            why = f"{who} has no such counter in {port.folder}"
            yield refused_reading(lacking, str(port.folder), Unavailable(why, status="unsupported"))

    def _reading(self, path: Path, column: str, unit: int) -> Reading:
        file = Attribute(path, unit, keep=self.keep_open, pread=self._pread)
        return Reading(columns=(column,), origin=str(path), read=file.read, close=file.close)


class InfinibandSampler(_PortSampler):
    """Bytes, credit stalls, congestion and loss of each port."""

    name = "infiniband"
    table = INFINIBAND
    sources = TRAFFIC
    keep_open = True

    @classmethod
    def for_node(cls, node: Node) -> InfinibandSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)


class InfinibandHealthSampler(_PortSampler):
    """Link state and rate, packets and errors of each port."""

    name = "infiniband_health"
    table = INFINIBAND_HEALTH
    every = 10
    sources = HEALTH
    keep_open = False

    @classmethod
    def for_node(cls, node: Node) -> InfinibandHealthSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def first_readings(self, port: Port) -> Sequence[Reading]:
        """The link."""
        columns = ("link_up_ratio", "link_rate_bytes_per_s")
        origin = f"{port.folder}/{{state,rate}}"
        return (Reading(columns=columns, origin=origin, read=lambda: _link(port.folder)),)


def _link(folder: Path) -> tuple[Value | Unavailable, ...]:
    """Whether the port is active, and its rate then; the file shows some rate when it is down."""
    state = (folder / "state").read_text().strip()
    number, _, word = state.partition(":")
    if word.strip() != "ACTIVE":
        int(number)  # anything but `1: DOWN` and the like is unexpected
        return (0.0, Unavailable(f"the link is down, its state is {state}"))
    return (1.0, link_rate((folder / "rate").read_text()))
