"""A rank process with its descendants: counters that never decrease when one of them ends.

DataLoader workers come and go with every epoch, and their work is the rank's. The kernel moves a
child's CPU time (stat cutime, cstime) and bytes (/proc/PID/io) to its parent at the moment the
parent waits for it, together with its page faults (stat cminflt). So the sum over the living
processes of *own + waited for* is right as long as every child is waited for by a living member,
and three cases need care:

1. A child ended between the parent's read and its own. Parents are read first, so nothing is
   counted twice; the child's last values are carried until the parent's next read shows the wait.
2. A child was never waited for (SIGCHLD ignored, or its parent ended first). Its parent's cminflt
   then did not grow by the child's faults, and its last values stay in the sum for good.
3. A child lost its parent but lives on (adopted by init). It stays a member by pid and start time.

What a child did after its last read is in the sum when it was waited for, and lost otherwise. A
last guard holds every counter at its highest value. Not handled: a rank that is itself a child of
another rank (it is left out of the parent's sum until the parent waits for it).

Source: Linux kernel/exit.c wait_task_zombie(), fs/proc/base.c do_io_accounting().
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

from haiprof.linux.procfs import TICK_NS, ProcessReading
from haiprof.linux.readings import Unavailable

_Counters = tuple[int, ...]  # CPU time, minor faults, major faults, and the four of io
_ZERO: _Counters = (0,) * 7


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTotals:
    """A process and its descendants, summed."""

    process_count: int
    cpu_ns: int
    cpu_main_ns: int
    """Of the process alone."""
    rss_bytes: int
    minor_faults: int
    major_faults: int
    thread_count: int
    io_bytes: tuple[int, int, int, int] | None
    """rchar, wchar, read_bytes, write_bytes; None when those of the process cannot be read."""
    io_missing: Unavailable | None
    """Why there are none."""
    child_io_missing: Unavailable | None
    """Why those of some descendant are left out of the sum."""


class Family:
    """Follows one process and its descendants."""

    def __init__(self, pid: int, start_ticks: int) -> None:
        self.pid = pid
        self.start_ticks = start_ticks
        self._members: dict[int, ProcessReading] = {}  # at the last update, parents before children
        self._pending: dict[int, ProcessReading] = {}  # gone, and no wait for them seen yet
        self._carried: _Counters = _ZERO  # of those that were never waited for
        self._highest: _Counters = _ZERO

    def update(
        self,
        children: Mapping[int, list[int]],
        read: Callable[[int], ProcessReading | None],
        *,
        others: Container[int] = (),
    ) -> FamilyTotals | None:
        """Reads every member.

        The totals, or None when the process has ended.
        """
        main = read(self.pid)
        if main is None or main.start_ticks != self.start_ticks or not main.running:
            return None
        members = self._read_members(main, children, read, others)
        self._settle(members)
        self._members = members
        values = [self._carried, *map(_counters, (*members.values(), *self._pending.values()))]
        totals = (sum(column) for column in zip(*values, strict=True))
        self._highest = tuple(map(max, totals, self._highest))
        return _totals(main, members.values(), self._highest)

    def _read_members(
        self,
        main: ProcessReading,
        children: Mapping[int, list[int]],
        read: Callable[[int], ProcessReading | None],
        others: Container[int],
    ) -> dict[int, ProcessReading]:
        """The descendants, and known members that lost their parent; parents first."""
        members = {main.pid: main}
        queue = [main.pid]
        for parent in queue:
            for pid in children.get(parent, ()):
                reading = None if pid in members or pid in others else read(pid)
                if reading is not None and reading.parent == parent:
                    members[pid] = reading
                    queue.append(pid)
        for pid, known in self._members.items():
            reading = None if pid in members or pid in others else read(pid)
            if reading is not None and _is_same(reading, known):
                members[pid] = reading
        return members

    def _settle(self, members: Mapping[int, ProcessReading]) -> None:
        """Decides for members that are gone whether another one has inherited their counters."""
        gone = {pid: r for pid, r in self._members.items() if not _is_same(members.get(pid), r)}
        lost = {**self._pending, **gone}
        parents = {pid: r.parent for pid, r in lost.items()}
        waited = {pid: r.waited_faults - self._waited_before(r) for pid, r in members.items()}
        still_pending = {}
        # Largest first: the faults that one wait added must not be matched to two smaller children.
        for pid, reading in sorted(lost.items(), key=lambda item: -item[1].faults):
            heir = _find_heir(reading.parent, members, parents)
            if heir is not None and waited[heir] >= reading.faults:
                waited[heir] -= reading.faults
            elif heir is not None and pid in gone:
                still_pending[pid] = reading
            else:
                self._carried = _add(self._carried, _counters(reading))
        self._pending = still_pending

    def _waited_before(self, reading: ProcessReading) -> int:
        known = self._members.get(reading.pid)
        return known.waited_faults if known is not None and _is_same(reading, known) else 0


def _is_same(reading: ProcessReading | None, known: ProcessReading) -> bool:
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


def _counters(reading: ProcessReading) -> _Counters:
    faults = (reading.faults, reading.major_faults)
    return (reading.total_ticks * TICK_NS, *faults, *(reading.io_bytes or (0, 0, 0, 0)))


def _add(left: _Counters, right: _Counters) -> _Counters:
    return tuple(map(sum, zip(left, right, strict=True)))


def _totals(
    main: ProcessReading, members: Iterable[ProcessReading], counters: _Counters
) -> FamilyTotals:
    running = [r for r in members if r.running]
    unread = (r.io_missing for r in running if r is not main and r.io_missing)
    read, written, storage_read, storage_written = counters[3:]
    return FamilyTotals(
        process_count=len(running),
        cpu_ns=counters[0],
        cpu_main_ns=main.own_ticks * TICK_NS,
        rss_bytes=sum(r.rss_bytes for r in running),
        minor_faults=counters[1],
        major_faults=counters[2],
        thread_count=sum(r.thread_count for r in running),
        io_bytes=main.io_bytes and (read, written, storage_read, storage_written),
        io_missing=main.io_missing,
        child_io_missing=next(unread, None),
    )
