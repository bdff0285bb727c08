"""Adds the counters of devices that come, go and wrap up to counters that only grow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from haiprof.linux.readings import Unavailable


class SummedCounters:
    """The sum of each counter over all devices.

    It starts at the devices' own sum and grows by the growth of each of them between two reads: a
    device that comes or goes, or whose counter wraps, makes no step in the sum.
    """

    def __init__(self, bits: Sequence[int]) -> None:
        self._ranges = [1 << width for width in bits]
        self._last: Mapping[bytes, Sequence[int]] = {}
        self._totals: list[int] | None = None

    def add(self, counts: Mapping[bytes, Sequence[int]]) -> tuple[int, ...]:
        """The sums, after the counters of each device as they are now."""
        last, self._last = self._last, counts
        if self._totals is None:
            columns = zip(*counts.values(), strict=True)
            self._totals = [sum(column) for column in columns] or [0] * len(self._ranges)
            return tuple(self._totals)
        set_back = []
        for name, values in counts.items():
            if name in last and not self._grow(self._totals, values, last[name]):
                set_back.append(name.decode(errors="replace"))
        if set_back:
            raise Unavailable(f"the counters of {', '.join(set_back)} were set back")
        return tuple(self._totals)

    def _grow(self, totals: list[int], values: Sequence[int], last: Sequence[int]) -> bool:
        """Adds the growth of one device, unless one of its counters was reset.

        A counter that decreases has wrapped if it grew by less than half its range; otherwise it
        was reset (serial number arithmetic, RFC 1982). Those of 64 bits never wrap.
        """
        growths = []
        for value, before, whole in zip(values, last, self._ranges, strict=True):
            growth = value - before
            if growth < 0 and whole < 1 << 64:
                growth += whole
                growth = growth if growth < whole >> 1 else -1
            growths.append(growth)
        if min(growths) < 0:
            return False
        for at, growth in enumerate(growths):
            totals[at] += growth
        return True
