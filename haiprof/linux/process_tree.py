"""The process tree from /proc, updated at the cost of one listing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from haiprof.linux.procfs import process_ids, read_parent

_FORGET_AFTER = 30  # refreshes after which every parent is read anew, in case a pid was reused


class ProcessTree:
    """The parent of every process.

    A process's parent changes only when that parent ends, so it is read once per pid; a refresh
    costs a listing of /proc. (`/proc/PID/task/TID/children` is per thread: for ranks with hundreds
    of threads that is more files than there are processes, and many kernels are built without it.)
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
        """Reads which processes came and went; an unreadable /proc has none."""
        if self._refresh_count % _FORGET_AFTER == 0:
            self._parents = {}
        self._refresh_count += 1
        alive = set(process_ids(self._root / "proc"))
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
