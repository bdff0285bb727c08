"""A node from /proc and /sys, its NUMA nodes, and the control groups of launcher and job."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path, PurePosixPath

from haiprof.agent.samplers.table import ChangingSampler, Node, TableSampler
from haiprof.base.units import NS_PER_MS
from haiprof.linux import memory, procfs
from haiprof.linux.cgroups import (
    CPU_QUOTA,
    MEMORY_LIMIT,
    V2,
    Cgroup,
    Limit,
    Places,
    cgroup_readings,
    find_cgroup,
)
from haiprof.linux.procfs import TICK_NS, ProcFile, file_reading, inode, last_number, list_names
from haiprof.linux.readings import Entity, Reading, Unavailable, Value
from haiprof.run_format.schema import CounterEnd, growth
from haiprof.run_format.tables import CGROUP, HOST, NUMA


class SummedCounters:
    """The sum of each counter over all devices."""

    def __init__(self, bits: Sequence[int]) -> None:
        self._ends = [CounterEnd(width, sticks=False) for width in bits]
        self._last: Mapping[bytes, Sequence[int]] = {}
        self._totals: list[int] | None = None

    def add(self, counts: Mapping[bytes, Sequence[int]]) -> tuple[int, ...]:
        """The sums, after the counters of each device as they are now."""
        # It starts at the devices' own sum and grows by the growth of each of them between two
        # reads: a device that comes or goes, or whose counter wraps, makes no step in the sum.
        last, self._last = self._last, counts
        if self._totals is None:
            columns = zip(*counts.values(), strict=True)
            self._totals = [sum(column) for column in columns] or [0] * len(self._ends)
            return tuple(self._totals)
        set_back = []
        for name in counts.keys() & last.keys():
            grown = list(map(growth, last[name], counts[name], self._ends))
            if None in grown:
                set_back.append(name.decode(errors="replace"))
            else:
                self._totals = [total + int(by or 0)
                                for total, by in zip(self._totals, grown, strict=True)]  # fmt: skip
        if set_back:
            raise Unavailable(f"the counters of {', '.join(sorted(set_back))} were set back")
        return tuple(self._totals)


CPU_COLUMNS = HOST.names("cpu_user_ns", "task_blocked_count")
_IDLE, _IOWAIT = 3, 4  # places in the first line


class CpuTimes:
    """Parses /proc/stat into CPU_COLUMNS."""

    def __init__(self) -> None:
        self._last = [0] * 8

    def __call__(self, content: bytes) -> memory.Values:
        """The values; of the CPUs, from the first line alone."""
        # The kernel's idle and iowait may decrease by some ticks; they keep their highest value
        # until the whole file is reset. Guest time is already part of user time. Source: Linux
        # Documentation/filesystems/proc.rst, section 1.7.
        words = content[: content.index(b"\n")].split()
        if words[0] != b"cpu":
            raise ValueError("the first line is not the sum of all CPUs")
        times = [int(word) for word in words[1:9]]
        if len(times) != len(self._last):
            raise ValueError("not every mode is there")
        if times[0] >= self._last[0]:
            for mode in (_IDLE, _IOWAIT):
                times[mode] = max(times[mode], self._last[mode])
        self._last = times
        counts = (last_number(content, name) for name in _COUNTS)
        return (*(ticks * TICK_NS for ticks in times), content.count(b"\ncpu"), *counts)


_COUNTS = (b"\nctxt ", b"\nprocs_running ", b"\nprocs_blocked ")

DISK_COLUMNS = HOST.names("disk_read_bytes", "disk_count")
_FIELDS = (5, 9, 3, 7, 12)  # sectors read, written, reads, writes, ms busy
_BITS = (64, 64, 64, 64, 32)
_SECTOR_BYTES = 512  # always in /proc/diskstats, whatever the device's own sector (iostats.rst)
_SCALES = (_SECTOR_BYTES, _SECTOR_BYTES, 1, 1, NS_PER_MS)

_MEMORY_DISK = re.compile(r"(loop|ram|zram)\d+\Z")
_PARTITION = re.compile(r"(([hsv]d|xvd)[a-z]+\d+|(nvme\d+n|mmcblk)\d+p\d+|(dm-|md)\d+)\Z")
_NVME_PATH = re.compile(rb"(nvme\d+)c\d+(n\d+)\Z")


class DiskTotals:
    """Parses /proc/diskstats into DISK_COLUMNS."""

    def __init__(self, root: Path) -> None:
        self._block = root / "sys" / "block"
        self._is_counted = cache(self._is_whole_disk)
        self._sums = SummedCounters(_BITS)

    def __call__(self, content: bytes) -> memory.Values:
        """The sums over all disks, None without any disk."""
        lines = {words[2]: words for words in map(bytes.split, content.splitlines())}
        paths = [match for match in map(_NVME_PATH.match, lines) if match]
        heads = {b"".join(path.groups()) for path in paths}
        disks = [name for name in lines if name not in heads and self._is_counted(name)]
        if not disks:
            return (None,) * len(DISK_COLUMNS)
        counts = {name: [int(lines[name][field]) for field in _FIELDS] for name in disks}
        sums = self._sums.add(counts)
        scaled = (total * scale for total, scale in zip(sums, _SCALES, strict=True))
        return (*scaled, len(disks))

    def _is_whole_disk(self, encoded: bytes) -> bool:
        # Left out: partitions (in their disk already), devices stacked on others (device mapper,
        # RAID, the head of an NVMe multipath: its paths are counted), and those in memory (loop,
        # ram, zram). Source: Linux Documentation/admin-guide/iostats.rst.
        name = os.fsdecode(encoded)
        if _MEMORY_DISK.match(name):
            return False
        if not self._block.is_dir():
            return _PARTITION.match(name) is None
        folder = self._block / name.replace("/", "!")
        return folder.is_dir() and not list_names(folder / "slaves")


NETWORK_COLUMNS = HOST.names("network_receive_bytes", "network_transmit_drop_count")
_NET_FIELDS = (0, 8, 1, 9, 2, 10, 3, 11)

TCP_COLUMNS = ("tcp_transmit_segment_count", "tcp_retransmit_segment_count")
TCP_FIELDS = (b"OutSegs", b"RetransSegs")
TCP_TROUBLE_COLUMNS = ("tcp_timeout_count", "tcp_listen_drop_count")
TCP_TROUBLE_FIELDS = (b"TCPTimeouts", b"ListenDrops")


class NetworkTotals:
    """Parses /proc/net/dev into NETWORK_COLUMNS, without lo."""

    def __init__(self, root: Path) -> None:
        self._net = root / "sys" / "class" / "net"
        self._routes = root / "proc" / "net" / "route"
        self._hardware_leads: bool | None = None
        self._hardware: set[bytes] = set()
        self._sums = SummedCounters([64] * len(_NET_FIELDS))

    def __call__(self, content: bytes) -> memory.Values:
        """The sums over all interfaces, None without any interface."""
        counts = {}
        for line in content.splitlines()[2:]:
            padded, _, numbers = line.rpartition(b":")
            name, words = padded.strip(), numbers.split()
            if name in self._hardware or self._is_lowest(name):
                counts[name] = [int(words[field]) for field in _NET_FIELDS]
        return self._sums.add(counts) if counts else (None,) * len(_NET_FIELDS)

    def _is_lowest(self, name: bytes) -> bool:
        """Checked each time where there is no hardware: a bridge may get its first port later."""
        # Left out: interfaces stacked on others that are counted (bonds, bridges, VLANs), ports of
        # a bridge without hardware (the host's ends of containers), and ifb, which only delays what
        # others carry. Where the default route leads out through hardware, nothing else counts:
        # other ends of containers are routed to it (Calico, Cilium). In a container it leads
        # through the container's end, which has none. RDMA traffic is not in these counters.
        if name == b"lo" or name.startswith(b"ifb"):
            return False
        links = list_names(self._net / os.fsdecode(name))
        if any(link.startswith("lower_") for link in links):
            return False
        if "device" in links:
            self._hardware.add(name)
            return True
        if self._hardware_leads is None:
            # Of default routes destination and mask, in hex, are 0: Linux net/ipv4/fib_trie.c.
            text = procfs.read_text(self._routes) or ""
            routes = [fields for line in text.splitlines()[1:] if len(fields := line.split()) > 7]
            outward = {route[0] for route in routes if route[1] == route[7] == "00000000"}
            self._hardware_leads = any(map(self._has_hardware, outward))
        return "brport" not in links and not self._hardware_leads

    def _has_hardware(self, name: str, *, deep: int = 4) -> bool:
        """Whether an interface, or one that it is stacked on, is a device."""
        links = list_names(self._net / name)
        lower = (link.removeprefix("lower_") for link in links if link.startswith("lower_"))
        stacked = deep > 0 and any(self._has_hardware(each, deep=deep - 1) for each in lower)
        return "device" in links or stacked


def parse_protocol(content: bytes, protocol: bytes, fields: Sequence[bytes]) -> memory.Values:
    """Numbers of /proc/net/snmp or netstat; None for a field that the kernel does not count."""
    # A line of names, and one of numbers: Linux Documentation/networking/snmp_counter.rst.
    names, numbers = (each.split() for each in content.splitlines() if each.startswith(protocol))
    found = dict(zip(names, numbers, strict=True))
    return tuple(int(found[field]) if field in found else None for field in fields)


_NODE = re.compile(r"node(\d+)\Z")
# Where pages were meant for and allocated: Linux Documentation/admin-guide/numastat.rst.
_PAGES = ("numa_hit ", "numa_miss ", "numa_foreign ", "local_node ", "other_node ")


class NumaSampler(TableSampler):
    """One record per NUMA node: of pages where they are allocated, not where they are used."""

    recorder = "numa"
    every = 10
    table = NUMA

    def find(self) -> Iterable[Entity]:
        """The NUMA nodes in /sys."""
        nodes = self.root / "sys/devices/system/node"
        found = [int(m[1]) for name in list_names(nodes) if (m := _NODE.match(name))]
        if not found:
            raise Unavailable(f"{nodes}: no NUMA nodes (a kernel without CONFIG_NUMA)")
        columns, entities = [column.name for column in NUMA.metrics], []
        for number in sorted(found):
            folder = nodes / f"node{number}"
            heads = [f"Node {number} {name}:" for name in ("MemTotal", "MemFree")]
            sizes = memory.NamedNumbers(heads, (1024, 1024))  # kB are KiB
            readings = (
                file_reading(folder / "meminfo", columns[:2], sizes),
                file_reading(folder / "numastat", columns[2:], memory.NamedNumbers(_PAGES)),
            )
            entities.append(Entity(key=(number,), name=f"node {number}", readings=readings))
        return entities


ENERGY_COLUMNS = ("cpu_energy_joules", "memory_energy_joules")
_REMEDY = "root may read it, or: chmod a+r /sys/class/powercap/*/energy_uj"
_UJ = 1e-6


class _Energy:
    """Joules of CPU packages and memory: sums that go on where a zone's counter wraps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._zones: list[tuple[Path, int, int]] | None = None
        """File, place in the columns, and the value after which it begins anew."""
        self._last: dict[Path, int] = {}
        self._totals = [0, 0]

    def __call__(self) -> Sequence[Value | Unavailable]:
        if self._zones is None:
            self._zones = list(self._find())
        if not self._zones:
            reason = "no RAPL here: a virtual machine, or its driver is not loaded"
            raise Unavailable(reason, lasting=True)
        for path, column, whole in self._zones:
            value = int(path.read_text())
            grown = value - self._last.get(path, 0)
            self._totals[column] += grown if grown >= 0 else grown + whole
            self._last[path] = value
        has_memory = any(column for _, column, _ in self._zones)
        memory = self._totals[1] * _UJ if has_memory else Unavailable("no zone of memory here")
        return self._totals[0] * _UJ, memory

    def _find(self) -> list[tuple[Path, int, int]]:
        # Source: Linux Documentation/power/powercap/powercap.rst. Zones of a package have the name
        # `package-N`, its memory's `dram`; `psys` and `core` are in others or beside them. Two
        # drivers may show the same package (`intel-rapl`, `intel-rapl-mmio`): it is counted once.
        found: dict[tuple[str, str], tuple[Path, int, int]] = {}
        for zone in sorted(self._folder.glob("intel-rapl*:*")):
            name = (zone / "name").read_text().strip()
            column = 0 if name.startswith("package-") else 1 if name == "dram" else None
            if column is not None:  # of memory the number of its package: intel-rapl:0:2
                package = zone.name.partition(":")[2].partition(":")[0]
                key = name, package if column else ""
                whole = int((zone / "max_energy_range_uj").read_text())
                found.setdefault(key, (zone / "energy_uj", column, whole + 1))
        return list(found.values())


_OLD_KERNEL = "this kernel does not count it"
_NO_PSI = "the kernel has no pressure stall information"


class HostSampler(TableSampler):
    """One record of the node at each sample."""

    recorder = "host"
    table = HOST

    def find(self) -> tuple[Entity]:
        """The node."""
        proc, powercap = self.root / "proc", self.root / "sys/class/powercap"
        files: Sequence[tuple[str, Sequence[str], Callable[[bytes], Sequence[Value]], str]] = (
            ("stat", CPU_COLUMNS, CpuTimes(), _OLD_KERNEL),
            ("meminfo", memory.MEMORY_COLUMNS, memory.parse_memory_sizes(), "no such line in it"),
            ("vmstat", memory.PAGING_COLUMNS,
             memory.NamedNumbers(tuple(memory.PAGING), tuple(memory.PAGING.values())), _OLD_KERNEL),
            ("diskstats", DISK_COLUMNS, DiskTotals(self.root), "no whole disk in it"),
            ("net/dev", NETWORK_COLUMNS, NetworkTotals(self.root), "no interface beyond lo in it"),
            ("net/snmp", TCP_COLUMNS, partial(
                parse_protocol, protocol=b"Tcp: ", fields=TCP_FIELDS), _OLD_KERNEL),
            ("net/netstat", TCP_TROUBLE_COLUMNS, partial(
                parse_protocol, protocol=b"TcpExt: ", fields=TCP_TROUBLE_FIELDS), _OLD_KERNEL),
        )  # fmt: skip
        # `full` of cpu is not defined for a node, and written as 0
        # (Linux Documentation/accounting/psi).
        pressures = (("cpu", False), ("memory", True), ("io", True))
        return (Entity(readings=(
            *(file_reading(proc / name, columns, parse, lacking=lacking)
              for name, columns, parse, lacking in files),
            *(memory.pressure_reading(proc / "pressure" / what, what, lacking=_NO_PSI, full=full)
              for what, full in pressures),
            Reading(columns=ENERGY_COLUMNS, origin=f"{powercap}/*/energy_uj", remedy=_REMEDY,
                    read=_Energy(powercap)),
        )),)  # fmt: skip


OWN = "own"  # the launcher's cgroup; those above it have the last part of their path as name
_CONTROLLERS = ("cpu", "cpuacct", "memory", V2)
_LIMITS = {"cpu": CPU_QUOTA, "memory": MEMORY_LIMIT}


class CgroupSampler(ChangingSampler):
    """One record of the launcher's cgroup, and one of each visible ancestor with a limit."""

    recorder = "host"
    table = CGROUP

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._memberships = ProcFile(self.root / "proc/self/cgroup")
        self._mountinfo = self.root / "proc/self/mountinfo"
        self._seen: object = None
        self._cgroups: Places = {}
        self._folders: set[str] = set()
        self._limited: dict[str, Places] = {}
        self._unlimited: dict[str, tuple[Places, list[Limit]]] = {}

    def find(self) -> Iterable[Entity]:
        """The launcher's cgroup and the limited ones above it."""
        found = super().find()
        places = [self._cgroups[name] for name in _LIMITS]
        if all(isinstance(cgroup, Unavailable) for cgroup in places):
            raise next(cgroup for cgroup in places if isinstance(cgroup, Unavailable))
        return found

    def present(self) -> Mapping[tuple[object, str], tuple[str, Places]]:
        """Name and places of the launcher's cgroup, and of the ancestors with a limit by now."""
        # A cgroup counts the throttling by its own quota: that of an ancestor's quota is in the
        # ancestor's record. A launcher that is moved, or whose cgroup is recreated, gets another
        # key.
        if self._identity() != self._seen:
            self._locate()
        for path, (cgroups, limits) in list(self._unlimited.items()):
            if any(map(_is_set, limits)):
                self._limited[path] = cgroups
                del self._unlimited[path]
                for limit in limits:
                    limit.close()
        above = {(self._seen, path): (PurePosixPath(path).name or path, cgroups)
                 for path, cgroups in self._limited.items()}  # fmt: skip
        return {(self._seen, ""): (OWN, self._cgroups), **above}

    def release(self) -> None:
        """Closes open files other than those of entities."""
        self._memberships.close()
        self._close_limits()

    def take_up(self, number: int, found: tuple[str, Places]) -> Entity:
        """The readings of a cgroup."""
        name, cgroups = found
        known: dict[str, Cgroup | Unavailable] = {}
        folders: dict[str, str] = {}
        for controller in _CONTROLLERS:
            tree, cgroup = controller or "unified", cgroups.get(controller)
            known[controller] = cgroup or Unavailable(f"the {tree} tree has no cgroup of that path")
            if isinstance(cgroup, Cgroup):
                folders[tree] = str(cgroup.folder)
        readings, details = cgroup_readings(known), {"folders": folders}
        return Entity(key=(number,), name=name, readings=readings, details=details)

    def _locate(self) -> None:
        try:
            memberships = os.fsdecode(self._memberships.read())
            mountinfo = os.fsdecode(self._mountinfo.read_bytes())
        except OSError as error:
            why = Unavailable(f"{error.filename or self._memberships.path}: {error.strerror}")
            self._cgroups = dict.fromkeys(_CONTROLLERS, why)
        else:
            self._cgroups = {
                name: find_cgroup(name, memberships, mountinfo, self.root) for name in _CONTROLLERS
            }
        known = (cgroup for cgroup in self._cgroups.values() if isinstance(cgroup, Cgroup))
        self._folders |= {str(cgroup.folder) for cgroup in known}  # one that is gone may return
        self._seen = self._identity()
        self._close_limits()
        self._limited = {}
        self._unlimited = {
            path: (cgroups, [Limit(_LIMITS[c], [cgroups[c]]) for c in _LIMITS if c in cgroups])
            for path, cgroups in _above(self._cgroups).items()
        }

    def _identity(self) -> object:
        try:
            memberships = self._memberships.read()
        except OSError:
            memberships = b""
        return (memberships, *map(inode, self._folders))

    def _close_limits(self) -> None:
        for limit in (limit for _, limits in self._unlimited.values() for limit in limits):
            limit.close()
        self._unlimited = {}


def _above(cgroups: Places) -> dict[str, dict[str, Cgroup]]:
    """The visible ancestors by path, nearest first, each with the controllers that have it."""
    paths: dict[str, dict[str, Cgroup]] = {}
    for controller, cgroup in cgroups.items():
        for above in cgroup.above() if isinstance(cgroup, Cgroup) else ():
            paths.setdefault(str(above.path), {})[controller] = above
    return paths


def _is_set(limit: Limit) -> bool:
    try:
        return limit.read() is not None
    except (OSError, ValueError):
        return True  # it cannot be read, which its record states
