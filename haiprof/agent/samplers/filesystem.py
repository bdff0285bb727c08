"""Network file systems: NFS and Lustre traffic of each mount, as this node's client counts it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.agent.samplers.table import ALL_METRICS, Node, TableSampler
from haiprof.base.units import NS_PER_S
from haiprof.linux.mounts import (
    LUSTRE,
    LUSTRE_COLUMNS,
    NFS_COLUMNS,
    NFS_TYPES,
    UNCOUNTED,
    NfsCounts,
    lustre_stats,
    lustre_values,
    network_mounts,
    nfs_counts,
)
from haiprof.linux.procfs import MountEntry, ProcFile, file_reading
from haiprof.linux.readings import Entity, Reading, Unavailable, Value, refused_reading
from haiprof.run_format.tables import FILESYSTEM

_NONE = "no network file system is mounted (one that is mounted later will be seen)"
# The client's age of a mount is in whole seconds.
_AGE_TOLERANCE_NS = 2 * NS_PER_S
# A source without counters at its opening is not read again.
_LOOKS_TO_OPEN = 2
ALL_COLUMNS = tuple(column.name for column in FILESYSTEM.metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundMount:
    """A mount when it was found."""

    mount: MountEntry
    stats: Path | None
    """Of Lustre: the client's file, whose name is new with each mount."""
    born_ns: int | None
    """Of NFS: when it was mounted, on the sampler's clock."""


class FilesystemSampler(TableSampler):
    """One record per mounted network file system.

    Mounts come and go (automounts): a later one is added, and one that was mounted again is another
    one, with a new `mount_index` under the same name.
    """

    name = "filesystem"
    recorder = "filesystem"
    table = FILESYSTEM
    every = 10

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._mountinfo = ProcFile(self.root / "proc/self/mountinfo")
        self._mountstats = ProcFile(self.root / "proc/self/mountstats")
        self._sampled: dict[int, _FoundMount] = {}
        self._next_index = 0
        self._looks = 0
        self._nfs: Mapping[str, NfsCounts] | OSError = {}

    def find(self) -> Iterable[Entity]:
        """The network file systems that are mounted."""
        try:
            return self._new_entities(self._look())
        except OSError as error:
            raise Unavailable(f"{self._mountinfo.path}: {error.strerror}") from None

    def refresh(self) -> None:
        """Reads the list of mounts and the counters of NFS, and follows what has changed."""
        try:
            present = self._look()
        except OSError as error:
            why = Unavailable(f"{self._mountinfo.path}: {error.strerror}")
            self.missing.note(ALL_METRICS, why)
            present = []
        for index in [i for i, known in self._sampled.items() if not _among(known, present)]:
            del self._sampled[index]
            self.drop((index,))
        for entity in self._new_entities(present):
            self.add(entity)
        if not self._sampled and self._looks > _LOOKS_TO_OPEN:
            self.missing.note(ALL_METRICS, Unavailable(_NONE))

    def release(self) -> None:
        """Closes the two files."""
        self._mountinfo.close()
        self._mountstats.close()

    def _look(self) -> list[_FoundMount]:
        """The mounts that there are now."""
        self._looks += 1
        mounts = network_mounts(self._mountinfo.read().decode(errors="replace"))
        self._nfs = {}
        if any(mount.type in NFS_TYPES for mount in mounts):
            try:
                self._nfs = nfs_counts(self._mountstats.read().decode(errors="replace"))
            except OSError as error:
                self._nfs = error
        return [self._find_mount(mount) for mount in mounts]

    def _find_mount(self, mount: MountEntry) -> _FoundMount:
        stats, born_ns = None, None
        if mount.type == LUSTRE:
            with contextlib.suppress(Unavailable):  # its reading says so
                stats = lustre_stats(self.root, mount)
        elif isinstance(self._nfs, dict) and mount.point in self._nfs:
            born_ns = self._clock() - self._nfs[mount.point].age_s * NS_PER_S
        return _FoundMount(mount=mount, stats=stats, born_ns=born_ns)

    def _new_entities(self, present: Iterable[_FoundMount]) -> list[Entity]:
        new = [seen for seen in present if not _among(seen, self._sampled.values())]
        return [self._take_up(seen) for seen in new]

    def _take_up(self, seen: _FoundMount) -> Entity:
        index, self._next_index = self._next_index, self._next_index + 1
        self._sampled[index] = seen
        mount = seen.mount
        columns: Sequence[str]
        if mount.type in NFS_TYPES:
            columns, reading = NFS_COLUMNS, self._nfs_reading(mount)
        elif mount.type == LUSTRE:
            columns, reading = LUSTRE_COLUMNS, self._lustre_reading(seen)
        else:
            columns, reading = ALL_COLUMNS, _refuse(ALL_COLUMNS, mount, UNCOUNTED[mount.type])
        rest = tuple(name for name in ALL_COLUMNS if name not in columns)
        readings = [reading]
        if rest:
            readings.append(_refuse(rest, mount, f"a {mount.type} client does not count it"))
        details = {"fstype": mount.type, "device": mount.source}
        return Entity(key=(index,), name=mount.point, readings=tuple(readings), details=details)

    def _nfs_reading(self, mount: MountEntry) -> Reading:
        def read() -> Sequence[Value]:
            if isinstance(self._nfs, OSError):
                raise self._nfs
            counts = self._nfs.get(mount.point)
            if counts is None:
                raise Unavailable(f"{self._mountstats.path} does not list {mount.point}")
            return [counts.values[name] for name in NFS_COLUMNS]

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


def _among(seen: _FoundMount, others: Iterable[_FoundMount]) -> bool:
    """Whether it is one of those, and not mounted again since."""
    return any(
        seen.mount == other.mount
        and seen.stats == other.stats
        and (seen.born_ns is None) == (other.born_ns is None)
        and abs((seen.born_ns or 0) - (other.born_ns or 0)) <= _AGE_TOLERANCE_NS
        for other in others
    )


def _refuse(columns: Sequence[str], mount: MountEntry, reason: str) -> Reading:
    why = Unavailable(reason, status="unsupported")
    return refused_reading(columns, f"{mount.type} client", why)
