"""The control groups of a process: per controller, with version 1, 2 or both mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from haiprof.linux.procfs import unescape
from haiprof.linux.readings import Unavailable

V2 = ""  # in place of a controller's name: the unified tree of version 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """One cgroup in one tree."""

    version: int
    mount: Path
    """The tree's top, as far as this process may see it."""
    path: PurePosixPath
    """The cgroup below the mount; `/` is its top."""

    @property
    def folder(self) -> Path:
        """Where the cgroup's files are."""
        return self.mount / self.path.relative_to("/")

    def above(self) -> list[Cgroup]:
        """The visible ancestors, nearest first."""
        return [
            Cgroup(version=self.version, mount=self.mount, path=path) for path in self.path.parents
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mount:
    point: str
    root: str
    """Which cgroup of the tree is seen at the mount point."""
    controllers: tuple[str, ...] | None
    """Of version 1; None for version 2."""


class CgroupTree:
    """The cgroups of one process.

    Source: cgroups(7), proc_pid_mountinfo(5), Linux Documentation/admin-guide/cgroup-v2.rst.
    """

    def __init__(self, memberships: str, mountinfo: str, root: Path) -> None:
        self._paths = dict(_memberships(memberships))
        self._mounts = [mount for mount in map(_mount, mountinfo.splitlines()) if mount]
        self._root = root

    def cgroup(self, controller: str) -> Cgroup:
        """The cgroup of a controller: in its own tree (version 1), or in that of version 2."""
        version = 1 if controller in self._paths and controller != V2 else 2
        path = self._paths.get(controller if version == 1 else V2)
        name = f"cgroup controller {controller}" if controller else "cgroup version 2"
        if path is None:
            raise Unavailable(f"/proc/self/cgroup: no {name}")
        mounts = [mount for mount in self._mounts if self._holds(mount, controller, version)]
        if not mounts:
            raise Unavailable(f"/proc/self/mountinfo: {name} is not mounted")
        for mount in sorted(mounts, key=lambda mount: len(mount.root)):  # most ancestors first
            below = _below(path, mount.root)
            if below is not None:
                top = self._root / mount.point.lstrip("/")
                cgroup = Cgroup(version=version, mount=top, path=PurePosixPath(below))
                if os.path.isdir(cgroup.folder):  # a name too long is none
                    return cgroup
        raise Unavailable(f"{name}: {path} is not visible below {mounts[0].point}")

    @staticmethod
    def _holds(mount: _Mount, controller: str, version: int) -> bool:
        if mount.controllers is None:
            return version == 2
        return version == 1 and controller in mount.controllers


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    """Paths by controller; version 2 has the empty name."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            yield controller, path


def _mount(line: str) -> _Mount | None:
    """One line of mountinfo, if it is a cgroup's."""
    left, _, right = line.partition(" - ")
    before, after = left.split(" "), right.split(" ")
    if len(before) < 6 or len(after) < 3 or after[0] not in ("cgroup", "cgroup2"):
        return None
    controllers = tuple(after[2].split(",")) if after[0] == "cgroup" else None
    return _Mount(point=unescape(before[4]), root=unescape(before[3]), controllers=controllers)


def _below(path: str, root: str) -> str | None:
    """The path as seen from a mount's root; None where it does not lie below."""
    if root != "/":
        if path != root and not path.startswith(f"{root}/"):
            return None
        path = path[len(root) :] or "/"
    return None if ".." in path.split("/") or not path.startswith("/") else path
