"""The control group of the launcher and of its job: throttling, limits, memory, pressure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from haiprof.agent.samplers.table import ChangingSampler, Node
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
from haiprof.linux.procfs import ProcFile, inode
from haiprof.linux.readings import Entity, Unavailable
from haiprof.run_format.tables import CGROUP

OWN = "own"  # the launcher's cgroup; those above it have the last part of their path as name
_CONTROLLERS = ("cpu", "cpuacct", "memory", V2)
_LIMITS = {"cpu": CPU_QUOTA, "memory": MEMORY_LIMIT}


class CgroupSampler(ChangingSampler):
    """One record of the launcher's cgroup, and one of each visible ancestor with a limit.

    A cgroup counts the throttling by its own quota: that of an ancestor's quota is in the
    ancestor's record. A launcher that is moved, or whose cgroup is recreated, gets another key.
    """

    name = "cgroup"
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
        if self._identity() != self._seen:
            self._locate()
        for path, (cgroups, limits) in list(self._unlimited.items()):
            if any(map(_is_set, limits)):
                self._limited[path] = cgroups
                _close(self._unlimited.pop(path)[1])
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
        known = {
            name: cgroups.get(name)
            or Unavailable(f"the {name or 'unified'} tree has no cgroup of that path")
            for name in _CONTROLLERS
        }
        folders = {
            controller or "unified": str(cgroup.folder)
            for controller, cgroup in known.items()
            if isinstance(cgroup, Cgroup)
        }
        return Entity(
            key=(number,), name=name, readings=cgroup_readings(known), details={"folders": folders}
        )

    def _locate(self) -> None:
        """Finds the cgroup of each controller, and those above."""
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
        """Identifies the cgroup: its path, and the folder behind it."""
        try:
            memberships = self._memberships.read()
        except OSError:
            memberships = b""
        return (memberships, *map(inode, self._folders))

    def _close_limits(self) -> None:
        for _, limits in self._unlimited.values():
            _close(limits)
        self._unlimited = {}


def _close(limits: Iterable[Limit]) -> None:
    for limit in limits:
        limit.close()


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
