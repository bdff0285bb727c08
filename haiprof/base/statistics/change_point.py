"""How a series of step times rose: at one step, or gradually."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats
from haiprof.base.statistics.rank_sum import larger_p_value

BLOCK_COUNT = 60
"""Twenty medians in each third: neighbouring steps are alike, more medians add little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """From the first third of a series to the last."""

    before: float
    after: float
    p_value: float
    """Of the last third not being larger (Mann-Whitney U on medians of blocks)."""
    is_sudden: bool
    """Whether one step between two levels fits better than a straight line."""
    since: int
    """Index in the series: of the first slow step where it is sudden, else of half the rise."""

    @property
    def growth(self) -> float:
        """Of the median."""
        return (self.after - self.before) / max(self.before, 1.0)


def rise(values: Floats) -> Rise:
    """Measures a rise.

    Source:
        Two levels against a line by their sums of squares, the change point at the least one: Page,
        1957; robust to single outliers because blocks are medians.
    """
    blocks = _block_medians(values)
    third = len(blocks) // 3
    p_value = larger_p_value(blocks[:third], blocks[-third:])
    third = len(values) // 3
    before, after = float(np.median(values[:third])), float(np.median(values[-third:]))
    place, of_levels = _two_levels(blocks)
    of_line = float(np.polyfit(np.arange(len(blocks)), blocks, 1, full=True)[1].sum())
    sudden = of_levels < of_line
    since = place * len(values) // len(blocks) if sudden else _half_way(values, before, after)
    if sudden:
        since = _refine(values, since, len(values) // len(blocks) + 1)
    return Rise(before=before, after=after, p_value=p_value, is_sudden=sudden, since=since)


def _block_medians(values: Floats) -> Floats:
    count = min(BLOCK_COUNT, len(values))
    parts = np.array_split(values, count)
    return np.array([float(np.median(part)) for part in parts])


def _two_levels(values: Floats) -> tuple[int, float]:
    """First index of the second level, and the sum of squares around both levels."""
    sums, squares = np.cumsum(values), np.cumsum(values**2)
    count = np.arange(1, len(values))
    left = squares[:-1] - sums[:-1] ** 2 / count
    rest = len(values) - count
    right = (squares[-1] - squares[:-1]) - (sums[-1] - sums[:-1]) ** 2 / rest
    place = int((left + right).argmin())
    return place + 1, float((left + right)[place])


def _refine(values: Floats, around: int, width: int) -> int:
    """The index at which the two sides differ most, within a block of a first guess."""
    first, last = max(around - width, 1), min(around + width, len(values) - 1)
    window = values[max(first - 2 * width, 0) : last + 2 * width]
    place, _ = _two_levels(window)
    return min(max(first - 2 * width, 0) + place, len(values) - 1)


def _half_way(values: Floats, before: float, after: float) -> int:
    """First index from which a moving median stays above the middle."""
    width = max(5, len(values) // 20)
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    below = np.flatnonzero(np.median(windows, axis=1) < (before + after) / 2)
    return min(int(below[-1]) + 1 + width // 2, len(values) - 1) if len(below) else 0
