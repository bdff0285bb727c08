"""Clock anchors: one pair of wall and monotonic time, so that files of one host line up."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class ClockAnchor:
    """The same instant on two clocks of one host."""

    wall_ns: int
    """Unix time."""
    mono_ns: int
    """CLOCK_MONOTONIC, which `time.perf_counter_ns` reads on Linux."""

    @classmethod
    def now(cls) -> ClockAnchor:
        """Reads both clocks; the monotonic time is the mean of two reads around the other."""
        before = time.perf_counter_ns()
        wall = time.time_ns()
        return cls(wall, (before + time.perf_counter_ns()) // 2)
