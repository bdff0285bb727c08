"""Limits of this process's control group and of those above it, as far as they can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")
_V1_UNLIMITED_BYTES = 1 << 62
"""Version 1 writes LONG_MAX in whole pages for no limit."""


def cpu_limit_cores(*, proc: Path = _PROC, mount: Path = _MOUNT) -> float | None:
    """The tightest CPU quota in cores; None without one.

    Source: Linux Documentation/scheduler/sched-bwc.rst, admin-guide/cgroup-v2.rst (cpu.max).
    """
    return min(_limits(_cores, "cpu", proc=proc, mount=mount), default=None)


def memory_limit_bytes(*, proc: Path = _PROC, mount: Path = _MOUNT) -> int | None:
    """The tightest memory limit; None without one."""
    found = min(_limits(_bytes, "memory", proc=proc, mount=mount), default=None)
    return None if found is None else int(found)


def _limits(
    read: Callable[[Path], float | None], controller: str, *, proc: Path, mount: Path
) -> Iterator[float]:
    """Limits of the control group and of all above it.

    Inside a container the path is the host's where the namespace is shared, and not below the
    mount: then the mount itself is the container's.
    """
    for folder in _folders(controller, proc=proc, mount=mount):
        try:
            limit = read(folder)
        except (OSError, ValueError):
            continue  # the top of a tree has no such file
        if limit is not None:
            yield limit


def _folders(controller: str, *, proc: Path, mount: Path) -> Iterator[Path]:
    for line in proc.read_text(encoding="utf-8", errors="replace").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            top = mount
        elif controller in controllers.split(","):
            top = mount / controllers
            top = top if top.is_dir() else mount / controller
        else:
            continue
        own = PurePosixPath("/", path)
        for folder in (own, *own.parents):
            yield top / folder.relative_to("/")


def _cores(folder: Path) -> float | None:
    if (folder / "cpu.max").exists():
        quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
    else:
        quota = (folder / "cpu.cfs_quota_us").read_text(encoding="ascii")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="ascii")
    if quota.strip() == "max" or int(quota) <= 0 or int(period) <= 0:
        return None
    return int(quota) / int(period)


def _bytes(folder: Path) -> float | None:
    name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
    word = (folder / name).read_text(encoding="ascii").strip()
    return None if word == "max" or int(word) >= _V1_UNLIMITED_BYTES else float(word)
