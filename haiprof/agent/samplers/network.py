"""InfiniBand and RoCE ports, and Ethernet below RoCE: traffic, pauses, congestion, errors."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from haiprof.agent.samplers.table import ChangingSampler, Node
from haiprof.base.version import read_data
from haiprof.linux.procfs import inode, link_name, list_names, read_text
from haiprof.linux.readings import Entity, Reading, Unavailable, Value, os_status, refused_reading
from haiprof.run_format.tables import ETHERNET, INFINIBAND, INFINIBAND_HEALTH

_ATTRIBUTE_BYTES = 256  # a sysfs attribute of one value; its length is a line
_RATE = re.compile(r"([0-9.]+) Gb/sec")
_BITS_PER_BYTE = 8
_I64_END = 1 << 63

Pread = Callable[[int, int, int], bytes]


class Source(NamedTuple):
    """One file that counts something, below a port's folder, and what one count stands for."""

    path: str
    unit: int = 1


def _sources(files: Mapping[str, Mapping[str, int]]) -> dict[str, tuple[Source, ...]]:
    """By column; the driver's own counters are per port or, with one port, of the device."""
    return {
        column: tuple(
            Source(f"{above}{path}", unit)
            for path, unit in of.items()
            for above in (("", "../../") if path.startswith("hw_counters/") else ("",))
        )
        for column, of in files.items()
    }


_DATA = read_data("agent/samplers/network.json")
"""Which file of a port, or statistic of a driver, fills which column: the first that is there."""
TRAFFIC, HEALTH = _sources(_DATA["traffic"]), _sources(_DATA["health"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """One port of an RDMA device."""

    device: str
    number: int
    folder: Path  # .../ports/<number>
    inode: int  # of the folder: a device that is registered anew gets another one
    alone: bool  # whether the device has no other port, so that its own counters are the port's

    @property
    def name(self) -> str:
        """As `rdma link` writes it."""
        return f"{self.device}/{self.number}"


def find_ports(root: Path) -> list[Port]:
    """Every port of every RDMA device, in order of name."""
    base = root / "sys/class/infiniband"
    try:
        devices = sorted(os.listdir(base))
    except OSError as error:
        status = os_status(error)
        absent = "no RDMA device: no InfiniBand or RoCE driver is loaded"
        reason = absent if status == "absent" else f"{base}: {error.strerror}"
        raise Unavailable(reason, status=status) from None
    ports = []
    for device in devices:  # one that has just gone, or has no port yet, is found by a later look
        folder = base / device / "ports"
        numbers = sorted(int(name) for name in list_names(folder) if name.isdigit())
        ports += [
            Port(device=device, number=number, folder=folder / str(number), inode=present,
                 alone=len(numbers) == 1)
            for number in numbers
            if (present := inode(folder / str(number))) is not None
        ]  # fmt: skip
    if not ports:
        raise Unavailable(f"{base} lists no port of an RDMA device")
    return ports


def link_rate(text: str) -> float | None:
    """Bytes/s of `rate`, such as `100 Gb/sec (4X EDR)`."""
    match = _RATE.match(text)
    return float(match[1]) * 1e9 / _BITS_PER_BYTE if match else None


def choose_source(port: Port, sources: Sequence[Source]) -> Source | None:
    """The first file that gives a number; else the first that is there; None without any."""
    usable = [s for s in sources if port.alone or not s.path.startswith("..")]
    present = [source for source in usable if (port.folder / source.path).exists()]
    for source in present:
        text = read_text(port.folder / source.path) or ""
        if text.isascii() and text.isdigit():
            return source
    return present[0] if present else None


@dataclass
class Attribute:
    """One counter file of sysfs."""

    path: Path
    unit: int
    keep: bool
    pread: Pread = os.pread
    _fd: int = -1

    def read(self) -> tuple[int | None]:
        """The count in its unit; None beyond 63 bits."""
        # A file that stays open and fails is not opened again at once: its device may be another
        # one by now, whose count must not continue this one's. The caller checks that before the
        # next read.
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = self.pread(self._fd, _ATTRIBUTE_BYTES, 0)
        except OSError:
            self.close()
            raise
        if not self.keep:
            self.close()
        if content.startswith(b"N/A"):
            said = content.decode(errors="replace").strip()
            reason = f"{self.path}: {said}: the driver answers no performance queries"
            raise Unavailable(reason, status="unsupported", lasting=True)
        value = int(content) * self.unit
        return (value if 0 <= value < _I64_END else None,)

    def close(self) -> None:
        """Closes the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class _PortSampler(ChangingSampler):
    """One record per port."""

    recorder = "infiniband"
    sources: Mapping[str, tuple[Source, ...]]
    keep_open: bool

    def __init__(self, node: Node, *, pread: Pread = os.pread) -> None:
        super().__init__(node)
        self._pread = pread

    def present(self) -> Mapping[tuple[str, int], Port]:
        # On mlx5 each file read is a query to the adapter's firmware: only what is recorded is
        # read. A port whose device was registered again (driver reload, hot-plug) is another one.
        return {(port.name, port.inode): port for port in find_ports(self.root)}

    def refresh(self) -> None:
        """Follows the ports, and says which ones are gone."""
        before = {entity.name for entity in self.entities}
        super().refresh()
        for name in sorted(before - {entity.name for entity in self.entities}):
            self.missing.note(name, Unavailable("the port is gone: its device was removed"))

    def take_up(self, number: int, found: Port) -> Entity:
        """A port with what does not change of it."""
        port = found
        pci = port.folder.parent.parent / "device"
        node, nets = read_text(pci / "numa_node"), list_names(pci / "net")
        only = nets[0] if len(nets) == 1 else None
        facts = {
            "device": port.device,
            "port": port.number,
            "link_layer": read_text(port.folder / "link_layer"),
            "rate_bytes_per_s": link_rate(read_text(port.folder / "rate") or ""),
            "numa_node": int(node) if node and node.isdigit() else None,  # -1: firmware did not say
            "netdev": read_text(port.folder / "gid_attrs/ndevs/0") or only,
            "driver": link_name(pci / "driver"),
        }
        readings = (*self.first_readings(port), *self._counters(port, facts["driver"]))
        return Entity(key=(number,), name=port.name, readings=readings, details=facts)

    def first_readings(self, port: Port) -> Sequence[Reading]:
        """Readings that are not counters; none, unless overridden."""
        return ()

    def _counters(self, port: Port, driver: object) -> Iterable[Reading]:
        lacking = []
        for column, sources in self.sources.items():
            if (source := choose_source(port, sources)) is None:
                lacking.append(column)
            else:
                path = port.folder / source.path
                file = Attribute(path, source.unit, keep=self.keep_open, pread=self._pread)
                yield Reading(columns=(column,), origin=str(path), read=file.read, close=file.close)
        if lacking:
            who = f"the driver {driver or 'of this device'}"
            why = f"{who} has no such counter in {port.folder}"
            yield refused_reading(lacking, str(port.folder), Unavailable(why, status="unsupported"))


class InfinibandSampler(_PortSampler):
    """Bytes, credit stalls, congestion and loss of each port."""

    table = INFINIBAND
    sources = TRAFFIC
    keep_open = True


class InfinibandHealthSampler(_PortSampler):
    """Link state and rate, packets and errors of each port."""

    table = INFINIBAND_HEALTH
    every = 10
    sources = HEALTH
    keep_open = False

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
    """Reads statistics of network drivers (Linux net/ethtool/ioctl.c); needs no privilege."""

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
_US = 1000

COLUMNS: Mapping[str, Sequence[str]] = _DATA["ethernet"]
"""Patterns of names by column; several that match are added up: a pause is of one priority."""

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
    """One record per Ethernet interface with hardware behind it, if its driver counts any of it."""

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
        # A driver may collect hundreds of statistics from the device per call: hence the slow
        # interval, and no call at all where none of them is recorded.
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
        return Entity(key=(index,), name=name, readings=tuple(readings), details={"driver": driver})


class _Statistics:
    """The statistics of one interface that fill columns."""

    def __init__(self, ethtool: Ethtool, interface: str) -> None:
        self._ethtool, self._interface = ethtool, interface
        self._learn()
        self.columns = tuple(self._places)

    def read(self) -> Sequence[Value]:
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
