"""On which NUMA nodes a process's memory lies: a sample of its pages, asked with move_pages(2)."""

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

from haiprof.linux.procfs import OTHER_USER, PAGE_BYTES
from haiprof.linux.readings import Unavailable, os_status

SAMPLE_PAGES = 512
_DRAW_EVERY = 6  # reads: listing the thousands of mappings of a big process takes milliseconds
_PIECE_BYTES = 1 << 16
_ANONYMOUS = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) rw.p [0-9a-f]+ 00:00 0\b", re.MULTILINE)
_SYSCALLS = {"x86_64": 279, "aarch64": 239}  # Linux syscall tables
_IN_CONTAINER = "start the container with --cap-add SYS_NICE, or a seccomp profile that allows it"

MovePages = Callable[[int, Sequence[int]], Sequence[int]]
"""From a pid (0 for this process) and addresses to each page's node, or its negative errno."""


def move_pages(pid: int, addresses: Sequence[int]) -> Sequence[int]:
    """Asks on which node pages are; moves nothing."""
    number = _SYSCALLS.get(platform.machine())
    if number is None:
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
    """A random sample of one process's pages, drawn anew at intervals.

    Only private memory that can be written counts: the heap, tensors on the CPU, Python objects.
    Pinned memory is a mapping of the driver's, memory shared between processes is a file's, and
    both are left out. `/proc/PID/numa_maps` would count every page, and holds the process's memory
    lock for milliseconds per GiB.
    """

    def __init__(self, pid: int, *, root: Path = Path("/"), ask: MovePages = move_pages) -> None:
        self._pid = pid
        self._maps = root / "proc" / str(pid) / "maps"
        self._ask = ask
        self._addresses: list[int] = []
        self._read_count = 0

    def pages_by_node(self) -> Mapping[int, int]:
        """How many of the sampled pages that are in memory lie on each node."""
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
