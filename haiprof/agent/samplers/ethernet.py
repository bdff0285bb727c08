"""Ethernet below RoCE: pause frames, discards and damaged packets, as the driver counts them."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from haiprof.agent.samplers.table import ChangingSampler, Node
from haiprof.linux.procfs import link_name, list_names, read_text
from haiprof.linux.readings import Entity, Reading, Unavailable, Value, os_status, refused_reading
from haiprof.run_format.tables import ETHERNET

SIOCETHTOOL = 0x8946
GSTRINGS, GSTATS, GSSET_INFO = 0x1B, 0x1D, 0x37
STATISTICS_SET = 1  # ETH_SS_STATS
_NAME_BYTES = 32  # ETH_GSTRING_LEN
_INTERFACE_BYTES = 16  # IFNAMSIZ
_HEAD = struct.Struct("=II")  # command, number of statistics
_STRINGS_HEAD = struct.Struct("=III")  # command, set, number
_SET_INFO = struct.Struct("=IIQI")  # command, reserved, mask of sets, size of the first
# Kernels before 2026 write as many values as there are by now, whatever the caller has room for
# (`net: ethtool: Don't overflow user buffers`), and the number grows with the channels of a device.
# Pages that are not written cost nothing.
_BUFFER_BYTES = 4 << 20

Ioctl = Callable[[int, int, bytes], object]


class Ethtool:
    """Reads the statistics of network drivers; needs no privilege.

    Source: Linux include/uapi/linux/ethtool.h, net/ethtool/ioctl.c.
    """

    def __init__(self, ioctl: Ioctl = fcntl.ioctl) -> None:
        self._ioctl = ioctl
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def names(self, interface: str) -> list[str]:
        """The names of an interface's statistics; none where its driver has none."""
        _SET_INFO.pack_into(self._buffer, 0, GSSET_INFO, 0, 1 << STATISTICS_SET, 0)
        self._ask(interface)
        _, _, mask, count = _SET_INFO.unpack_from(self._buffer)
        if not mask or not count:
            return []
        _STRINGS_HEAD.pack_into(self._buffer, 0, GSTRINGS, STATISTICS_SET, count)
        self._ask(interface)
        count = min(_STRINGS_HEAD.unpack_from(self._buffer)[2], _BUFFER_BYTES // _NAME_BYTES - 1)
        begin = _STRINGS_HEAD.size
        raw = self._buffer[begin : begin + count * _NAME_BYTES]
        cut = [raw[at : at + _NAME_BYTES] for at in range(0, len(raw), _NAME_BYTES)]
        return [name.partition(b"\0")[0].decode(errors="replace") for name in cut]

    def values(self, interface: str, count: int) -> tuple[int, ...]:
        """The present values, of 64 bits each; none if their number has changed a lot."""
        _HEAD.pack_into(self._buffer, 0, GSTATS, count)
        self._ask(interface)
        found = min(_HEAD.unpack_from(self._buffer)[1], _BUFFER_BYTES // 8 - 1)
        return struct.unpack_from(f"={found}Q", self._buffer, _HEAD.size)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _ask(self, interface: str) -> None:
        name = interface.encode()[: _INTERFACE_BYTES - 1]
        request = struct.pack(f"={_INTERFACE_BYTES}sQ16x", name, self._address)
        self._ioctl(self._socket.fileno(), SIOCETHTOOL, request)


_ETHER = "1"  # ARPHRD_ETHER, in /sys/class/net/*/type
_REPRESENTOR = re.compile(r"(c\d+)?pf\d+([vs]f\d+|hpf)")  # a virtual function's end in the host
_I64_END = 1 << 63
_US = 1000


# For each column patterns of the names of mlx5, bnxt_en and ice, in that order; the first that a
# driver has count, and several of them are added up (a pause is of one priority, or of all).
# Source: kernel Documentation/networking/device_drivers/ethernet/mellanox/mlx5/counters.rst;
# drivers/net/ethernet/broadcom/bnxt/bnxt_ethtool.c; drivers/net/ethernet/intel/ice/ice_ethtool.c.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "receive_pause_count": (
        r"rx_(prio[0-7]|global)_pause",
        r"rx_pfc_ena_frames_pri[0-7]|rx_pause_frames",
        r"rx_priority_[0-7]_xoff\.nic|link_xoff_rx\.nic",
    ),
    "transmit_pause_count": (
        r"tx_(prio[0-7]|global)_pause",
        r"tx_pfc_ena_frames_pri[0-7]|tx_pause_frames",
        r"tx_priority_[0-7]_xoff\.nic|link_xoff_tx\.nic",
    ),
    "receive_pause_ns": (r"rx_(prio[0-7]|global)_pause_duration", r"pfc_pri[0-7]_rx_duration_us"),
    "transmit_pause_ns": (r"tx_(prio[0-7]|global)_pause_duration", r"pfc_pri[0-7]_tx_duration_us"),
    "pause_storm_warning_count": ("tx_pause_storm_warning_events",),
    "pause_storm_error_count": ("tx_pause_storm_error_events",),
    "receive_discard_count": ("rx_discards_phy", "rx_stat_discard", r"rx_dropped\.nic"),
    "transmit_discard_count": ("tx_discards_phy", "tx_stat_discard"),
    "out_of_buffer_count": ("rx_out_of_buffer",),
    "receive_crc_error_count": ("rx_crc_errors_phy", "rx_fcs_err_frames", r"rx_crc_errors\.nic"),
    "receive_symbol_error_count": ("rx_symbol_err_phy",),
    "rdma_receive_bytes": ("rx_vport_rdma_unicast_bytes",),
    "rdma_transmit_bytes": ("tx_vport_rdma_unicast_bytes",),
}

_ANY = re.compile("|".join(name for choices in COLUMNS.values() for name in choices))

Places = Mapping[str, tuple[tuple[int, ...], int]]
"""By column: where its statistics stand in the driver's list, and what one count stands for."""


def find_positions(names: Sequence[str]) -> Places:
    """Where a driver's list has what the columns hold."""
    places = {}
    named = [(at, name) for at, name in enumerate(names) if _ANY.fullmatch(name)]
    for column, choices in COLUMNS.items():
        for choice in choices:
            found = tuple(at for at, name in named if re.fullmatch(choice, name))
            if found:
                places[column] = (found, _US if column.endswith("_ns") else 1)
                break
    return places


class EthernetSampler(ChangingSampler):
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

    def find(self) -> Iterable[Entity]:
        """Interfaces whose drivers count something of the table."""
        self._ethtool = Ethtool(self._ioctl)
        entities = super().find()
        if not self.known:
            raise Unavailable("no Ethernet interface with hardware behind it")
        if not entities:
            reasons = "; ".join(f"{m.metric}: {m.reason}" for m in self.missing.drain())
            raise Unavailable(reasons, status="unsupported")
        return entities

    def release(self) -> None:
        """Closes the socket."""
        if self._ethtool is not None:
            self._ethtool.close()
            self._ethtool = None

    def present(self) -> Mapping[tuple[int, str], tuple[int, str]]:
        """Index and name of each; those without hardware, and representors, left out."""
        found = []
        for name in sorted(list_names(self._net)):
            folder = self._net / name
            index = read_text(folder / "ifindex")
            hardware = (folder / "device").exists() and read_text(folder / "type") == _ETHER
            port = read_text(folder / "phys_port_name") or ""
            if index and hardware and not _REPRESENTOR.match(port):
                found.append((int(index), name))
        return {each: each for each in found}

    def take_up(self, _: int, found: tuple[int, str]) -> Entity | None:
        """An interface, by the kernel's own number."""
        assert self._ethtool is not None, "find() comes first"
        index, name = found
        driver = link_name(self._net / name / "device/driver")
        try:
            statistics = _Statistics(self._ethtool, name)
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
        found: list[Value] = []
        for column in self.columns:
            places, unit = self._places.get(column, ((), 1))
            total = sum(values[at] for at in places) * unit
            found.append(total if places and total < _I64_END else None)
        return found

    def _learn(self) -> None:
        names = self._ethtool.names(self._interface)
        self._count = len(names)
        self._places = find_positions(names)
