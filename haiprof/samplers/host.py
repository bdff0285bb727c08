"""Node CPU, memory, disk, network and pressure from /proc, one table row per source."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from haiprof.rundir.schema import HOST
from haiprof.samplers.base import Clock, Missing, MissingLog, Node, or_null
from haiprof.samplers.procfs import TICK_NS, KeptFile

_SECTOR_BYTES = 512  # always in /proc/diskstats, whatever the device's own sector (iostats.rst)
_MEMORY_DISK = re.compile(r"(loop|ram|zram)\d+\Z")
_PARTITION = re.compile(r"(([hsv]d|xvd)[a-z]+\d+|(nvme\d+n|mmcblk)\d+p\d+|(dm-|md)\d+)\Z")

Values = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """One file and the columns that it fills, in the table's order."""

    path: str
    columns: tuple[str, ...]
    parse: Callable[[bytes], Values]
    lacking: str
    """Why the file may be absent, or a value in it."""


class HostSampler:
    """One record of the node at each sample.

    Args:
        root: Where /proc and /sys are.
        clock: CLOCK_MONOTONIC in ns.
    """

    name = "host"
    table = HOST
    read_limit_ns = 50_000_000

    def __init__(self, *, root: Path = Path("/"), clock: Clock = time.perf_counter_ns) -> None:
        self._clock = clock
        self._record = HOST.struct
        self._missing = MissingLog()
        self._sources = [(s, KeptFile(root / "proc" / s.path)) for s in host_sources(root)]

    @classmethod
    def for_node(cls, node: Node) -> HostSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def open(self) -> list[Missing]:
        """Reads every source once."""
        self.sample()
        return self.drain_missing()

    def header(self) -> dict[str, object]:
        """Nothing beyond the columns."""
        return {}

    def urgent(self) -> bool:
        """Never: the node was there before."""
        return False

    def sample(self) -> bytes:
        """One record."""
        before = self._clock()
        values = [or_null(v) for source, file in self._sources for v in self._read(source, file)]
        return self._record.pack(before, self._clock() - before, *values)

    def drain_missing(self) -> list[Missing]:
        """What could not be read since the last call."""
        return self._missing.drain()

    def close(self) -> None:
        """Closes the files."""
        for _, file in self._sources:
            file.close()

    def _read(self, source: Source, file: KeptFile) -> Values:
        """The values of one source; null, with the reason noted, where there is none."""
        try:
            values = source.parse(file.read())
        except OSError as error:
            return self._none(source, f"{file.path}: {error.strerror} ({source.lacking})")
        except (ValueError, IndexError):
            return self._none(source, f"{file.path}: unexpected content")
        for column, value in zip(source.columns, values, strict=True):
            if value is None:
                self._missing.note(column, f"{file.path}: {source.lacking}")
        return values

    def _none(self, source: Source, reason: str) -> Values:
        for column in source.columns:
            self._missing.note(column, reason)
        return (None,) * len(source.columns)


def host_sources(root: Path) -> tuple[Source, ...]:
    """The files of the HOST table below /proc, in the order of its columns."""
    names = [column.name for column in HOST.columns[2:]]
    no_pressure = "the kernel has no pressure stall information: CONFIG_PSI, boot with psi=1"
    return (
        Source("stat", tuple(names[:6]), CpuTimes(), "no CPU times in it"),
        Source("meminfo", tuple(names[6:8]), parse_memory, "no such line in it"),
        Source("diskstats", tuple(names[8:10]), DiskTotals(root), "no whole disk in it"),
        Source("net/dev", tuple(names[10:12]), NetworkTotals(root), "no interface beyond lo in it"),
        Source("pressure/cpu", (names[12],), parse_pressure, no_pressure),
        Source("pressure/memory", (names[13],), parse_pressure, no_pressure),
        Source("pressure/io", (names[14],), parse_pressure, no_pressure),
    )


class CpuTimes:
    """Parses /proc/stat: user, system, idle, iowait, steal in ns, and the CPUs online.

    The kernel's idle and iowait may step back by a tick; they are held at their highest value.
    Guest time is already part of user time.

    Source: Linux Documentation/filesystems/proc.rst, section 1.7.
    """

    def __init__(self) -> None:
        self._idle = 0
        self._iowait = 0

    def __call__(self, content: bytes) -> Values:
        """The values, from the first line alone."""
        words = content[: content.index(b"\n")].split()
        if words[0] != b"cpu":
            raise ValueError("the first line is not the sum of all CPUs")
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, words[1:9])
        self._idle = max(self._idle, idle)
        self._iowait = max(self._iowait, iowait)
        times = (user + nice, system + irq + softirq, self._idle, self._iowait, steal)
        return (*(ticks * TICK_NS for ticks in times), content.count(b"\ncpu"))


def parse_memory(content: bytes) -> Values:
    """Total and available bytes from /proc/meminfo; its kB are KiB."""
    return (_meminfo_bytes(content, b"MemTotal:"), _meminfo_bytes(content, b"MemAvailable:"))


def _meminfo_bytes(content: bytes, name: bytes) -> int | None:
    at = content.find(name)
    return None if at < 0 else int(content[at + len(name) :].split(None, 1)[0]) * 1024


def parse_pressure(content: bytes) -> Values:
    """Time in ns in which some task waited, from /proc/pressure/* (in us there)."""
    some = content[: content.index(b"\n")]
    if not some.startswith(b"some "):
        raise ValueError("the first line is not `some`")
    return (int(some[some.index(b"total=") + 6 :]) * 1000,)


class DiskTotals:
    """Parses /proc/diskstats: bytes read and written by whole disks.

    Left out: partitions (in their disk already), devices stacked on others (device mapper, RAID),
    and those in memory (loop, ram, zram).

    Args:
        root: Where /sys is; without it, names tell.
    """

    def __init__(self, root: Path) -> None:
        self._block = root / "sys" / "block"
        self._counted: dict[bytes, bool] = {}

    def __call__(self, content: bytes) -> Values:
        """Read and written bytes, null without any disk."""
        lines = [line.split() for line in content.splitlines()]
        disks = [words for words in lines if self._counts(words[2])]
        if not disks:
            return (None, None)
        sectors = (sum(int(words[column]) for words in disks) for column in (5, 9))
        return tuple(count * _SECTOR_BYTES for count in sectors)

    def _counts(self, name: bytes) -> bool:
        if name not in self._counted:
            self._counted[name] = self._is_whole_disk(os.fsdecode(name))
        return self._counted[name]

    def _is_whole_disk(self, name: str) -> bool:
        if _MEMORY_DISK.match(name):
            return False
        if not self._block.is_dir():
            return _PARTITION.match(name) is None
        folder = self._block / name.replace("/", "!")
        return folder.is_dir() and not _names(folder / "slaves")


class NetworkTotals:
    """Parses /proc/net/dev: bytes received and sent, without lo.

    Left out: interfaces stacked on others that are counted (bonds, bridges, VLANs) and ports of a
    bridge without hardware (the host's ends of containers). RDMA traffic is not in these counters.

    Args:
        root: Where /sys is; without it, all but lo count.
    """

    def __init__(self, root: Path) -> None:
        self._net = root / "sys" / "class" / "net"
        self._counted: dict[bytes, bool] = {}

    def __call__(self, content: bytes) -> Values:
        """Received and sent bytes, null without any interface."""
        received = sent = 0
        found = False
        for line in content.splitlines()[2:]:
            name, _, numbers = line.rpartition(b":")
            if not self._counts(name.strip()):
                continue
            words = numbers.split()
            received += int(words[0])
            sent += int(words[8])
            found = True
        return (received, sent) if found else (None, None)

    def _counts(self, name: bytes) -> bool:
        if name not in self._counted:
            self._counted[name] = name != b"lo" and self._is_lowest(os.fsdecode(name))
        return self._counted[name]

    def _is_lowest(self, name: str) -> bool:
        links = _names(self._net / name)
        stacked = any(link.startswith("lower_") for link in links)
        return not stacked and not ("brport" in links and "device" not in links)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # no such device in /sys: it is stacked on nothing
