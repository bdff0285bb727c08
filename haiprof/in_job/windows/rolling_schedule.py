"""Where the rolling windows of --keep-slow lie, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable

from haiprof.in_job.identity import rank_and_world
from haiprof.in_job.windows.step_plan import Agreement

AHEAD_S = 1.0  # until every rank has read what the first one settled
# Windows in the first series, the second and so on: what they cost is soon known, and settled anew.
_SERIES = (1, 8, 64, 512)
_SERIES_ALONE = (1, 4, 16)
_MIX = 0x9E3779B1  # Knuth's multiplicative hash: the same places on every rank


class RollingSchedule:
    """Series of windows: length and period of one are settled when it begins, by the first rank.

    Where in a period a window lies changes, so that no rhythm of the job hides.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._series = -1
        self._count = 0
        self._place = 0
        self._begin = 0
        self._period = 1
        self.length = 1
        """Steps in a window of this series."""
        self._kept = 0

    @property
    def window_count(self) -> int:
        """Windows that the ranks have kept: the number of the next one."""
        return self._kept

    def next_first(self, number: int, *, pace: Callable[[], tuple[int, int]], usual_ns: int) -> int:
        """First step of the next window, not before `number`."""
        while True:
            if self._place >= self._count:
                self._settle(number, pace(), usual_ns)
            room = max(1, self._period - self.length + 1)
            mixed = ((self._series << 10) + self._place) * _MIX & 0xFFFFFFFF
            first = self._begin + self._place * self._period + mixed % room
            if first >= number:
                return first
            self._place += 1

    def advance(self) -> None:
        """The window that came next is over, or nothing came of it."""
        self._place += 1

    def is_kept(self, first: int, *, slow: bool) -> bool:
        """Whether the window that begins with this step is the next one that all ranks keep."""
        while True:
            name = f"kept-{self._kept}"
            found = self._agreement.settle(name, first) if slow else self._agreement.find(name)
            if found is None or found > first:
                return False
            if found == first:
                return True
            self._kept += 1  # the others kept one that this rank did not record

    def keep(self) -> None:
        """It is written."""
        self._kept += 1

    def _settle(self, number: int, pace: tuple[int, int], usual_ns: int) -> None:
        alone = rank_and_world()[1] == 1
        ahead = 0 if alone else 2 + round(AHEAD_S * 1e9) // max(1, usual_ns)
        begin = max(number + ahead, self._begin + self._count * self._period)
        sizes = _SERIES_ALONE if alone else _SERIES
        self._series += 1
        self._count, self._place = sizes[min(self._series, len(sizes) - 1)], 0
        self._begin, self.length, self._period = self._agreement.settle_all(
            f"series-{self._series}", (begin, *pace)
        )
