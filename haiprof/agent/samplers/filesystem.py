"""Network file systems: NFS and Lustre traffic of each mount, as this node's client counts it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from haiprof.agent.samplers.table import ALL_METRICS, ChangingSampler, Node
from haiprof.base.units import NS_PER_S
from haiprof.base.version import read_data
from haiprof.linux.procfs import MountEntry, ProcFile, file_reading, mount_entries, unescape
from haiprof.linux.readings import Entity, Reading, Unavailable, Value, os_status, refused_reading
from haiprof.run_format.tables import FILESYSTEM

NFS_TYPES = ("nfs", "nfs4")
LUSTRE = "lustre"
_DATA = read_data("agent/samplers/filesystem.json")
"""Other network file systems, and requests and calls that name files or ask for attributes: those
of NFS that carry data, keep state or locks are left out."""
_UNKNOWN = "haiprof knows no byte counters of this file system's client"
UNCOUNTED = {**_DATA["uncounted"], **dict.fromkeys(_DATA["unknown"], _UNKNOWN)}
"""By type: why nothing could be read of it."""

_U64, _I63 = 1 << 64, 1 << 63
_U64_DIGITS = 20
_MS = 1_000_000

NFS_COLUMNS = FILESYSTEM.names("read_bytes", "metadata_queue_ns")
LUSTRE_COLUMNS = ("read_bytes", "write_bytes", "metadata_count")


def network_mounts(content: str) -> list[MountEntry]:
    """Network file systems in /proc/self/mountinfo, each once, none that is mounted over."""
    # Source: Linux Documentation/filesystems/proc.rst, section 3.5.
    on_top = {mount.point: mount for mount in mount_entries(content)}
    found: dict[str, MountEntry] = {}
    for mount in on_top.values():
        if mount.type in (*NFS_TYPES, LUSTRE) or mount.type in UNCOUNTED:
            found.setdefault(mount.device, mount)
    return list(found.values())


NfsCounts = tuple[int, Mapping[str, int | None]]
"""Of one mount: seconds since it was mounted (one that is younger than before is another), and what
the NFS client counts by column."""


def nfs_counts(content: str) -> dict[str, NfsCounts]:
    """Counters of NFS in /proc/self/mountstats by mount point."""
    # A time below 0 (a known bug of the client, which writes it as a number near 2^64) stays
    # negative: it grows correctly from there.
    # Source: kernel fs/nfs/super.c and net/sunrpc/stats.c; nfs-utils' mountstats.
    found = {}
    for block in re.split(r"^device ", content, flags=re.MULTILINE)[1:]:
        head, _, body = block.partition("\n")
        match = re.search(r" mounted on (\S+) with fstype nfs4? ", f"{head} ")
        if match is not None and (counts := _nfs_block(body)) is not None:
            found[unescape(match[1])] = counts
    return found


def _nfs_block(body: str) -> NfsCounts | None:
    fields: dict[str, list[int]] = {}
    for line in body.splitlines():
        name, _, numbers = line.strip().partition(":")
        words = numbers.split()
        if words and all(word.isdecimal() and len(word) <= _U64_DIGITS for word in words):
            fields[name] = [count - _U64 if count >= _I63 else count for count in map(int, words)]
    if not fields.get("age"):
        return None
    requests = {name: n for name, n in fields.items() if name.isupper() and len(n) >= 8}
    values: dict[str, int | None] = dict.fromkeys(NFS_COLUMNS)
    moved = fields.get("bytes", [])
    if len(moved) >= 6:
        values |= {
            "read_bytes": moved[0] + moved[2],  # through the page cache, and directly
            "write_bytes": moved[1] + moved[3],
            "server_read_bytes": moved[4],
            "server_write_bytes": moved[5],
        }
    values |= _of_requests(requests)
    return fields["age"][0], {name: _in_range(value) for name, value in values.items()}


def _of_requests(requests: Mapping[str, Sequence[int]]) -> dict[str, int | None]:
    """Per request: number, transmissions, timeouts, bytes out and in, ms queued, rtt, execute."""
    if not requests:
        return {}
    values: dict[str, int | None] = {}
    known = {"server_read": ["READ"], "server_write": ["WRITE"], "metadata": _DATA["nfs_metadata"]}
    for column, names in known.items():
        own = [requests[name] for name in names if name in requests]
        if own or column == "metadata":
            values[f"{column}_count"] = sum(numbers[0] for numbers in own)
            for part, place in (("queue", 5), ("rtt", 6), ("execute", 7)):
                values[f"{column}_{part}_ns"] = sum(numbers[place] for numbers in own) * _MS
    values["retransmission_count"] = sum(n[1] - n[0] for n in requests.values())
    values["timeout_count"] = sum(n[2] for n in requests.values())
    return values


def _in_range(value: int | None) -> int | None:
    return value if value is not None and -_I63 < value < _I63 else None


def lustre_values(content: bytes) -> Sequence[int | None]:
    """`LUSTRE_COLUMNS` from a client's llite stats."""
    # A line is `name count samples [unit] min max sum`; the client leaves out what has not happened
    # yet, which is 0.
    lines = {words[0]: words for words in (line.split() for line in content.split(b"\n")) if words}
    if b"snapshot_time" not in lines:
        raise ValueError("no snapshot_time")
    calls = (lines.get(name.encode()) for name in _DATA["lustre_metadata"])
    moved = (_in_range(int(lines[name][6])) if name in lines else 0
             for name in (b"read_bytes", b"write_bytes"))  # fmt: skip
    return (*moved, sum(int(words[1]) for words in calls if words))


def lustre_stats(root: Path, mount: MountEntry) -> Path:
    """The stats file of a Lustre mount."""
    # Source: lustre/llite/lproc_llite.c: debugfs since 2.12, /proc before.
    wanted = mount.source.rpartition(":/")[2].split("/")[0]
    denied = None
    for base in (root / "sys/kernel/debug/lustre/llite", root / "proc/fs/lustre/llite"):
        try:
            names = os.listdir(base)
        except OSError as error:
            if os_status(error) == "denied":
                denied = f"{base}: {error.strerror}"
            continue
        matching = [base / name for name in names if name.rpartition("-")[0] == wanted]
        stats = [folder / "stats" for folder in matching if (folder / "stats").exists()]
        if len(stats) == 1:
            return stats[0]
        if stats:
            reason = (
                f"{base}: {wanted} is mounted {len(stats)} times, and it is not said which is which"
            )
            raise Unavailable(reason, status="unsupported")
    if denied:
        remedy = "as root: chmod 755 /sys/kernel/debug (where `lctl get_param llite.*.stats` reads)"
        raise Unavailable(denied, status="denied", remedy=remedy)
    raise Unavailable(f"no llite stats of {wanted} in /sys/kernel/debug/lustre or /proc/fs/lustre")


_NONE = "no network file system is mounted (one that is mounted later will be seen)"
# The client's age of a mount is in whole seconds.
_AGE_TOLERANCE_NS = 2 * NS_PER_S
# A source without counters at its opening is not read again.
_LOOKS_TO_OPEN = 2
ALL_COLUMNS = tuple(column.name for column in FILESYSTEM.metrics)


class _FoundMount(NamedTuple):
    """A mount, as it is told from another of the same name."""

    mount: MountEntry
    stats: Path | None  # of Lustre: the client's file, whose name is new with each mount
    born_ns: int | None  # of NFS: when it was mounted, on the sampler's clock, as it was first seen


class FilesystemSampler(ChangingSampler):
    """One record per mounted network file system; automounts come and go."""

    recorder = "filesystem"
    table = FILESYSTEM
    every = 10

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._mountinfo = ProcFile(self.root / "proc/self/mountinfo")
        self._mountstats = ProcFile(self.root / "proc/self/mountstats")
        self._looks = 0
        self._nfs: Mapping[str, NfsCounts] | OSError = {}

    def refresh(self) -> None:
        """Reads the list of mounts and the counters of NFS, and follows what has changed."""
        super().refresh()
        if not self.known and self._looks > _LOOKS_TO_OPEN:
            self.missing.note(ALL_METRICS, Unavailable(_NONE))

    def release(self) -> None:
        """Closes the two files."""
        self._mountinfo.close()
        self._mountstats.close()

    def present(self) -> Mapping[_FoundMount, _FoundMount]:
        """The network file systems that are mounted now."""
        self._looks += 1
        try:
            mounts = network_mounts(self._mountinfo.read().decode(errors="replace"))
        except OSError as error:
            raise Unavailable(f"{self._mountinfo.path}: {error.strerror}") from None
        self._nfs = {}
        if any(mount.type in NFS_TYPES for mount in mounts):
            try:
                self._nfs = nfs_counts(self._mountstats.read().decode(errors="replace"))
            except OSError as error:
                self._nfs = error
        return {found: found for found in map(self._find_mount, mounts)}

    def _find_mount(self, mount: MountEntry) -> _FoundMount:
        stats, born_ns = None, None
        if mount.type == LUSTRE:
            with contextlib.suppress(Unavailable):  # its reading says so
                stats = lustre_stats(self.root, mount)
        elif isinstance(self._nfs, dict) and mount.point in self._nfs:
            seen_ns = self._clock() - self._nfs[mount.point][0] * NS_PER_S
            known = [old for old in self.known if isinstance(old, _FoundMount)]
            before = [old.born_ns or 0 for old in known if old.mount == mount]
            born_ns = next((ns for ns in before if abs(ns - seen_ns) <= _AGE_TOLERANCE_NS), seen_ns)
        return _FoundMount(mount, stats, born_ns)

    def take_up(self, number: int, found: _FoundMount) -> Entity:
        """A mount with its counters, and what its client does not count."""
        mount = found.mount
        columns: Sequence[str]
        if mount.type in NFS_TYPES:
            columns, reading = NFS_COLUMNS, self._nfs_reading(mount)
        elif mount.type == LUSTRE:
            columns, reading = LUSTRE_COLUMNS, self._lustre_reading(found)
        else:
            columns, reading = ALL_COLUMNS, _refuse(ALL_COLUMNS, mount, UNCOUNTED[mount.type])
        rest = tuple(name for name in ALL_COLUMNS if name not in columns)
        readings = [reading]
        if rest:
            readings.append(_refuse(rest, mount, f"a {mount.type} client does not count it"))
        details = {"fstype": mount.type, "device": mount.source}
        return Entity(key=(number,), name=mount.point, readings=tuple(readings), details=details)

    def _nfs_reading(self, mount: MountEntry) -> Reading:
        def read() -> Sequence[Value]:
            if isinstance(self._nfs, OSError):
                raise self._nfs
            if (counts := self._nfs.get(mount.point)) is None:
                raise Unavailable(f"{self._mountstats.path} does not list {mount.point}")
            return [counts[1][name] for name in NFS_COLUMNS]

        lacking = "the kernel's NFS client does not show it"
        origin = str(self._mountstats.path)
        return Reading(columns=NFS_COLUMNS, origin=origin, read=read, lacking=lacking)

    def _lustre_reading(self, seen: _FoundMount) -> Reading:
        if seen.stats is not None:
            return file_reading(seen.stats, LUSTRE_COLUMNS, lustre_values)

        def read() -> Sequence[Value]:
            lustre_stats(self.root, seen.mount)
            raise Unavailable("the client's statistics have just appeared")

        origin = "/sys/kernel/debug/lustre/llite/*/stats"
        return Reading(columns=LUSTRE_COLUMNS, origin=origin, read=read)


def _refuse(columns: Sequence[str], mount: MountEntry, reason: str) -> Reading:
    why = Unavailable(reason, status="unsupported")
    return refused_reading(columns, f"{mount.type} client", why)
