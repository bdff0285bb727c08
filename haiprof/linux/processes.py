"""Processes from outside: the tree, a rank with its descendants, who trains, how one ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux import procfs
from haiprof.linux.process_files import stat_fields
from haiprof.linux.readings import Unavailable

# linux/pidfd.h: PIDFD_GET_INFO, and its struct of version 0 with the exit code at its end.
_INFO_BYTES = 64
_GET_INFO = 3 << 30 | _INFO_BYTES << 16 | 0xFF << 8 | 11
_ASK_EXIT = 1 << 3  # PIDFD_INFO_EXIT, from Linux 6.15 on: after the parent has taken the status
_EXIT_CODE = struct.Struct("<60xi")
_ROOT = Path("/")
_STATE, _ZOMBIE_CODE = 0, 49  # fields of /proc/PID/stat from the third on


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessExit:
    """How a process ended."""

    status: int | None  # exit status; None where a signal ended it, or nobody saw it
    signal: int | None
    core: bool  # whether the kernel wrote a core file, or handed it on
    source: str  # `kernel`, `zombie`, or `gone` where its parent had taken the status before


class WatchedProcess:
    """One process, told from others that get its number later."""

    def __init__(self, pid: int) -> None:
        self.pid, self.fd = pid, os.pidfd_open(pid)
        self.start_ticks = procfs.read_start_ticks(_ROOT, pid)
        self.parent = procfs.read_parent(_ROOT, pid)

    def read_exit(self) -> ProcessExit:
        """How it ended, once its descriptor is readable."""
        # The kernel tells it by the descriptor once the parent has asked, and by /proc until then.
        asked = (("kernel", self._from_kernel), ("zombie", self._from_zombie),
                 ("kernel", self._from_kernel))  # fmt: skip
        for source, ask in asked:
            if (code := ask()) is not None:
                # From a wait status, as waitpid(2) has it.
                number = code & 0x7F
                status, core = None if number else code >> 8 & 0xFF, bool(number and code & 0x80)
                return ProcessExit(status=status, signal=number or None, core=core, source=source)
        return ProcessExit(status=None, signal=None, core=False, source="gone")

    def close(self) -> None:
        """Gives the descriptor back."""
        os.close(self.fd)

    def _from_kernel(self) -> int | None:
        """The wait status; None before Linux 6.15."""
        buffer = bytearray(_INFO_BYTES)
        struct.pack_into("<Q", buffer, 0, _ASK_EXIT)
        with contextlib.suppress(OSError):
            fcntl.ioctl(self.fd, _GET_INFO, buffer)
            if struct.unpack_from("<Q", buffer)[0] & _ASK_EXIT:
                return int(_EXIT_CODE.unpack(buffer)[0])
        return None

    def _from_zombie(self) -> int | None:
        """The wait status, as long as its parent has not asked for it."""
        if os.geteuid() not in (0, procfs.user_id(self.pid)):
            return None  # the kernel shows that of others as 0
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat_fields(f"/proc/{self.pid}")
            if fields[_STATE] in b"ZX" and int(fields[19]) == self.start_ticks:
                return int(fields[_ZOMBIE_CODE])
        return None


_FORGET_AFTER = 30  # refreshes after which every parent is read anew, in case a pid was reused


class ProcessTree:
    """The parent of every process."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {}
        self._refresh_count = 0

    @property
    def children(self) -> Mapping[int, list[int]]:
        """The children of each process that has some."""
        return self._children

    def below(self, pid: int) -> list[int]:
        """A process and its descendants, parents first."""
        found, seen = [pid], {pid}
        for each in found:
            new = [child for child in self._children.get(each, ()) if child not in seen]
            found += new
            seen.update(new)
        return found

    def refresh(self) -> ProcessTree:
        """Itself, once it has read which processes came and went; an unreadable /proc has none."""
        # A process's parent changes only when that parent ends, so it is read once per pid; a
        # refresh costs a listing of /proc. (`/proc/PID/task/TID/children` is per thread: for ranks
        # with hundreds of threads that is more files than there are processes, and many kernels are
        # built without it.)
        if self._refresh_count % _FORGET_AFTER == 0:
            self._parents = {}
        self._refresh_count += 1
        alive = set(procfs.process_ids(self._root / "proc"))
        new = alive - self._parents.keys()
        if not new and len(alive) == len(self._parents):
            return self
        self._parents = {pid: self._parents[pid] for pid in alive - new}
        for pid in new:
            if (parent := procfs.read_parent(self._root, pid)) is not None:
                self._parents[pid] = parent
        self._children = {}
        for pid, parent in self._parents.items():
            self._children.setdefault(parent, []).append(pid)
        return self


_Counters = tuple[int, ...]  # CPU time, minor faults, major faults, and the four of io
_ZERO: _Counters = (0,) * 7


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTotals:
    """A process and its descendants, summed."""

    process_count: int
    cpu_ns: int
    cpu_main_ns: int  # of the process alone
    cpu_main_system_ns: int  # of that, in the kernel
    rss_bytes: int
    minor_faults: int
    major_faults: int
    thread_count: int
    io_bytes: tuple[int, int, int, int] | None
    """rchar, wchar, read_bytes, write_bytes; None when those of the process cannot be read."""
    io_missing: Unavailable | None  # why there are none
    child_io_missing: Unavailable | None  # why those of some descendant are left out of the sum


class Family:
    """Follows one process and its descendants."""

    def __init__(self, pid: int, start_ticks: int) -> None:
        self.pid, self.start_ticks = pid, start_ticks
        self._members: dict[int, procfs.ProcessReading] = {}  # parents before children
        self._pending: dict[int, procfs.ProcessReading] = {}  # gone, and no wait for them seen yet
        self._carried: _Counters = _ZERO  # of those that were never waited for
        self._highest: _Counters = _ZERO

    def update(
        self, children: Mapping[int, list[int]],
        read: Callable[[int], procfs.ProcessReading | None], *, others: Container[int] = (),
    ) -> FamilyTotals | None:  # fmt: skip
        """Reads every member; the totals, or None when the process has ended."""
        main = read(self.pid)
        if main is None or main.start_ticks != self.start_ticks or not main.running:
            return None
        members, queue = {main.pid: main}, [main.pid]  # parents first
        for parent in queue:
            for pid in children.get(parent, ()):
                reading = None if pid in members or pid in others else read(pid)
                if reading is not None and reading.parent == parent:
                    members[pid] = reading
                    queue.append(pid)
        for pid, known in self._members.items():  # some may have lost their parent
            reading = None if pid in members or pid in others else read(pid)
            if reading is not None and _is_same(reading, known):
                members[pid] = reading
        self._settle(members)
        self._members = members
        values = [self._carried, *map(_counters, (*members.values(), *self._pending.values()))]
        totals = (sum(column) for column in zip(*values, strict=True))
        self._highest = tuple(map(max, totals, self._highest))
        cpu_ns, minor_faults, major_faults, *moved = self._highest
        running = [each for each in members.values() if each.running]
        unread = (each.io_missing for each in running if each is not main and each.io_missing)
        return FamilyTotals(
            process_count=len(running), cpu_ns=cpu_ns, cpu_main_ns=main.own_ticks * procfs.TICK_NS,
            cpu_main_system_ns=main.own_system_ticks * procfs.TICK_NS,
            rss_bytes=sum(each.rss_bytes for each in running), minor_faults=minor_faults,
            major_faults=major_faults, thread_count=sum(each.thread_count for each in running),
            io_bytes=main.io_bytes and (moved[0], moved[1], moved[2], moved[3]),
            io_missing=main.io_missing, child_io_missing=next(unread, None),
        )  # fmt: skip

    def _settle(self, members: Mapping[int, procfs.ProcessReading]) -> None:
        """Decides for members that are gone whether another one has inherited their counters."""
        gone = {pid: r for pid, r in self._members.items() if not _is_same(members.get(pid), r)}
        lost = {**self._pending, **gone}
        parents = {pid: r.parent for pid, r in lost.items()}
        waited = {pid: r.waited_faults for pid, r in members.items()}
        for pid, known in self._members.items():
            if _is_same(members.get(pid), known):
                waited[pid] -= known.waited_faults
        still_pending = {}
        # Largest first: the faults that one wait added must not be matched to two smaller children.
        for pid, reading in sorted(lost.items(), key=lambda item: -item[1].faults):
            heir = _find_heir(reading.parent, members, parents)
            if heir is not None and waited[heir] >= reading.faults:
                waited[heir] -= reading.faults
            elif heir is not None and pid in gone:
                still_pending[pid] = reading
            else:
                self._carried = tuple(map(sum, zip(self._carried, _counters(reading), strict=True)))
        self._pending = still_pending


def _is_same(reading: procfs.ProcessReading | None, known: procfs.ProcessReading) -> bool:
    return reading is not None and reading.start_ticks == known.start_ticks


def _find_heir(pid: int, members: Container[int], parents: Mapping[int, int]) -> int | None:
    """The nearest living ancestor, going through ancestors that are gone too."""
    for _ in range(len(parents) + 1):
        if pid in members:
            return pid
        if pid not in parents:
            return None
        pid = parents[pid]
    return None


def _counters(reading: procfs.ProcessReading) -> _Counters:
    faults = (reading.faults, reading.major_faults)
    return (reading.total_ticks * procfs.TICK_NS, *faults, *(reading.io_bytes or (0, 0, 0, 0)))


HELPERS = (
    "multiprocessing.resource_tracker", "multiprocessing.spawn", "multiprocessing.forkserver",
    "torch._inductor", "_inductor/compile_worker",
)  # fmt: skip
LAUNCHERS = frozenset((
    "torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed",
    "accelerate.commands.launch", "mpirun", "mpiexec",
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
    python: int | None  # minor version of its Python 3; None where its name does not tell

    @property
    def rank(self) -> int | None:
        """The rank that its launcher set in the environment."""
        return _number(self.environ.get("RANK") or self.environ.get("SLURM_PROCID"))

    @property
    def world_size(self) -> int | None:
        """As its launcher set it in the environment."""
        return _number(self.environ.get("WORLD_SIZE") or self.environ.get("SLURM_NTASKS"))


def ranks_among(pids: Iterable[int], *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks among some processes, by rank."""
    # A rank is a process that has libtorch mapped, except launchers of labelled ranks, children of
    # a rank (DataLoader workers) and Python's own helper processes.
    found = {pid: process for pid in pids if (process := _process(pid, proc)) is not None}
    if any(process.rank is not None for process in found.values()):
        found = {pid: process for pid, process in found.items() if process.rank is not None}
    ranks = [p for p in found.values() if p.parent not in found or found[p.parent].rank != p.rank]
    return sorted(ranks, key=lambda p: (p.rank is None, p.rank or 0, p.pid))


def ranks_below(pid: int, *, proc: Path = Path("/proc")) -> list[Process]:
    """The ranks at or below a process, by rank."""
    return ranks_among(ProcessTree(proc.parent).refresh().below(pid), proc=proc)


def jobs_below(pid: int, *, proc: Path = Path("/proc")) -> list[int]:
    """The uppermost launchers and processes with torch at or below a process, by pid."""
    tree = ProcessTree(proc.parent).refresh()
    found, left = [], [pid]
    for each in left:
        if is_launcher(procfs.command_line(each, proc=proc)) or _process(each, proc) is not None:
            found.append(each)
        else:
            left += [child for child in tree.children.get(each, ()) if child != pid]
    return sorted(found)


def is_launcher(command: Iterable[str]) -> bool:
    """Whether a command line is that of a launcher of ranks, such as torchrun."""
    return any(os.path.basename(word) in LAUNCHERS for word in list(command)[:_LAUNCHER_WORDS])


def _process(pid: int, proc: Path) -> Process | None:
    """None for helpers, for processes without torch, and for those that have ended."""
    command = procfs.command_line(pid, proc=proc)
    if not procfs.is_mine(pid, proc=proc) or any(h in word for word in command for h in HELPERS):
        return None
    if is_launcher(command):
        return None  # its ranks may not have loaded torch yet
    try:
        with (proc / str(pid) / "maps").open("rb") as file:
            maps = file.read(_MAPS_LIMIT_BYTES)
    except OSError:
        return None
    parent, ticks = procfs.read_parent(proc.parent, pid), procfs.read_start_ticks(proc.parent, pid)
    if b"libtorch" not in maps or parent is None or ticks is None:
        return None
    version = _PYTHON.search(maps)
    return Process(
        pid=pid, parent=parent, start_ticks=ticks, command=tuple(command),
        environ=procfs.environment(pid, proc=proc), python=int(version[1]) if version else None,
    )  # fmt: skip


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 else None
