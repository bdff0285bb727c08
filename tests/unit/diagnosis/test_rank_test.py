"""Mann-Whitney U against counting all orders of a small sample."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from haiprof.base.statistics import larger_p_value


@pytest.mark.parametrize("shift", [0.0, 0.5, 1.5])
def test_p_value_is_near_the_exact_one(shift: float) -> None:
    random = np.random.default_rng(3)
    first, second = random.standard_normal(8), random.standard_normal(8) + shift
    assert larger_p_value(first, second) == pytest.approx(exact(first, second), abs=0.01)


def test_p_value_of_equal_values_is_one() -> None:
    assert larger_p_value(np.ones(10), np.ones(12)) == 1.0


def test_p_value_with_ties_is_a_probability() -> None:
    assert 0.0 < larger_p_value(np.array([1.0, 1, 2, 2]), np.array([2.0, 2, 3, 3])) < 0.1


def exact(first: np.ndarray, second: np.ndarray) -> float:
    joined = np.concatenate([first, second])
    ranks = joined.argsort().argsort()
    observed = ranks[len(first) :].sum()
    sums = [sum(c) for c in combinations(range(len(joined)), len(second))]
    return float(np.mean(np.array(sums) >= observed))
