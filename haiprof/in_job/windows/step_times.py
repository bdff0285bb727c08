"""How long steps take, and which of them hold more than training."""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

from haiprof.base.medians import upper_median
from haiprof.run_format.schema import EVAL, NOGRAD, SAVE

KEPT_STEPS = 101
USUAL_AFTER = 5  # steps before there is a usual time

_now = time.perf_counter_ns
OTHER_WORK = (EVAL, NOGRAD, SAVE)


class _Clock(Protocol):
    trained_ns: int | None


class StepTimes:
    """The steps' times from one start to the next, ns."""

    def __init__(self, counter: _Clock) -> None:
        self.counter = counter
        self.capacity = KEPT_STEPS
        self.last: tuple[int, int, bool] | None = None
        """(number, ns, whether it was training alone) of the step that has just ended."""
        self._plain: deque[int] = deque(maxlen=KEPT_STEPS)
        self._number: int | None = None
        self._start_ns = 0
        self._other_work = False
        self._ours_ns = 0
        self._kept = 0
        self.usual_ns = 0
        """Median of the last plain steps; 0 while there are few."""

    def saw_other_work(self) -> None:
        """An evaluation or a checkpoint, in the step that runs."""
        self._other_work = True

    def boundary(self, number: int, begins: bool) -> None:
        """An edge of a step."""
        now = _now()
        self.last = None
        if self._number is not None and number > self._number:
            ns = now - self._start_ns - self._ours_ns
            pure = number == self._number + 1 and not self._other_work
            self.last = (self._number, ns, pure)
            self._number = None
        if begins and self._number is None:
            self._number, self._start_ns = number, now
            self._other_work, self._ours_ns = False, 0

    def ours(self, ns: int) -> None:
        """So much of the running step is haiprof's own."""
        self._ours_ns += ns

    def keep(self, ns: int) -> None:
        """A plain step's time, for the usual one."""
        self._plain.append(ns)
        self._kept += 1
        if len(self._plain) >= USUAL_AFTER and self._kept % USUAL_AFTER == 0:
            self.usual_ns = upper_median(self._plain)
