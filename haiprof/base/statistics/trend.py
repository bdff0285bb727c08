"""Mann-Kendall: whether a series grows."""

from __future__ import annotations

import math

import numpy as np

from haiprof.base.arrays import Floats


def growth_p_value(values: Floats) -> float:
    """One-sided p of a series not growing.

    Source:
        Mann, Nonparametric Tests Against Trend, 1945; Kendall, Rank Correlation Methods, 1975.
    """
    n = len(values)
    signs = np.sign(values[None, :] - values[:, None])
    score = float(np.triu(signs, 1).sum())
    _, ties = np.unique(values, return_counts=True)
    tied = float((ties * (ties - 1) * (2 * ties + 5)).sum())
    variance = (n * (n - 1) * (2 * n + 5) - tied) / 18
    if variance <= 0:
        return 1.0
    z = (score - 1) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))
