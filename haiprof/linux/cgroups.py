"""Control groups of a process: where they are mounted, their limits, counters and kills."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from haiprof.base.control_group_limits import (
    V1_UNLIMITED_BYTES,
    parse_cpu_limit,
    parse_memory_limit,
)
from haiprof.base.units import NS_PER_US
from haiprof.linux.memory import NamedNumbers, pressure_reading
from haiprof.linux.procfs import ProcFile, file_reading, mount_entries
from haiprof.linux.readings import Reading, Unavailable, Value, refused_reading
from haiprof.run_format.tables import CGROUP

V2 = ""  # in place of a controller's name: the unified tree of version 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """One cgroup in one tree."""

    version: int
    mount: Path  # the tree's top, as far as this process may see it
    path: PurePosixPath  # the cgroup below the mount; `/` is its top

    @property
    def folder(self) -> Path:
        """Where the cgroup's files are."""
        return self.mount / self.path.relative_to("/")

    def above(self) -> list[Cgroup]:
        """The visible ancestors, nearest first."""
        return [replace(self, path=path) for path in self.path.parents]


def find_cgroup(controller: str, members: str, mountinfo: str, root: Path) -> Cgroup | Unavailable:
    """The cgroup of a controller: in its own tree (version 1), or in version 2's; or why none."""
    # Source: cgroups(7), proc_pid_mountinfo(5), Linux Documentation/admin-guide/cgroup-v2.rst.
    places = (line.partition(":")[2].partition(":") for line in members.splitlines())
    paths = {name: path for names, _, path in places for name in names.split(",")}
    version = 1 if controller in paths and controller != V2 else 2
    path = paths.get(controller if version == 1 else V2)
    name = f"cgroup controller {controller}" if controller else "cgroup version 2"
    if path is None:
        return Unavailable(f"/proc/self/cgroup: no {name}")
    mounts = [
        mount for mount in mount_entries(mountinfo)
        if (mount.type == "cgroup2" if version == 2
            else mount.type == "cgroup" and controller in mount.options.split(","))
    ]  # fmt: skip
    if not mounts:
        return Unavailable(f"/proc/self/mountinfo: {name} is not mounted")
    for mount in sorted(mounts, key=lambda mount: len(mount.root)):  # most ancestors first
        if (below := _below(path, mount.root)) is not None:
            top = root / mount.point.lstrip("/")
            cgroup = Cgroup(version=version, mount=top, path=PurePosixPath(below))
            if os.path.isdir(cgroup.folder):  # a name too long is none
                return cgroup
    return Unavailable(f"{name}: {path} is not visible below {mounts[0].point}")


def _below(path: str, root: str) -> str | None:
    """The path as seen from a mount's root; None where it does not lie below."""
    if root != "/":
        if path != root and not path.startswith(f"{root}/"):
            return None
        path = path[len(root) :] or "/"
    return None if ".." in path.split("/") or not path.startswith("/") else path


class Limit:
    """The least of the limits that are set on some cgroups."""

    def __init__(self, name: str, cgroups: Sequence[Cgroup]) -> None:
        names, self._parse = _LIMITS[name, cgroups[0].version]
        self._files = [[ProcFile(each.folder / file) for file in names] for each in cgroups]
        self._reason = f"no {name} is set in {cgroups[0].folder}, nor visible above it"

    def read(self) -> float | None:
        """The limit; None without one, or without its files."""
        # The top of a tree has no such files, nor has a cgroup that the controller is not enabled
        # for.
        found = []
        for files in self._files:
            with contextlib.suppress(FileNotFoundError):
                found.append(self._parse([file.read() for file in files]))
        return min((limit for limit in found if limit is not None), default=None)

    def column(self) -> Sequence[float]:
        """The limit as the value of a reading."""
        if (limit := self.read()) is None:
            raise Unavailable(self._reason)
        return (limit,)

    def close(self) -> None:
        """Closes the files."""
        for files in self._files:
            for file in files:
                file.close()


CPU_QUOTA, MEMORY_LIMIT = "CPU quota", "memory limit"
_Parsed = Callable[[Sequence[bytes]], float | None]
_LIMITS: Mapping[tuple[str, int], tuple[tuple[str, ...], _Parsed]] = {
    (CPU_QUOTA, 1): (("cpu.cfs_quota_us", "cpu.cfs_period_us"), parse_cpu_limit),
    (CPU_QUOTA, 2): (("cpu.max",), lambda contents: parse_cpu_limit(contents[0].split())),
    (MEMORY_LIMIT, 1): (("memory.limit_in_bytes",), lambda c: parse_memory_limit(c[0].strip())),
    (MEMORY_LIMIT, 2): (("memory.max",), lambda c: parse_memory_limit(c[0].strip())),
}


def tightest_limit(name: str, cgroup: Cgroup) -> Limit:
    """Of a cgroup and its visible ancestors."""
    return Limit(name, [cgroup, *cgroup.above()])


def limit_reading(name: str, column: str, file: str, cgroup: Cgroup) -> Reading:
    """The tightest limit as a column."""
    limit = tightest_limit(name, cgroup)
    return Reading(
        columns=(column,), origin=str(cgroup.folder / file), read=limit.column, close=limit.close
    )


Places = Mapping[str, Cgroup | Unavailable]  # where each controller is; `V2`: the tree of version 2

_MEMBERSHIPS = "/proc/self/cgroup"
_THROTTLING = ("cpu_period_count", "cpu_throttled_period_count", "cpu_throttled_ns")
_STAT_V1 = ("memory_anonymous_bytes", "memory_file_bytes", "memory_swap_bytes")
_CPU_MISSING = "counted only where the cpu controller is enabled, and not at the top of the tree"
_MEMORY_MISSING = "not at the top of the tree, nor without the memory controller"
_OLD_KERNEL = "this kernel does not count it"


def cgroup_readings(cgroups: Places) -> tuple[Reading, ...]:
    """Every column of the CGROUP table."""
    return (*_cpu(cgroups), *_memory(cgroups["memory"]), *_pressures(cgroups[V2]))


def _cpu(cgroups: Places) -> tuple[Reading, ...]:
    cgroup = cgroups["cpu"]
    if isinstance(cgroup, Unavailable):
        return (refused_reading(("cpu_ns", *_THROTTLING, "cpu_limit_cores"), _MEMBERSHIPS, cgroup),)
    stat = cgroup.folder / "cpu.stat"
    file = "cpu.cfs_quota_us" if cgroup.version == 1 else "cpu.max"
    limit = limit_reading(CPU_QUOTA, "cpu_limit_cores", file, cgroup)
    if cgroup.version == 2:
        heads = ("usage_usec ", "nr_periods ", "nr_throttled ", "throttled_usec ")
        parse = NamedNumbers(heads, (NS_PER_US, 1, 1, NS_PER_US))
        columns = ("cpu_ns", *_THROTTLING)
        return (file_reading(stat, columns, parse, lacking=_CPU_MISSING), limit)
    parse = NamedNumbers(("nr_periods ", "nr_throttled ", "throttled_time "))  # here in ns
    usage = cgroups["cpuacct"]
    return (
        file_reading(stat, _THROTTLING, parse, lacking="a kernel without CONFIG_CFS_BANDWIDTH"),
        limit,
        refused_reading(("cpu_ns",), _MEMBERSHIPS, usage)
        if isinstance(usage, Unavailable)
        else file_reading(usage.folder / "cpuacct.usage", ("cpu_ns",), _number),
    )


def _memory(cgroup: Cgroup | Unavailable) -> tuple[Reading, ...]:
    if isinstance(cgroup, Unavailable):
        columns = CGROUP.names("memory_used_bytes", "memory_oom_count")
        return (refused_reading(columns, _MEMBERSHIPS, cgroup),)
    folder = cgroup.folder

    def of(name: str, columns: Sequence[str], parse: _Parse, lacking: str = _OLD_KERNEL) -> Reading:
        return file_reading(folder / name, columns, parse, lacking=lacking)

    if cgroup.version == 1:
        stat, origin = _MemoryStatV1(str(folder)), f"{folder}/memory.stat"
        return (
            of("memory.usage_in_bytes", ("memory_used_bytes",), _number),
            of("memory.max_usage_in_bytes", ("memory_peak_bytes",), _number),
            of("memory.stat", _STAT_V1, stat),
            Reading(columns=("memory_limit_bytes",), origin=origin, read=stat.limit),
            of("memory.failcnt", ("memory_limit_hit_count",), _number),
            of("memory.oom_control", ("memory_oom_count",), NamedNumbers(("oom_kill ",))),
        )
    hits = CGROUP.names("memory_limit_hit_count", "memory_oom_count")
    return (
        of("memory.current", ("memory_used_bytes",), _number, _MEMORY_MISSING),
        of("memory.peak", ("memory_peak_bytes",), _number, f"before Linux 5.19; {_MEMORY_MISSING}"),
        of("memory.stat", _STAT_V1[:2], NamedNumbers(("anon ", "file ")), _MEMORY_MISSING),
        of("memory.swap.current", _STAT_V1[2:], _number, "no swap accounting in this cgroup"),
        of("memory.events", hits, NamedNumbers(("max ", "oom_kill ")), _MEMORY_MISSING),
        limit_reading(MEMORY_LIMIT, "memory_limit_bytes", "memory.max", cgroup),
    )


class _MemoryStatV1:
    """Parses memory.stat of version 1, and remembers the limit in it."""

    def __init__(self, folder: str) -> None:
        heads = ("total_rss ", "total_cache ", "total_swap ", "hierarchical_memory_limit ")
        self._numbers = NamedNumbers(heads)
        self._folder = folder
        self._limit: int | None = None

    def __call__(self, content: bytes) -> Sequence[Value]:
        # `hierarchical_memory_limit` is the kernel's own minimum over all ancestors, including
        # those that a container does not see. Source: Linux
        # Documentation/admin-guide/cgroup-v1/memory.rst, section 5.2.
        self._limit = None
        *sizes, self._limit = self._numbers(content)
        return sizes

    def limit(self) -> Sequence[Value]:
        """The limit of the content parsed last."""
        if self._limit is None:
            raise Unavailable(f"{self._folder}: memory.stat has no limit in it")
        if self._limit >= V1_UNLIMITED_BYTES:
            raise Unavailable(f"no memory limit is set in {self._folder}, nor above it")
        return (self._limit,)


def _pressures(cgroup: Cgroup | Unavailable) -> tuple[Reading, ...]:
    """Only version 2 counts it by cgroup; that of its top is the node's."""
    if not isinstance(cgroup, Unavailable) and not (cgroup.folder / "cgroup.type").exists():
        cgroup = Unavailable(f"{cgroup.folder} is the top of the tree: pressure as in source host")
    if isinstance(cgroup, Unavailable):
        columns = CGROUP.names("pressure_cpu_some_ns", "pressure_io_full_ns")
        return (refused_reading(columns, _MEMBERSHIPS, cgroup),)
    lacking = "no pressure stall information in this kernel or cgroup, or not yet `full`"
    return tuple(
        pressure_reading(cgroup.folder / f"{resource}.pressure", resource, lacking=lacking)
        for resource in ("cpu", "memory", "io")
    )


_Parse = Callable[[bytes], Sequence[Value]]


def _number(content: bytes) -> Sequence[Value]:
    return (int(content),)


_KIB = 1024
_RECORD_BYTES = 8192
_RECORD_LIMIT = 20_000
_KILLED = re.compile(
    rb"Killed process (\d+) \((.*)\).*?anon-rss:(\d+)kB, file-rss:(\d+)kB(?:, shmem-rss:(\d+)kB)?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomKill:
    """One process that the kernel killed, as its log has it."""

    pid: int  # in the machine's own numbering: in a container a process has another one too
    command: str
    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    in_cgroup: bool  # whether a control group's limit was reached, and not the machine's memory


def memory_cgroup(pid: int) -> Cgroup | None:
    """The control group that a process's memory is counted in; None where that is not visible."""
    try:
        files = Path(f"/proc/{pid}/cgroup"), Path("/proc/self/mountinfo")
        memberships, mountinfo = (path.read_text(errors="replace") for path in files)
    except OSError:
        return None
    found = find_cgroup("memory", memberships, mountinfo, Path("/"))
    return found if isinstance(found, Cgroup) else None


def oom_kill_count(cgroup: Cgroup) -> int | None:
    """How many processes of a control group the kernel has killed for want of memory."""
    # Source: Linux Documentation/admin-guide/cgroup-v2.rst (memory.events), memcontrol-v1.c.
    name = "memory.oom_control" if cgroup.version == 1 else "memory.events"
    with contextlib.suppress(OSError, ValueError):
        return NamedNumbers(("oom_kill ",))((cgroup.folder / name).read_bytes())[0]
    return None


class KernelLog:
    """What the kernel writes into its log from now on; nothing where this user may not read it."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        self._fd = -1
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)

    def new_oom_kills(self) -> list[OomKill]:
        """Those since the last call."""
        found = []
        for _ in range(_RECORD_LIMIT if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, _RECORD_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the ring has gone on: what is left follows
                    continue
                break
            if (kill := parse_oom_kill(record)) is not None:
                found.append(kill)
            if not record:
                break
        return found

    def close(self) -> None:
        """Lets go of it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def parse_oom_kill(record: bytes) -> OomKill | None:
    """A record of the kernel's log as a kill; None for any other."""
    # Source: mm/oom_kill.c, __oom_kill_process().
    match = _KILLED.search(record)
    if match is None or b"out of memory" not in record.lower():
        return None
    pid, command, anonymous, file, shared = match.groups()
    return OomKill(
        pid=int(pid), command=command.decode(errors="replace"),
        anonymous_bytes=int(anonymous) * _KIB, file_bytes=int(file) * _KIB,
        shared_bytes=int(shared or 0) * _KIB, in_cgroup=b"Memory cgroup" in record,
    )  # fmt: skip
