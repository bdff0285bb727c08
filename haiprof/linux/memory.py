"""Memory of a node: its files in /proc, pressure, and on which NUMA nodes pages lie."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import random
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from haiprof.linux.procfs import OTHER_USER, PAGE_BYTES, file_reading
from haiprof.linux.readings import Reading, Unavailable, os_status
from haiprof.run_format.tables import HOST


class NamedNumbers:
    """Finds lines by their beginning; remembers the position of each, as their order is stable."""

    def __init__(self, heads: Sequence[str], units: Sequence[int] = ()) -> None:
        self._heads = [head.encode() for head in heads]
        self._units = units or (1,) * len(heads)
        self._places: list[int | None] = []
        self._line_count = -1

    def __call__(self, content: bytes) -> list[int | None]:
        """One number per head, in its unit; None where there is no such line."""
        lines = content.split(b"\n")
        if not self._fits(lines):
            self._line_count = len(lines)
            self._places = [
                next((at for at, line in enumerate(lines) if line.startswith(head)), None)
                for head in self._heads
            ]
        return [
            None if at is None else int(lines[at][len(head) :].split(None, 1)[0]) * unit
            for head, at, unit in zip(self._heads, self._places, self._units, strict=True)
        ]

    def _fits(self, lines: Sequence[bytes]) -> bool:
        return len(lines) == self._line_count and all(
            at is None or lines[at].startswith(head)
            for head, at in zip(self._heads, self._places, strict=True)
        )


Values = tuple[int | None, ...]

MEMORY_COLUMNS = HOST.names("memory_total_bytes", "huge_page_free_bytes")
_SIZES = ("MemTotal:", "MemAvailable:", "MemFree:", "Cached:", "Shmem:", "Dirty:", "AnonHugePages:",
          "SwapTotal:", "SwapFree:", "Hugepagesize:")  # fmt: skip
_HUGE_PAGES = ("HugePages_Total:", "HugePages_Free:")
PAGING_COLUMNS = HOST.names("page_fault_count", "swap_out_bytes")
PAGING = {"pgfault ": 1, "pgmajfault ": 1, "oom_kill ": 1, "compact_stall ": 1,
          "numa_hint_faults ": 1, "numa_pages_migrated ": 1, "pswpin ": PAGE_BYTES,
          "pswpout ": PAGE_BYTES}  # fmt: skip
"""Lines of /proc/vmstat and their units: counts since boot, pages as bytes."""


def parse_memory_sizes() -> Callable[[bytes], Values]:
    """A parser of /proc/meminfo into MEMORY_COLUMNS, in bytes; its kB are KiB."""
    # Source: Linux Documentation/filesystems/proc.rst, meminfo.
    numbers = NamedNumbers((*_SIZES, *_HUGE_PAGES), (1024,) * len(_SIZES) + (1, 1))

    def parse(content: bytes) -> Values:
        *sizes, swap_free, huge_bytes, huge_total, huge_free = numbers(content)
        swap = None if sizes[-1] is None or swap_free is None else sizes[-1] - swap_free
        huge = (None if count is None or huge_bytes is None else count * huge_bytes
                for count in (huge_total, huge_free))  # fmt: skip
        return (*sizes, swap, *huge)

    return parse


def pressure_reading(path: Path, resource: str, *, lacking: str, full: bool = True) -> Reading:
    """Pressure by some, and by all tasks."""
    columns = [f"pressure_{resource}_{kind}_ns" for kind in ("some", "full")[: 1 + full]]
    return file_reading(
        path, columns, lambda content: parse_pressure(content)[: 1 + full], lacking=lacking,
        remedy=PSI_REMEDY,
    )  # fmt: skip


def parse_pressure(content: bytes) -> Values:
    """Time in ns in which some task, and in which all of them, waited; from a pressure file."""
    # Source: Linux Documentation/accounting/psi.rst; its totals are in us. `full` of cpu is not
    # there before Linux 5.13.
    totals = {kind: int(us) * 1000 for kind, us in _STALLED.findall(content)}
    if b"some" not in totals:
        raise ValueError("no line `some`")
    return (totals[b"some"], totals.get(b"full"))


PSI_REMEDY = "a kernel with CONFIG_PSI, booted with psi=1"
SAMPLE_PAGES = 512
_DRAW_EVERY = 6  # reads: listing the thousands of mappings of a big process takes milliseconds
_PIECE_BYTES = 1 << 16
_STALLED = re.compile(rb"^(some|full) .*total=(\d+)$", re.MULTILINE)
_ANONYMOUS = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ 00:00 0\b", re.MULTILINE)
_SYSCALLS = {"x86_64": 279, "aarch64": 239}  # Linux syscall tables
_IN_CONTAINER = "start the container with --cap-add SYS_NICE, or a seccomp profile that allows it"

MovePages = Callable[[int, Sequence[int]], Sequence[int]]
"""From a pid (0 for this process) and addresses to each page's node, or its negative errno."""


def move_pages(pid: int, addresses: Sequence[int]) -> Sequence[int]:
    """Asks on which node pages are; moves nothing."""
    if (number := _SYSCALLS.get(platform.machine())) is None:
        reason = f"move_pages(2): not known on {platform.machine()}"
        raise Unavailable(reason, status="unsupported", lasting=True)
    count = len(addresses)
    pages = (ctypes.c_void_p * count)(*addresses)
    status = (ctypes.c_int * count)()
    arguments = (ctypes.c_long(pid), ctypes.c_ulong(count), pages, None, status, ctypes.c_int(0))
    library = ctypes.CDLL(None, use_errno=True)
    library.syscall.restype = ctypes.c_long
    if library.syscall(ctypes.c_long(number), *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return list(status)


class PageSample:
    """A random sample of one process's pages, drawn anew at intervals."""

    def __init__(self, pid: int, *, root: Path = Path("/"), ask: MovePages = move_pages) -> None:
        self._pid = pid
        self._maps = root / "proc" / str(pid) / "maps"
        self._ask = ask
        self._addresses: list[int] = []
        self._read_count = 0

    def pages_by_node(self) -> Mapping[int, int]:
        """How many of the sampled pages that are in memory lie on each node."""
        # Only private memory that can be written counts: the heap, tensors on the CPU, Python
        # objects. Pinned memory is a mapping of the driver's, memory shared between processes is a
        # file's, and both are left out. `/proc/PID/numa_maps` would count every page, and holds the
        # process's memory lock for milliseconds per GiB.
        if self._read_count < 2 or self._read_count % _DRAW_EVERY == 0:
            self._addresses = draw_pages(self._regions(), random.Random(self._read_count))
        self._read_count += 1
        try:
            found = self._ask(self._pid, self._addresses) if self._addresses else []
        except ProcessLookupError:
            raise
        except OSError as error:
            raise self._explain_refusal(error) from None
        return Counter(node for node in found if node >= 0)

    def _regions(self) -> bytes:
        content = []
        try:
            with open(self._maps, "rb", buffering=0) as file:
                while piece := file.read(_PIECE_BYTES):
                    content.append(piece)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ProcessLookupError(errno.ESRCH, "No such process") from error
        except OSError as error:
            status = os_status(error)
            reason, remedy = f"{self._maps}: {error.strerror}", OTHER_USER
            raise Unavailable(reason, status=status, remedy=remedy, lasting=True) from None
        return b"".join(content)

    def _explain_refusal(self, error: OSError) -> Unavailable:
        """What a failed call means: a container's seccomp filter may refuse it altogether."""
        reason, status = f"move_pages(2): {error.strerror}", os_status(error)
        remedy = "a kernel with CONFIG_NUMA and CONFIG_MIGRATION" if status != "denied" else ""
        if status == "denied":
            try:
                self._ask(0, ())
                remedy = OTHER_USER
            except OSError:
                reason += " (also for haiprof itself: a seccomp filter)"
                remedy = _IN_CONTAINER
        return Unavailable(reason, status=status, remedy=remedy, lasting=True)


def draw_pages(maps: bytes, random_: random.Random, count: int = SAMPLE_PAGES) -> list[int]:
    """Page addresses from private writable memory, one from each of `count` equal parts of it."""
    regions = [(int(low, 16), int(high, 16)) for low, high in _ANONYMOUS.findall(maps)]
    ends = list(accumulate((high - low) // PAGE_BYTES for low, high in regions))
    total = ends[-1] if ends else 0
    addresses = []
    for part in range(min(count, total)):
        low, high = (total * at // min(count, total) for at in (part, part + 1))
        page = low + int(random_.random() * (high - low))
        region = bisect(ends, page)
        addresses.append(regions[region][1] - (ends[region] - page) * PAGE_BYTES)
    return addresses
