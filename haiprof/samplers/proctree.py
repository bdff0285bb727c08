"""Who is whose child: the process tree from /proc, kept up to date at the price of a listing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from haiprof.samplers.procfs import read_parent

_FORGET_AFTER = 30  # refreshes after which every parent is read anew, in case a pid was reused


class ProcessTree:
    """The parent of every process.

    A process's parent changes only when that parent ends, so it is read once per pid; a refresh
    costs a listing of /proc. (`/proc/PID/task/TID/children` is per thread: for ranks with hundreds
    of threads that is more files than there are processes, and many kernels are built without it.)

    Args:
        root: Where /proc is.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._refresh_count = 0

    @property
    def children(self) -> Mapping[int, list[int]]:
        """The children of each process that has some."""
        return self._children

    def refresh(self) -> None:
        """Sees which processes came and went; an unreadable /proc is no processes."""
        if self._refresh_count % _FORGET_AFTER == 0:
            self._parents = {}
        self._refresh_count += 1
        alive = _pids(self._root / "proc")
        new = alive - self._parents.keys()
        if not new and len(alive) == len(self._parents):
            return
        self._parents = {pid: self._parents[pid] for pid in alive - new}
        for pid in new:
            parent = read_parent(self._root, pid)
            if parent is not None:
                self._parents[pid] = parent
        self._children = {}
        for pid, parent in self._parents.items():
            self._children.setdefault(parent, []).append(pid)


def _pids(proc: Path) -> set[int]:
    try:
        return {int(name) for name in os.listdir(proc) if name.isdigit()}
    except OSError:
        return set()
