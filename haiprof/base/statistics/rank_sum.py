"""Mann-Whitney U: whether two samples differ, or one is larger; and many questions at once."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from haiprof.base.arrays import Floats, Ints

LEAST = 4
"""Measurements on each side; with three and three no p-value is below 0.1."""
_EXACT_LIMIT = 40  # measurements on both sides together; beyond, the normal approximation


class Comparison(NamedTuple):
    """One against the other."""

    p_value: float | None
    """Two-sided; None with fewer than `LEAST` measurements on a side."""
    greater_probability: float
    """That one of the second side is greater than one of the first; a tie counts half."""


def compare_samples(first: Floats, second: Floats) -> Comparison:
    """Tests two samples for a difference, by the two-sided Mann-Whitney U test.

    Source: Mann and Whitney 1947; ties: Lehmann, Nonparametrics, 1975, section 1.4; the
    probability is Vargha and Delaney's A, 2000.
    """
    ranks = _double_ranks(np.concatenate([first, second]))
    count, both = len(second), len(ranks)
    observed = int(ranks[len(first) :].sum())
    pairs = len(first) * count
    greater = (observed / 2 - count * (count + 1) / 2) / pairs
    if min(len(first), count) < LEAST:
        return Comparison(None, greater)
    off = abs(observed - count * (both + 1))  # of doubled ranks the expected sum
    if both > _EXACT_LIMIT:
        return Comparison(_normal_p(ranks, count, off), greater)
    sums, ways = _distribution(tuple(np.sort(ranks).tolist()), count)
    extreme = ways[np.abs(sums - count * (both + 1)) >= off].sum()
    return Comparison(float(extreme / ways.sum()), greater)


def larger_p_value(first: Floats, second: Floats) -> float:
    """Returns the one-sided p of the second sample not being larger than the first.

    Source: as for `compare_samples`.
    """
    ranks = _double_ranks(np.concatenate([first, second]))
    count, both = len(second), len(ranks)
    variance = _rank_sum_variance(ranks, count)
    if variance <= 0:
        return 1.0
    excess = (int(ranks[len(first) :].sum()) - count * (both + 1)) / 2
    return 0.5 * math.erfc((excess - 0.5) / math.sqrt(2 * variance))


def adjust_p_values(p_values: list[float | None]) -> list[float | None]:
    """p-values of many questions asked at once, so that a share of false finds is bounded."""
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    found: list[float | None] = [None] * len(p_values)
    least = 1.0
    for rank in range(len(known), 0, -1):
        p, place = known[rank - 1]
        least = min(least, p * len(known) / rank)
        found[place] = least
    return found


def _double_ranks(values: Floats) -> Ints:
    """Twice the rank of each, ties in the middle: whole numbers."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    before = np.cumsum(counts) - counts
    found: Ints = (2 * before + counts + 1)[place]
    return found


@lru_cache(maxsize=1024)
def _distribution(ranks: tuple[int, ...], count: int) -> tuple[Floats, Floats]:
    """How many choices of so many of the ranks have each sum."""
    ways = np.zeros((count + 1, sum(ranks) + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : ways.shape[1] - rank].copy()
    return np.arange(ways.shape[1], dtype=np.float64), ways[count]


def _normal_p(ranks: Ints, count: int, off: int) -> float:
    """By the normal approximation; `off` is the doubled rank sum's distance from its mean."""
    variance = _rank_sum_variance(ranks, count)
    if variance <= 0:
        return 1.0
    return math.erfc(max(off / 2 - 0.5, 0.0) / math.sqrt(2 * variance))


def _rank_sum_variance(ranks: Ints, count: int) -> float:
    """The variance of the sum of `count` of the ranks, given their ties."""
    both = len(ranks)
    _, ties = np.unique(ranks, return_counts=True)
    spread = both + 1 - ((ties**3 - ties).sum() / (both * (both - 1)))
    return float(count * (both - count) * spread / 12)
