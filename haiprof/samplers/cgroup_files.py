"""The files of one control group, version 1 and 2, as readings of the CGROUP table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from haiprof.samplers.base import Unavailable
from haiprof.samplers.cgroup_limits import (
    V1_UNLIMITED_BYTES,
    TightestLimit,
    cpu_limit,
    memory_limit,
)
from haiprof.samplers.cgroup_tree import V2, Place
from haiprof.samplers.memory import parse_pressure
from haiprof.samplers.named import NamedNumbers
from haiprof.samplers.procfs import file_reading
from haiprof.samplers.table import Reading, Value, refused_reading
from haiprof.units import NS_PER_US

Places = Mapping[str, Place | Unavailable]
"""Where each controller is; `V2` is the tree of version 2."""

_MEMBERSHIPS = "/proc/self/cgroup"
_THROTTLING = ("cpu_period_count", "cpu_throttled_period_count", "cpu_throttled_ns")
_STAT_V1 = ("memory_anonymous_bytes", "memory_file_bytes", "memory_swap_bytes")
_CPU_MISSING = "counted only where the cpu controller is enabled, and not at the top of the tree"
_MEMORY_MISSING = "not at the top of the tree, nor without the memory controller"
_OLD_KERNEL = "this kernel does not count it"


def cgroup_readings(places: Places) -> tuple[Reading, ...]:
    """Every column of the CGROUP table."""
    return (*_cpu(places), *_memory(places["memory"]), *_pressures(places[V2]))


def _cpu(places: Places) -> tuple[Reading, ...]:
    place = places["cpu"]
    if isinstance(place, Unavailable):
        return (refused_reading(("cpu_ns", *_THROTTLING, "cpu_limit_cores"), _MEMBERSHIPS, place),)
    stat, quota = place.folder / "cpu.stat", TightestLimit(place, cpu_limit, "CPU quota")
    limit = Reading(
        columns=("cpu_limit_cores",),
        origin=str(place.folder / ("cpu.cfs_quota_us" if place.version == 1 else "cpu.max")),
        read=quota.read,
        close=quota.close,
    )
    if place.version == 2:
        heads = ("usage_usec ", "nr_periods ", "nr_throttled ", "throttled_usec ")
        parse = _numbers(heads, (NS_PER_US, 1, 1, NS_PER_US))
        columns = ("cpu_ns", *_THROTTLING)
        return (file_reading(stat, columns, parse, lacking=_CPU_MISSING), limit)
    parse = NamedNumbers(("nr_periods ", "nr_throttled ", "throttled_time "))  # here in ns
    usage = places["cpuacct"]
    return (
        file_reading(stat, _THROTTLING, parse, lacking="a kernel without CONFIG_CFS_BANDWIDTH"),
        limit,
        refused_reading(("cpu_ns",), _MEMBERSHIPS, usage)
        if isinstance(usage, Unavailable)
        else file_reading(usage.folder / "cpuacct.usage", ("cpu_ns",), _number),
    )


def _memory(place: Place | Unavailable) -> tuple[Reading, ...]:
    if isinstance(place, Unavailable):
        columns = (
            "memory_used_bytes",
            "memory_peak_bytes",
            *_STAT_V1,
            "memory_limit_bytes",
            "memory_limit_hit_count",
            "memory_oom_count",
        )
        return (refused_reading(columns, _MEMBERSHIPS, place),)
    return _memory_v1(place) if place.version == 1 else _memory_v2(place)


def _memory_v2(place: Place) -> tuple[Reading, ...]:
    limit = TightestLimit(place, memory_limit, "memory limit")
    folder = place.folder

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


def _memory_v1(place: Place) -> tuple[Reading, ...]:
    folder, stat = place.folder, _MemoryStatV1(str(place.folder))

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
    """Parses memory.stat of version 1, and keeps the limit that stands in it.

    `hierarchical_memory_limit` is the kernel's own least limit over all ancestors, those included
    that are not visible in a container.

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


def _pressures(place: Place | Unavailable) -> tuple[Reading, ...]:
    """Only version 2 counts it by cgroup; that of its top is the node's."""
    if not isinstance(place, Unavailable) and not (place.folder / "cgroup.type").exists():
        place = Unavailable(f"{place.folder} is the top of the tree: pressure as in source host")
    return tuple(_pressure(what, place) for what in ("cpu", "memory", "io"))


def _pressure(what: str, place: Place | Unavailable) -> Reading:
    columns = (f"pressure_{what}_some_ns", f"pressure_{what}_full_ns")
    if isinstance(place, Unavailable):
        return refused_reading(columns, _MEMBERSHIPS, place)
    return file_reading(
        place.folder / f"{what}.pressure",
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
