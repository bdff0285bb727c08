"""Detects that the machine was suspended: CLOCK_BOOTTIME advanced, CLOCK_MONOTONIC did not."""

from __future__ import annotations

import time

from haiprof.base.units import NS_PER_MS
from haiprof.linux.readings import Clock

_SHORTEST_NS = NS_PER_MS


def boot_ns() -> int:
    """Reads CLOCK_BOOTTIME in ns."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


class SuspendWatch:
    """Compares both clocks. Rates stay right across a suspension; Unix times after it do not.

    A virtual machine that its host pauses stops both clocks: nothing inside it can tell.

    Source: clock_gettime(2).
    """

    def __init__(self, clock: Clock, boot_clock: Clock) -> None:
        self._clock = clock
        self._boot_clock = boot_clock
        self._at_most_ns = self._bounds()[1]

    def gap_ns(self) -> int:
        """How long the machine was suspended since the last call; 0 if it was not."""
        at_least_ns, at_most_ns = self._bounds()
        gap_ns = at_least_ns - self._at_most_ns
        if gap_ns < _SHORTEST_NS:
            self._at_most_ns = min(self._at_most_ns, at_most_ns)
            return 0
        self._at_most_ns = at_most_ns
        return gap_ns

    def _bounds(self) -> tuple[int, int]:
        """Bounds of the clocks' difference; this thread may be preempted between the reads."""
        before_ns = self._clock()
        boot_time_ns = self._boot_clock()
        return boot_time_ns - self._clock(), boot_time_ns - before_ns
