"""Limits of control groups: the tightest of a cgroup and of its visible ancestors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from haiprof.base.control_group_limits import parse_cpu_limit, parse_memory_limit
from haiprof.linux.cgroup_tree import Cgroup
from haiprof.linux.procfs import ProcFile
from haiprof.linux.readings import Unavailable


class OwnLimit:
    """One limit that is set on one cgroup."""

    def __init__(
        self, cgroup: Cgroup, files: Sequence[str], parse: Callable[[Sequence[bytes]], float | None]
    ) -> None:
        self._files = [ProcFile(cgroup.folder / name) for name in files]
        self._parse = parse

    def read(self) -> float | None:
        """The limit; None without one, or without its files.

        The top of a tree has no such files, nor has a cgroup that the controller is not enabled
        for.
        """
        try:
            return self._parse([file.read() for file in self._files])
        except FileNotFoundError:
            return None

    def close(self) -> None:
        """Closes its files."""
        for file in self._files:
            file.close()


def cpu_limit(cgroup: Cgroup) -> OwnLimit:
    """The cgroup's own CPU quota in cores."""
    if cgroup.version == 1:
        files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        return OwnLimit(cgroup, files, parse_cpu_limit)
    return OwnLimit(cgroup, ("cpu.max",), lambda contents: parse_cpu_limit(contents[0].split()))


def memory_limit(cgroup: Cgroup) -> OwnLimit:
    """The cgroup's own memory limit in bytes."""
    name = "memory.limit_in_bytes" if cgroup.version == 1 else "memory.max"
    return OwnLimit(cgroup, (name,), lambda contents: parse_memory_limit(contents[0].strip()))


class TightestLimit:
    """The least limit of a cgroup and its visible ancestors."""

    def __init__(self, cgroup: Cgroup, limit: Callable[[Cgroup], OwnLimit], name: str) -> None:
        self._limits = [limit(each) for each in (cgroup, *cgroup.above())]
        self._reason = f"no {name} is set in {cgroup.folder}, nor visible above it"

    def read(self) -> Sequence[float]:
        """The limit."""
        found = [value for limit in self._limits if (value := limit.read()) is not None]
        if not found:
            raise Unavailable(self._reason)
        return (min(found),)

    def close(self) -> None:
        """Closes all their files."""
        for limit in self._limits:
            limit.close()
