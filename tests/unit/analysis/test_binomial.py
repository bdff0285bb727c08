"""The binomial test against the sum of exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from haiprof.base.statistics import at_least_p_value


@pytest.mark.parametrize("chance", [Fraction(1, 10), Fraction(2, 5), Fraction(9, 10)])
@pytest.mark.parametrize("trials", [1, 7, 40])
def test_tail_is_that_of_exact_fractions(trials: int, chance: Fraction) -> None:
    for hits in range(trials + 1):
        exact = sum(
            comb(trials, k) * chance**k * (1 - chance) ** (trials - k)
            for k in range(hits, trials + 1)
        )
        found = at_least_p_value(hits, trials, float(chance))
        assert found == pytest.approx(float(exact), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("hits", "trials", "chance", "expected"),
    [(0, 0, 0.5, 1.0), (3, 3, 1.0, 1.0), (1, 5, 0.0, 0.0), (90_000, 100_000, 0.5, 0.0)],
)
def test_edges_and_many_trials(hits: int, trials: int, chance: float, expected: float) -> None:
    assert at_least_p_value(hits, trials, chance) == pytest.approx(expected, abs=1e-12)
