"""The control group of the launcher and of its job: throttling, limits, memory, pressure."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from haiprof.rundir.tables.cgroup import CGROUP
from haiprof.samplers.base import Clock, Node, Unavailable
from haiprof.samplers.cgroup_files import Places, cgroup_readings
from haiprof.samplers.cgroup_limits import OwnLimit, cpu_limit, memory_limit
from haiprof.samplers.cgroup_tree import V2, CgroupTree, Place
from haiprof.samplers.procfs import KeptFile
from haiprof.samplers.table import Entity, TableSampler

OWN = "own"  # the launcher's cgroup; those above it have the last part of their path as name
_CONTROLLERS = ("cpu", "cpuacct", "memory", V2)
_LIMITS = {"cpu": cpu_limit, "memory": memory_limit}


class CgroupSampler(TableSampler):
    """One record of the launcher's cgroup, and one of each visible ancestor with a limit.

    A cgroup counts what its own quota held back: where an ancestor has one, the throttling is in
    the ancestor's record. A launcher that is moved, or whose cgroup is made anew, goes on under
    another key, so that nothing is subtracted across.

    Args:
        root: Where /proc and /sys are.
        clock: CLOCK_MONOTONIC in ns.
    """

    name = "cgroup"
    recorder = "host"
    table = CGROUP

    def __init__(self, *, root: Path = Path("/"), clock: Clock = time.perf_counter_ns) -> None:
        super().__init__(clock=clock)
        self._root = root
        self._memberships = KeptFile(root / "proc/self/cgroup")
        self._mountinfo = root / "proc/self/mountinfo"
        self._key = -1
        self._seen: object = None
        self._places: Places = {}
        self._folders: set[str] = set()
        self._unlimited: dict[str, tuple[Places, list[OwnLimit]]] = {}

    @classmethod
    def for_node(cls, node: Node) -> CgroupSampler:
        """The sampler of a node."""
        return cls(root=node.root, clock=node.clock)

    def find(self) -> Sequence[Entity]:
        """The launcher's cgroup and the limited ones above it.

        Raises:
            Unavailable: None of its controllers is visible.
        """
        self._locate()
        found = [self._places[name] for name in _LIMITS]
        if all(isinstance(place, Unavailable) for place in found):
            raise next(place for place in found if isinstance(place, Unavailable))
        return [self._own(), *self._limited()]

    def refresh(self) -> None:
        """Notices another cgroup, and an ancestor that has just got a limit."""
        if self._identity() == self._seen:
            for entity in self._limited():
                self.add(entity)
            return
        for entity in self.entities:
            self.drop(entity.key)
        self._locate()
        for entity in (self._own(), *self._limited()):
            self.add(entity)

    def release(self) -> None:
        """Closes what is open beside the entities."""
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
            self._places = dict.fromkeys(_CONTROLLERS, why)
        else:
            tree = CgroupTree(memberships, mountinfo, self._root)
            self._places = {name: _place(tree, name) for name in _CONTROLLERS}
        known = (place for place in self._places.values() if isinstance(place, Place))
        self._folders |= {str(place.folder) for place in known}  # one that is gone may return
        self._seen = self._identity()
        self._close_limits()
        self._unlimited = {
            path: (places, [_LIMITS[name](places[name]) for name in _LIMITS if name in places])
            for path, places in _above(self._places).items()
        }

    def _identity(self) -> object:
        """Changes with the cgroup: its path, or the folder behind that path."""
        try:
            memberships = self._memberships.read()
        except OSError:
            memberships = b""
        return (memberships, *map(_inode, self._folders))

    def _close_limits(self) -> None:
        for _, limits in self._unlimited.values():
            for limit in limits:
                limit.close()
        self._unlimited = {}

    # -- entities -----------------------------------------------------------------------------

    def _own(self) -> Entity:
        return self._entity(OWN, self._places)

    def _limited(self) -> list[Entity]:
        """The ancestors that have a limit and are not sampled yet."""
        found = [
            path
            for path, (_, limits) in self._unlimited.items()
            if any(_is_set(limit) for limit in limits)
        ]
        entities = []
        for path in found:
            places, limits = self._unlimited.pop(path)
            for limit in limits:
                limit.close()
            entities.append(self._entity(PurePosixPath(path).name or path, places))
        return entities

    def _entity(self, name: str, places: Places) -> Entity:
        self._key += 1
        known = {controller: _of(places, controller) for controller in _CONTROLLERS}
        folders = {
            controller or "unified": str(place.folder)
            for controller, place in known.items()
            if isinstance(place, Place)
        }
        return Entity(
            key=(self._key,),
            name=name,
            readings=cgroup_readings(known),
            details={"folders": folders},
        )


def _place(tree: CgroupTree, controller: str) -> Place | Unavailable:
    try:
        return tree.place(controller)
    except Unavailable as why:
        return why


def _of(places: Places, controller: str) -> Place | Unavailable:
    missing = Unavailable(f"the {controller or 'unified'} tree has no cgroup of that path")
    return places.get(controller, missing)


def _above(places: Places) -> dict[str, dict[str, Place]]:
    """The visible ancestors by path, nearest first, each with the controllers that have it."""
    paths: dict[str, dict[str, Place]] = {}
    for controller, place in places.items():
        for above in place.above() if isinstance(place, Place) else ():
            paths.setdefault(str(above.path), {})[controller] = above
    return paths


def _is_set(limit: OwnLimit) -> bool:
    try:
        return limit.read() is not None
    except (OSError, ValueError):
        return True  # it cannot be read: its record says so


def _inode(folder: str) -> int | None:
    try:
        return os.stat(folder).st_ino
    except OSError:
        return None
