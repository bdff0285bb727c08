"""Work that one host thread leaves to another and waits for: backward passes of autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.dependencies.device_events import NEVER, Bools
from haiprof.trace_analysis.dependencies.host_events import HostEvents, Thread


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOvers:
    """When a thread waited for another one; arrays of one length, by time, in ns."""

    waiting: Thread
    working: Thread
    left: Ints
    """The last thing that the waiting thread did before."""
    rested: Ints
    """When the working thread was done with what it did before; NEVER where it did nothing."""
    began: Ints
    """When it began the next thing; before `left` where it was at work as the other one left."""
    ended: Ints
    """When it was done, by `back`."""
    back: Ints
    """The next thing that the waiting thread did."""

    @property
    def was_idle(self) -> Bools:
        """Whether the working thread was idle until the other one left it something to do."""
        found: Bools = self.began >= self.left
        return found

    def within(self, begin: int, end: int) -> HandOvers:
        """Those of which all lies in a window."""
        kept = (self.left >= begin) & (self.back <= end)
        names = ("left", "rested", "began", "ended", "back")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


def hand_overs(host: HostEvents, main: Thread) -> list[HandOvers]:
    """Backward passes on threads of the autograd engine, for which another thread waits.

    The thread that calls `backward()` does nothing until the engine's thread is done, and mostly it
    ran the forward pass too; else (in nn.DataParallel each device has a thread for that) the main
    thread does. What the engine runs on the calling thread itself, as gradients on the CPU, is work
    of that thread.
    """
    found = []
    for pair in host.backward_threads:
        for waiting in dict.fromkeys((pair.forward or main, main)):
            waits = _waits(host, waiting, pair.backward)
            if waiting != pair.backward and len(waits.left):
                found.append(waits)
                break
    return found


def _waits(host: HostEvents, waiting: Thread, working: Thread) -> HandOvers:
    """Pauses of a thread in which another one was done with something.

    In a pause the thread begins and ends nothing, and is in no operator that calls no other one: in
    such a one it works. Of the working thread the outermost operators count.
    """
    left, back = _pauses(*host.work_of(waiting))
    starts, ends = host.work_of(working)
    reach = np.maximum.accumulate(ends)
    outermost = np.append(True, starts[1:] >= reach[:-1])[: len(starts)]
    starts, reach = starts[outermost], reach[np.append(outermost[1:], True)[: len(starts)]]
    before = np.searchsorted(reach, left, side="right") - 1
    last = np.searchsorted(reach, back, side="right") - 1
    held = last > before
    before, last = before[held], last[held]
    return HandOvers(
        waiting=waiting,
        working=working,
        left=left[held],
        rested=np.where(before >= 0, reach[before], NEVER),
        began=starts[before + 1],
        ended=reach[last],
        back=back[held],
    )


def _pauses(starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Gaps between neighbouring starts and ends in which no innermost operator runs."""
    times = np.unique(np.concatenate([starts, ends]))
    calls_another = np.append(starts[1:] < ends[:-1], False) & np.append(
        ends[1:] <= ends[:-1], False
    )
    busy = np.zeros(len(times), dtype=np.bool_)
    busy[np.searchsorted(times, starts[~calls_another[: len(starts)]])] = True
    idle = np.flatnonzero(~busy[:-1])
    return times[idle], times[idle + 1]
