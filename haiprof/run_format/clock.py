"""Clock anchors: one pair of wall and monotonic time, so that files of one host line up."""

from __future__ import annotations

import time
from dataclasses import dataclass

_READINGS = 3


@dataclass(frozen=True)
class ClockAnchor:
    """The same instant on two clocks of one host."""

    wall_ns: int  # Unix time
    mono_ns: int  # CLOCK_MONOTONIC, which `time.perf_counter_ns` reads on Linux

    @classmethod
    def now(cls) -> ClockAnchor:
        """Reads both clocks; the monotonic time is the mean of two reads around the other.

        The closest of some readings counts: a thread that loses its core between two reads would
        move all times of a trace against the job's.
        """
        readings = []
        for _ in range(_READINGS):
            before = time.perf_counter_ns()
            wall = time.time_ns()
            after = time.perf_counter_ns()
            readings.append((after - before, wall, (before + after) // 2))
        _, wall, mono = min(readings)
        return cls(wall, mono)
