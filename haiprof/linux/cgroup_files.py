"""The files of one control group, version 1 and 2, as readings of the CGROUP table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from haiprof.base.control_group_limits import V1_UNLIMITED_BYTES
from haiprof.base.units import NS_PER_US
from haiprof.linux.cgroup_limits import TightestLimit, cpu_limit, memory_limit
from haiprof.linux.cgroup_tree import V2, Cgroup
from haiprof.linux.memory import parse_pressure
from haiprof.linux.named_numbers import NamedNumbers
from haiprof.linux.procfs import file_reading
from haiprof.linux.readings import Reading, Unavailable, Value, refused_reading

Places = Mapping[str, Cgroup | Unavailable]
"""Where each controller is; `V2` is the tree of version 2."""

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
    stat, quota = cgroup.folder / "cpu.stat", TightestLimit(cgroup, cpu_limit, "CPU quota")
    limit = Reading(
        columns=("cpu_limit_cores",),
        origin=str(cgroup.folder / ("cpu.cfs_quota_us" if cgroup.version == 1 else "cpu.max")),
        read=quota.read,
        close=quota.close,
    )
    if cgroup.version == 2:
        heads = ("usage_usec ", "nr_periods ", "nr_throttled ", "throttled_usec ")
        parse = _numbers(heads, (NS_PER_US, 1, 1, NS_PER_US))
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
        columns = (
            "memory_used_bytes",
            "memory_peak_bytes",
            *_STAT_V1,
            "memory_limit_bytes",
            "memory_limit_hit_count",
            "memory_oom_count",
        )
        return (refused_reading(columns, _MEMBERSHIPS, cgroup),)
    return _memory_v1(cgroup) if cgroup.version == 1 else _memory_v2(cgroup)


def _memory_v2(cgroup: Cgroup) -> tuple[Reading, ...]:
    limit = TightestLimit(cgroup, memory_limit, "memory limit")
    folder = cgroup.folder

    def of(name: str, columns: Sequence[str], parse: _Parse, lacking: str) -> Reading:
        return file_reading(folder / name, columns, parse, lacking=lacking)

    return (
        of("memory.current", ("memory_used_bytes",), _number, _MEMORY_MISSING),
        of("memory.peak", ("memory_peak_bytes",), _number, f"before Linux 5.19; {_MEMORY_MISSING}"),
        of("memory.stat", _STAT_V1[:2], NamedNumbers(("anon ", "file ")), _MEMORY_MISSING),
        of("memory.swap.current", _STAT_V1[2:], _number, "no swap accounting in this cgroup"),
        of(
            "memory.events",
            ("memory_limit_hit_count", "memory_oom_count"),
            NamedNumbers(("max ", "oom_kill ")),
            _MEMORY_MISSING,
        ),
        Reading(
            columns=("memory_limit_bytes",),
            origin=str(folder / "memory.max"),
            read=limit.read,
            close=limit.close,
        ),
    )


def _memory_v1(cgroup: Cgroup) -> tuple[Reading, ...]:
    folder, stat = cgroup.folder, _MemoryStatV1(str(cgroup.folder))

    def of(name: str, columns: Sequence[str], parse: _Parse) -> Reading:
        return file_reading(folder / name, columns, parse, lacking=_OLD_KERNEL)

    return (
        of("memory.usage_in_bytes", ("memory_used_bytes",), _number),
        of("memory.max_usage_in_bytes", ("memory_peak_bytes",), _number),
        of("memory.stat", _STAT_V1, stat),
        Reading(
            columns=("memory_limit_bytes",), origin=str(folder / "memory.stat"), read=stat.limit
        ),
        of("memory.failcnt", ("memory_limit_hit_count",), _number),
        of("memory.oom_control", ("memory_oom_count",), NamedNumbers(("oom_kill ",))),
    )


class _MemoryStatV1:
    """Parses memory.stat of version 1, and remembers the limit in it.

    `hierarchical_memory_limit` is the kernel's own minimum over all ancestors, including those
    that a container does not see.

    Source: Linux Documentation/admin-guide/cgroup-v1/memory.rst, section 5.2.
    """

    def __init__(self, folder: str) -> None:
        heads = ("total_rss ", "total_cache ", "total_swap ", "hierarchical_memory_limit ")
        self._numbers = NamedNumbers(heads)
        self._folder = folder
        self._limit: int | None = None

    def __call__(self, content: bytes) -> Sequence[Value]:
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
    return tuple(_pressure(resource, cgroup) for resource in ("cpu", "memory", "io"))


def _pressure(resource: str, cgroup: Cgroup | Unavailable) -> Reading:
    columns = (f"pressure_{resource}_some_ns", f"pressure_{resource}_full_ns")
    if isinstance(cgroup, Unavailable):
        return refused_reading(columns, _MEMBERSHIPS, cgroup)
    return file_reading(
        cgroup.folder / f"{resource}.pressure",
        columns,
        parse_pressure,
        lacking="no pressure stall information in this kernel or cgroup, or not yet `full`",
        remedy="a kernel with CONFIG_PSI, booted with psi=1",
    )


_Parse = Callable[[bytes], Sequence[Value]]


def _number(content: bytes) -> Sequence[Value]:
    return (int(content),)


def _numbers(heads: Sequence[str], scales: Sequence[int]) -> _Parse:
    numbers = NamedNumbers(heads)

    def parse(content: bytes) -> Sequence[Value]:
        found = zip(numbers(content), scales, strict=True)
        return [None if value is None else value * scale for value, scale in found]

    return parse
