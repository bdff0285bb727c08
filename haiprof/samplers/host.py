"""Node CPU, memory, disk, network and pressure from /proc, one table row per source."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from haiprof.rundir.tables.host import HOST
from haiprof.samplers.base import Clock, Node
from haiprof.samplers.procfs import TICK_NS, file_reading
from haiprof.samplers.table import Entity, Reading, TableSampler

_SECTOR_BYTES = 512  # always in /proc/diskstats, whatever the device's own sector (iostats.rst)
_MEMORY_DISK = re.compile(r"(loop|ram|zram)\d+\Z")
_PARTITION = re.compile(r"(([hsv]d|xvd)[a-z]+\d+|(nvme\d+n|mmcblk)\d+p\d+|(dm-|md)\d+)\Z")

Values = tuple[int | None, ...]


class HostSampler(TableSampler):
    """One record of the node at each sample.

    Args:
        root: Where /proc and /sys are.
        clock: CLOCK_MONOTONIC in ns.
    """

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
        return (Entity(readings=host_readings(self._root)),)


def host_readings(root: Path) -> tuple[Reading, ...]:
    """The files of the HOST table below /proc."""
    names = [column.name for column in HOST.metrics]
    no_pressure = "the kernel has no pressure stall information"
    psi = "a kernel with CONFIG_PSI, booted with psi=1"
    proc = root / "proc"
    return (
        file_reading(proc / "stat", names[:6], CpuTimes(), lacking="no CPU times in it"),
        file_reading(proc / "meminfo", names[6:8], parse_memory, lacking="no such line in it"),
        file_reading(
            proc / "diskstats", names[8:10], DiskTotals(root), lacking="no whole disk in it"
        ),
        file_reading(
            proc / "net/dev",
            names[10:12],
            NetworkTotals(root),
            lacking="no interface beyond lo in it",
        ),
        *(
            file_reading(
                proc / "pressure" / name,
                [f"pressure_{name}_some_ns"],
                parse_pressure,
                lacking=no_pressure,
                remedy=psi,
            )
            for name in ("cpu", "memory", "io")
        ),
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
