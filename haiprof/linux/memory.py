"""Memory, paging and pressure of a node, from /proc/meminfo, /proc/vmstat and /proc/pressure."""

from __future__ import annotations

from haiprof.linux.named_numbers import NamedNumbers
from haiprof.linux.procfs import PAGE_BYTES

Values = tuple[int | None, ...]

_MEMORY = {
    "memory_total_bytes": "MemTotal:",
    "memory_available_bytes": "MemAvailable:",
    "memory_free_bytes": "MemFree:",
    "memory_cached_bytes": "Cached:",
    "memory_shared_bytes": "Shmem:",
    "memory_dirty_bytes": "Dirty:",
    "memory_huge_bytes": "AnonHugePages:",
    "swap_total_bytes": "SwapTotal:",
}
MEMORY_COLUMNS = (*_MEMORY, "swap_used_bytes", "huge_page_total_bytes", "huge_page_free_bytes")
_MORE_MEMORY = ("SwapFree:", "HugePages_Total:", "HugePages_Free:", "Hugepagesize:")

_EVENTS = {
    "page_fault_count": "pgfault ",
    "major_page_fault_count": "pgmajfault ",
    "oom_kill_count": "oom_kill ",
    "compaction_stall_count": "compact_stall ",
    "numa_hint_fault_count": "numa_hint_faults ",
    "numa_page_migration_count": "numa_pages_migrated ",
}
PAGING_COLUMNS = (*_EVENTS, "swap_in_bytes", "swap_out_bytes")


class MemorySizes:
    """Parses /proc/meminfo into MEMORY_COLUMNS; its kB are KiB.

    Source: Linux Documentation/filesystems/proc.rst, meminfo.
    """

    def __init__(self) -> None:
        self._numbers = NamedNumbers((*_MEMORY.values(), *_MORE_MEMORY))

    def __call__(self, content: bytes) -> Values:
        """The values in bytes; None where the kernel does not say one."""
        *sizes, swap_free, huge_total, huge_free, huge_size = self._numbers(content)
        swap_total = sizes[-1]
        swap_used = (
            None if swap_total is None or swap_free is None else (swap_total - swap_free) * 1024
        )
        return (
            *(None if size is None else size * 1024 for size in sizes),
            swap_used,
            _pages_bytes(huge_total, huge_size),
            _pages_bytes(huge_free, huge_size),
        )


def _pages_bytes(count: int | None, size_kib: int | None) -> int | None:
    return None if count is None or size_kib is None else count * size_kib * 1024


class Paging:
    """Parses /proc/vmstat into PAGING_COLUMNS."""

    def __init__(self) -> None:
        self._numbers = NamedNumbers((*_EVENTS.values(), "pswpin ", "pswpout "))

    def __call__(self, content: bytes) -> Values:
        """The counts since boot, pages as bytes; None where the kernel does not count it."""
        *counts, pages_in, pages_out = self._numbers(content)
        pages = (None if count is None else count * PAGE_BYTES for count in (pages_in, pages_out))
        return (*counts, *pages)


def parse_pressure(content: bytes) -> Values:
    """Time in ns in which some task, and in which all of them, waited; from a pressure file.

    Source: Linux Documentation/accounting/psi.rst; its totals are in us. `full` of cpu is not
    there before Linux 5.13.
    """
    some, _, rest = content.partition(b"\n")
    if not some.startswith(b"some "):
        raise ValueError("the first line is not `some`")
    full = _stalled_ns(rest.partition(b"\n")[0]) if rest.startswith(b"full ") else None
    return (_stalled_ns(some), full)


def parse_some_pressure(content: bytes) -> Values:
    """The first of `parse_pressure` alone.

    For a node's CPUs, `full` is not defined and written as 0 (Linux Documentation/accounting/psi).
    """
    return parse_pressure(content)[:1]


def _stalled_ns(line: bytes) -> int:
    return int(line[line.index(b"total=") + 6 :]) * 1000
