"""When a sampler is due: a fixed grid without drift, and fewer samples while reads are slow."""

from __future__ import annotations

MAX_FACTOR = 16
_RECOVER_AFTER = 30  # quick reads in a row after which the interval is halved again


class Pace:
    """The schedule of one sampler."""

    def __init__(self, interval_ns: int, limit_ns: int, now_ns: int) -> None:
        self._interval_ns = interval_ns
        self._limit_ns = limit_ns
        self._quick_count = 0
        self.factor = 1
        self.missed_count = 0
        self.due_ns = now_ns + interval_ns

    @property
    def interval_ns(self) -> int:
        """Between two samples, as it is now."""
        return self._interval_ns * self.factor

    def advance(self, now_ns: int, read_ns: int) -> None:
        """Notes a sample that has just been taken; ticks missed meanwhile are counted."""
        self._adapt(read_ns)
        step = self.interval_ns
        late_count = max(0, (now_ns - self.due_ns) // step)
        self.missed_count += late_count
        self.due_ns += step * (late_count + 1)

    def restart(self, now_ns: int) -> None:
        """Restarts the grid after a sample out of turn."""
        self.due_ns = now_ns + self.interval_ns

    def _adapt(self, read_ns: int) -> None:
        if read_ns > self._limit_ns:
            self.factor = min(self.factor * 2, MAX_FACTOR)
            self._quick_count = 0
            return
        self._quick_count += 1
        if self.factor > 1 and self._quick_count >= _RECOVER_AFTER:
            self.factor //= 2
            self._quick_count = 0
