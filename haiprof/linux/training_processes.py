"""Training processes of this user: those that have loaded torch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.process_tree import ProcessTree
from haiprof.linux.procfs import command_line, environment, is_mine, read_parent, read_start_ticks

HELPERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.spawn",
    "multiprocessing.forkserver",
    "torch._inductor",
    "_inductor/compile_worker",
)
LAUNCHERS = frozenset((
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed",
    "accelerate.commands.launch",
))  # fmt: skip
_LAUNCHER_WORDS = 6  # python -u -X opt -m NAME
_MAPS_LIMIT_BYTES = 1 << 24
_PYTHON = re.compile(rb"(?:libpython|/python)3\.(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that has torch loaded."""

    pid: int
    parent: int
    start_ticks: int
    command: tuple[str, ...]
    environ: Mapping[str, str]
    python: int | None
    """Minor version of its Python 3; None where its name does not tell."""

    @property
    def rank(self) -> int | None:
        """The rank that its launcher set in the environment."""
        return _number(self.environ.get("RANK") or self.environ.get("SLURM_PROCID"))

    @property
    def world_size(self) -> int | None:
        """As its launcher set it in the environment."""
        return _number(self.environ.get("WORLD_SIZE") or self.environ.get("SLURM_NTASKS"))


def ranks_among(pids: Iterable[int], *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks among some processes, by rank.

    A rank is a process that has libtorch mapped, except launchers of labelled ranks, children of a
    rank (DataLoader workers) and Python's own helper processes.
    """
    found = {pid: process for pid in pids if (process := _process(pid, proc)) is not None}
    if any(process.rank is not None for process in found.values()):
        found = {pid: process for pid, process in found.items() if process.rank is not None}
    ranks = [p for p in found.values() if p.parent not in found or found[p.parent].rank != p.rank]
    return sorted(ranks, key=lambda p: (p.rank is None, p.rank or 0, p.pid))


def ranks_below(pid: int, *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks at or below a process, by rank."""
    tree = ProcessTree(proc.parent)
    tree.refresh()
    found, seen = [pid], {pid}
    for each in found:
        new = [child for child in tree.children.get(each, ()) if child not in seen]
        found += new
        seen.update(new)
    return ranks_among(found, proc=proc)


def is_launcher(command: Iterable[str]) -> bool:
    """Whether a command line is that of a launcher of ranks, such as torchrun."""
    words = list(command)[:_LAUNCHER_WORDS]
    return any(os.path.basename(word) in LAUNCHERS for word in words)


def _process(pid: int, proc: Path) -> Process | None:
    """None for helpers, for processes without torch, and for those that have ended."""
    command = command_line(pid, proc=proc)
    if not is_mine(pid, proc=proc) or any(h in word for word in command for h in HELPERS):
        return None
    if is_launcher(command):
        return None  # its ranks may not have loaded torch yet
    try:
        with (proc / str(pid) / "maps").open("rb") as file:
            maps = file.read(_MAPS_LIMIT_BYTES)
    except OSError:
        return None
    parent, ticks = read_parent(proc.parent, pid), read_start_ticks(proc.parent, pid)
    if b"libtorch" not in maps or parent is None or ticks is None:
        return None
    version = _PYTHON.search(maps)
    return Process(
        pid=pid,
        parent=parent,
        start_ticks=ticks,
        command=tuple(command),
        environ=environment(pid, proc=proc),
        python=int(version[1]) if version else None,
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None
