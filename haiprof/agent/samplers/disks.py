"""Bytes, operations and busy time of a node's whole disks, from /proc/diskstats."""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path

from haiprof.agent.samplers.growing_counters import SummedCounters
from haiprof.base.units import NS_PER_MS
from haiprof.linux.sysfs import list_names

Values = tuple[int | None, ...]

DISK_COLUMNS = (
    "disk_read_bytes",
    "disk_write_bytes",
    "disk_read_count",
    "disk_write_count",
    "disk_busy_ns",
    "disk_count",
)
_FIELDS = (5, 9, 3, 7, 12)  # sectors read, written, reads, writes, ms busy
_BITS = (64, 64, 64, 64, 32)
_SECTOR_BYTES = 512  # always in /proc/diskstats, whatever the device's own sector (iostats.rst)
_SCALES = (_SECTOR_BYTES, _SECTOR_BYTES, 1, 1, NS_PER_MS)

_MEMORY_DISK = re.compile(r"(loop|ram|zram)\d+\Z")
_PARTITION = re.compile(r"(([hsv]d|xvd)[a-z]+\d+|(nvme\d+n|mmcblk)\d+p\d+|(dm-|md)\d+)\Z")
_NVME_PATH = re.compile(rb"(nvme\d+)c\d+(n\d+)\Z")


class DiskTotals:
    """Parses /proc/diskstats into DISK_COLUMNS.

    Left out: partitions (in their disk already), devices stacked on others (device mapper, RAID,
    the head of an NVMe multipath: its paths are counted), and those in memory (loop, ram, zram).

    Source: Linux Documentation/admin-guide/iostats.rst.
    """

    def __init__(self, root: Path) -> None:
        self._block = root / "sys" / "block"
        self._counted: dict[bytes, bool] = {}
        self._sums = SummedCounters(_BITS)

    def __call__(self, content: bytes) -> Values:
        """The sums over all disks, None without any disk."""
        lines = {words[2]: words for words in map(bytes.split, content.splitlines())}
        disks = self._disks(lines)
        if not disks:
            return (None,) * len(DISK_COLUMNS)
        counts = {name: [int(lines[name][field]) for field in _FIELDS] for name in disks}
        sums = self._sums.add(counts)
        scaled = (total * scale for total, scale in zip(sums, _SCALES, strict=True))
        return (*scaled, len(disks))

    def _disks(self, names: Collection[bytes]) -> list[bytes]:
        paths = [match for match in map(_NVME_PATH.match, names) if match]
        heads = {b"".join(path.groups()) for path in paths}
        return [name for name in names if name not in heads and self._counts(name)]

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
        return folder.is_dir() and not list_names(folder / "slaves")
