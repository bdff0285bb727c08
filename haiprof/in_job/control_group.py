"""Limits of this process's control group and of those above it, as far as they can be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from haiprof.base.control_group_limits import parse_cpu_limit, parse_memory_limit

_PROC = Path("/proc/self/cgroup")
_MOUNT = Path("/sys/fs/cgroup")


def cpu_limit_cores(*, proc: Path = _PROC, mount: Path = _MOUNT) -> float | None:
    """The tightest CPU quota in cores; None without one."""
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
        return parse_cpu_limit((folder / "cpu.max").read_bytes().split())
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    return parse_cpu_limit([(folder / name).read_bytes() for name in names])


def _bytes(folder: Path) -> float | None:
    name = "memory.max" if (folder / "memory.max").exists() else "memory.limit_in_bytes"
    return parse_memory_limit((folder / name).read_bytes().strip())
