"""Limits of control groups: the tightest of a cgroup and of its visible ancestors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from haiprof.linux.cgroup_tree import Cgroup
from haiprof.linux.procfs import PAGE_BYTES, ProcFile
from haiprof.linux.readings import Unavailable

# What version 1 writes for "unlimited": LONG_MAX rounded down to whole pages.
V1_UNLIMITED_BYTES = ((1 << 63) - 1) // PAGE_BYTES * PAGE_BYTES


class OwnLimit:
    """One limit that is set on one cgroup.

    Args:
        cgroup: The cgroup.
        files: The files that hold the limit.
        parse: From their contents to the limit; None where there is none.
    """

    def __init__(
        self, cgroup: Cgroup, files: Sequence[str], parse: Callable[[Sequence[bytes]], float | None]
    ) -> None:
        self._files = [ProcFile(cgroup.folder / name) for name in files]
        self._parse = parse

    def read(self) -> float | None:
        """The limit; None without one, or without its files.

        The top of a tree has no such files, nor has a cgroup that the controller is not enabled
        for.

        Raises:
            OSError: It is there and cannot be read.
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
    """The cgroup's own CPU quota in cores.

    Source: Linux Documentation/scheduler/sched-bwc.rst, admin-guide/cgroup-v2.rst (cpu.max).
    """
    if cgroup.version == 1:
        return OwnLimit(cgroup, ("cpu.cfs_quota_us", "cpu.cfs_period_us"), _cores)
    return OwnLimit(cgroup, ("cpu.max",), lambda contents: _cores(contents[0].split()))


def memory_limit(cgroup: Cgroup) -> OwnLimit:
    """The cgroup's own memory limit in bytes."""
    name = "memory.limit_in_bytes" if cgroup.version == 1 else "memory.max"
    return OwnLimit(cgroup, (name,), lambda contents: _bytes(contents[0].strip()))


def _cores(words: Sequence[bytes]) -> float | None:
    quota_us, period_us = words
    if quota_us == b"max" or int(quota_us) < 0:
        return None
    if int(period_us) <= 0:
        raise ValueError("a period of no time")
    return int(quota_us) / int(period_us)


def _bytes(word: bytes) -> int | None:
    return None if word == b"max" or int(word) >= V1_UNLIMITED_BYTES else int(word)


class TightestLimit:
    """The least limit of a cgroup and its visible ancestors.

    Args:
        cgroup: The cgroup.
        limit: Which of its limits.
        name: Its name in reasons, such as `CPU quota`.
    """

    def __init__(self, cgroup: Cgroup, limit: Callable[[Cgroup], OwnLimit], name: str) -> None:
        self._limits = [limit(each) for each in (cgroup, *cgroup.above())]
        self._reason = f"no {name} is set in {cgroup.folder}, nor visible above it"

    def read(self) -> Sequence[float]:
        """The limit.

        Raises:
            Unavailable: There is none.
            OSError: One of them cannot be read.
        """
        found = [value for limit in self._limits if (value := limit.read()) is not None]
        if not found:
            raise Unavailable(self._reason)
        return (min(found),)

    def close(self) -> None:
        """Closes all their files."""
        for limit in self._limits:
            limit.close()
