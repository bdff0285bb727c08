"""Mann-Whitney U: whether one sample tends to be larger than another."""

from __future__ import annotations

import math

import numpy as np

from haiprof.diagnosis.facts import Floats


def larger_p_value(first: Floats, second: Floats) -> float:
    """One-sided p of the second sample not being larger than the first.

    Args:
        first: A sample, at least one value.
        second: Another.

    Returns:
        p in [0, 1] by the normal approximation with ties and continuity corrected.

    Source:
        Mann and Whitney, On a Test of Whether one of Two Random Variables is Stochastically
        Larger than the Other, 1947; correction for ties: Lehmann, Nonparametrics, 1975, 1.4.
    """
    joined = np.concatenate([first, second])
    values, place, counts = np.unique(joined, return_inverse=True, return_counts=True)
    if len(values) < 2:
        return 1.0
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    n, m = len(first), len(second)
    u = float(ranks[n:].sum()) - m * (m + 1) / 2
    total = n + m
    ties = float((counts.astype(np.float64) ** 3 - counts).sum()) / (total * (total - 1))
    deviation = math.sqrt(n * m / 12 * (total + 1 - ties))
    z = (u - n * m / 2 - 0.5) / deviation
    return 0.5 * math.erfc(z / math.sqrt(2))
