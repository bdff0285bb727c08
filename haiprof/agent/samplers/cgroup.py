"""The control group of the launcher and of its job: throttling, limits, memory, pressure."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePosixPath

from haiprof.agent.samplers.table import Node, TableSampler
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


class CgroupSampler(TableSampler):
    """One record of the launcher's cgroup, and one of each visible ancestor with a limit.

    A cgroup counts the throttling by its own quota: that of an ancestor's quota is in the
    ancestor's record. A launcher that is moved, or whose cgroup is recreated, gets another key, so
    that no difference spans both.
    """

    name = "cgroup"
    recorder = "host"
    table = CGROUP

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._memberships = ProcFile(self.root / "proc/self/cgroup")
        self._mountinfo = self.root / "proc/self/mountinfo"
        self._key = -1
        self._seen: object = None
        self._cgroups: Places = {}
        self._folders: set[str] = set()
        self._unlimited: dict[str, tuple[Places, list[Limit]]] = {}

    def find(self) -> Sequence[Entity]:
        """The launcher's cgroup and the limited ones above it."""
        self._locate()
        found = [self._cgroups[name] for name in _LIMITS]
        if all(isinstance(cgroup, Unavailable) for cgroup in found):
            raise next(cgroup for cgroup in found if isinstance(cgroup, Unavailable))
        return [self._own(), *self._new_limited_ancestors()]

    def refresh(self) -> None:
        """Detects another cgroup, and an ancestor with a new limit."""
        if self._identity() == self._seen:
            for entity in self._new_limited_ancestors():
                self.add(entity)
            return
        for entity in self.entities:
            self.drop(entity.key)
        self._locate()
        for entity in (self._own(), *self._new_limited_ancestors()):
            self.add(entity)

    def release(self) -> None:
        """Closes open files other than those of entities."""
        self._memberships.close()
        self._close_limits()

    # -- where --------------------------------------------------------------------------------

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
            for limit in limits:
                limit.close()
        self._unlimited = {}

    # -- entities -----------------------------------------------------------------------------

    def _own(self) -> Entity:
        return self._entity(OWN, self._cgroups)

    def _new_limited_ancestors(self) -> list[Entity]:
        """The ancestors that have a limit and are not sampled yet."""
        found = [
            path
            for path, (_, limits) in self._unlimited.items()
            if any(_is_set(limit) for limit in limits)
        ]
        entities = []
        for path in found:
            cgroups, limits = self._unlimited.pop(path)
            for limit in limits:
                limit.close()
            entities.append(self._entity(PurePosixPath(path).name or path, cgroups))
        return entities

    def _entity(self, name: str, cgroups: Places) -> Entity:
        self._key += 1
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
            key=(self._key,),
            name=name,
            readings=cgroup_readings(known),
            details={"folders": folders},
        )


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
