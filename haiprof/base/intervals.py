"""Exact interval arithmetic in integer nanoseconds, and names of numpy's array types."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Intervals(NamedTuple):
    """Disjoint half-open intervals [start, end) in order; none is empty, none touches the next."""

    starts: Ints  # ns, shape (n,)
    ends: Ints  # ns, shape (n,)

    def shift(self, by_ns: int) -> Intervals:
        """The same so much later, as on another clock."""
        return Intervals(self.starts + by_ns, self.ends + by_ns)


def union(starts: Ints, ends: Ints) -> Intervals:
    """The union of the given intervals."""
    real = ends > starts
    starts, ends = starts[real], ends[real]
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    if not len(starts):
        return Intervals(starts, reach)
    heads = np.append(True, starts[1:] > reach[:-1])
    return Intervals(starts[heads], reach[np.append(heads[1:], True)])


def total(intervals: Intervals) -> int:
    """Total length in ns."""
    return int((intervals.ends - intervals.starts).sum())


def intersection(left: Intervals, right: Intervals) -> Intervals:
    """The time that both cover."""
    first = np.searchsorted(right.ends, left.starts, side="right")
    last = np.searchsorted(right.starts, left.ends, side="left")
    counts = np.maximum(last - first, 0)
    of_left = np.repeat(np.arange(len(left.starts)), counts)
    offsets = np.arange(len(of_left)) - np.repeat(np.cumsum(counts) - counts, counts)
    of_right = first[of_left] + offsets
    return Intervals(
        np.maximum(left.starts[of_left], right.starts[of_right]),
        np.minimum(left.ends[of_left], right.ends[of_right]),
    )


def difference(left: Intervals, right: Intervals) -> Intervals:
    """The time that the left ones cover and the right ones do not."""
    return intersection(left, complement(right))


def complement(intervals: Intervals) -> Intervals:
    """All time outside the intervals."""
    lowest, highest = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    return Intervals(np.append(lowest, intervals.ends), np.append(intervals.starts, highest))


def covered_lengths(intervals: Intervals, starts: Ints, ends: Ints) -> Ints:
    """How much of each given interval the disjoint ones cover."""
    lengths = np.append(0, np.cumsum(intervals.ends - intervals.starts))

    def before(times: Ints) -> Ints:
        """How much of the intervals lies before each time."""
        at = np.searchsorted(intervals.starts, times, side="right")
        inside = np.zeros(len(times), dtype=np.int64)
        some = at > 0
        last = at[some] - 1
        inside[some] = np.minimum(times[some], intervals.ends[last]) - intervals.starts[last]
        found: Ints = inside
        found[some] += lengths[last]
        return found

    return before(np.maximum(ends, starts)) - before(starts)
