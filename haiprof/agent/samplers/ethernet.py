"""Ethernet below RoCE: pause frames, discards and damaged packets, as the driver counts them."""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from haiprof.agent.samplers.table import Node, TableSampler
from haiprof.linux.ethtool import Ethtool, Ioctl
from haiprof.linux.procfs import link_name, read_text
from haiprof.linux.readings import (
    Entity,
    Reading,
    Unavailable,
    Value,
    os_status,
    refused_reading,
)
from haiprof.run_format.tables import ETHERNET

_ETHER = "1"  # ARPHRD_ETHER, in /sys/class/net/*/type
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+([vs]f\d+|hpf)")  # a virtual function's end in the host
_I64_END = 1 << 63
_US = 1000


@dataclass(frozen=True, slots=True)
class _Names:
    """Statistics that together are one column."""

    pattern: re.Pattern[str]
    unit: int = 1
    """What one count stands for."""


def _names(pattern: str, unit: int = 1) -> _Names:
    return _Names(re.compile(rf"({pattern})\Z"), unit)


# For each column the names of mlx5, bnxt_en and ice, in that order; the first that a driver has
# count, and several of them are added up (a pause is of one priority, or of the whole link).
# Source: kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst;
# drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c; drivers/net/ethernet/intel/ice/ice_ethtool.c.
COLUMNS: Mapping[str, tuple[_Names, ...]] = {
    "receive_pause_count": (
        _names(r"rx_(prio[0-7]|global)_pause"),
        _names(r"rx_pfc_ena_frames_pri[0-7]|rx_pause_frames"),
        _names(r"rx_priority_[0-7]_xoff\.nic|link_xoff_rx\.nic"),
    ),
    "transmit_pause_count": (
        _names(r"tx_(prio[0-7]|global)_pause"),
        _names(r"tx_pfc_ena_frames_pri[0-7]|tx_pause_frames"),
        _names(r"tx_priority_[0-7]_xoff\.nic|link_xoff_tx\.nic"),
    ),
    "receive_pause_ns": (
        _names(r"rx_(prio[0-7]|global)_pause_duration", _US),
        _names(r"pfc_pri[0-7]_rx_duration_us", _US),
    ),
    "transmit_pause_ns": (
        _names(r"tx_(prio[0-7]|global)_pause_duration", _US),
        _names(r"pfc_pri[0-7]_tx_duration_us", _US),
    ),
    "pause_storm_warning_count": (_names("tx_pause_storm_warning_events"),),
    "pause_storm_error_count": (_names("tx_pause_storm_error_events"),),
    "receive_discard_count": (
        _names("rx_discards_phy"),
        _names("rx_stat_discard"),
        _names(r"rx_dropped\.nic"),
    ),
    "transmit_discard_count": (_names("tx_discards_phy"), _names("tx_stat_discard")),
    "out_of_buffer_count": (_names("rx_out_of_buffer"),),
    "receive_crc_error_count": (
        _names("rx_crc_errors_phy"),
        _names("rx_fcs_err_frames"),
        _names(r"rx_crc_errors\.nic"),
    ),
    "receive_symbol_error_count": (_names("rx_symbol_err_phy"),),
    "rdma_receive_bytes": (_names("rx_vport_rdma_unicast_bytes"),),
    "rdma_transmit_bytes": (_names("tx_vport_rdma_unicast_bytes"),),
}

_ANY = re.compile("|".join(n.pattern.pattern for choices in COLUMNS.values() for n in choices))

Places = Mapping[str, tuple[tuple[int, ...], int]]
"""By column: where its statistics stand in the driver's list, and their unit."""


def find_positions(names: Sequence[str]) -> Places:
    """Where a driver's list has what the columns hold."""
    places = {}
    named = [(at, name) for at, name in enumerate(names) if _ANY.match(name)]
    for column, choices in COLUMNS.items():
        for choice in choices:
            found = tuple(at for at, name in named if choice.pattern.match(name))
            if found:
                places[column] = (found, choice.unit)
                break
    return places


class EthernetSampler(TableSampler):
    """One record per Ethernet interface with hardware behind it, where its driver counts any of it.

    A driver may collect hundreds of statistics from the device per call: hence the slow interval,
    and no call at all where none of them is recorded.
    """

    name = "ethernet"
    recorder = "infiniband"
    table = ETHERNET
    every = 10

    def __init__(self, node: Node, *, ioctl: Ioctl = fcntl.ioctl) -> None:
        super().__init__(node)
        self._net = self.root / "sys/class/net"
        self._ioctl = ioctl
        self._ethtool: Ethtool | None = None
        self._known: dict[int, str] = {}

    def find(self) -> Iterable[Entity]:
        """Interfaces whose drivers count something of the table."""
        self._ethtool = Ethtool(self._ioctl)
        entities = self._new_entities(self._ethtool)
        if not self._known:
            raise Unavailable("no Ethernet interface with hardware behind it")
        if not entities:
            reasons = "; ".join(f"{m.metric}: {m.reason}" for m in self.missing.drain())
            raise Unavailable(reasons, status="unsupported")
        return entities

    def refresh(self) -> None:
        """Drops interfaces that are gone or another device by now; adds new ones."""
        if self._ethtool is None:
            return
        present = dict(self._interfaces())
        sampled = {entity.key for entity in self.entities}
        for index in [i for i, name in self._known.items() if present.get(i) != name]:
            del self._known[index]
            if (index,) in sampled:
                self.drop((index,))
        for entity in self._new_entities(self._ethtool):
            self.add(entity)

    def release(self) -> None:
        """Closes the socket."""
        if self._ethtool is not None:
            self._ethtool.close()
            self._ethtool = None

    def _new_entities(self, ethtool: Ethtool) -> list[Entity]:
        found = []
        for index, name in self._interfaces():
            if index not in self._known:
                self._known[index] = name
                entity = self._entity(ethtool, index, name)
                if entity is not None:
                    found.append(entity)
        return found

    def _entity(self, ethtool: Ethtool, index: int, name: str) -> Entity | None:
        driver = link_name(self._net / name / "device/driver")
        try:
            statistics = _Statistics(ethtool, name)
        except OSError as error:
            why = Unavailable(f"ethtool: {error.strerror}", status=os_status(error))
            self.missing.note(name, why)
            return None
        if not statistics.columns:
            reason = f"the driver {driver or 'of it'} counts neither pauses nor discards"
            self.missing.note(name, Unavailable(reason, status="unsupported"))
            return None
        lacking = [column for column in COLUMNS if column not in statistics.columns]
        origin = f"ethtool -S {name}"
        readings = [Reading(columns=statistics.columns, origin=origin, read=statistics.read)]
        if lacking:
            why = Unavailable(f"{origin}: not counted by {driver}", status="unsupported")
            readings.append(refused_reading(lacking, origin, why))
        details = {"driver": driver}
        return Entity(key=(index,), name=name, readings=tuple(readings), details=details)

    def _interfaces(self) -> Iterable[tuple[int, str]]:
        """Index and name of each; those without hardware, and representors, left out."""
        try:
            names = sorted(os.listdir(self._net))
        except OSError:
            return
        for name in names:
            folder = self._net / name
            index = read_text(folder / "ifindex")
            hardware = (folder / "device").exists() and read_text(folder / "type") == _ETHER
            port = read_text(folder / "phys_port_name") or ""
            if index and hardware and not _REPRESENTOR.match(port):
                yield int(index), name


class _Statistics:
    """The statistics of one interface that fill columns."""

    def __init__(self, ethtool: Ethtool, interface: str) -> None:
        self._ethtool = ethtool
        self._interface = interface
        self._learn()
        self.columns = tuple(self._places)

    def read(self) -> Sequence[Value]:
        """One value per column."""
        values = self._ethtool.values(self._interface, self._count)
        if len(values) != self._count:
            self._learn()
            raise Unavailable(f"ethtool -S {self._interface}: the list changed between two reads")
        return [self._sum(column, values) for column in self.columns]

    def _learn(self) -> None:
        names = self._ethtool.names(self._interface)
        self._count = len(names)
        self._places = find_positions(names)

    def _sum(self, column: str, values: Sequence[int]) -> int | None:
        places, unit = self._places.get(column, ((), 1))
        total = sum(values[at] for at in places) * unit
        return total if places and total < _I64_END else None
