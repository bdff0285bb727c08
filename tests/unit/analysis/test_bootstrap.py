"""Intervals of simulated step times: they hold the truth as often as they say, and no less."""

from __future__ import annotations

import math

import numpy as np
import pytest

from haiprof.base.intervals import Floats
from haiprof.base.statistics import (
    Uncertain,
    block_length,
    resample,
    student_p_value,
    student_quantile,
)


def noise(random: np.random.Generator, count: int, memory: float) -> Floats:
    """Standard normal values, each like the one before by so much."""
    fresh = random.standard_normal(count) * math.sqrt(1 - memory**2)
    found = np.empty(count)
    last = random.standard_normal()
    for place, value in enumerate(fresh):
        last = found[place] = memory * last + value
    return found


def log_median_interval(first: Floats, second: Floats) -> tuple[float, float]:
    drawn = [resample(own, own[:, None], replicates=300) for own in (first, second)]
    width = Uncertain(parts=tuple((d.median_sd**2, d.freedom) for d in drawn)).half_width()
    middle = drawn[1].median - drawn[0].median
    return middle - width, middle + width


@pytest.mark.parametrize(
    "memory", [0.5, *(pytest.param(m, marks=pytest.mark.proof) for m in (0.0, 0.8))]
)
def test_interval_of_equal_series_misses_no_more_than_it_says(memory: float) -> None:
    random = np.random.default_rng(int(memory * 10))
    missed = 0
    for _ in range(200):
        low, high = log_median_interval(noise(random, 250, memory), noise(random, 250, memory))
        missed += not low <= 0 <= high
    assert missed / 200 <= 0.01 + 2 * math.sqrt(0.01 * 0.99 / 200)  # two standard errors


def test_memory_makes_blocks_longer_and_intervals_wider() -> None:
    random = np.random.default_rng(7)
    plain, sticky = noise(random, 2000, 0.0), noise(random, 2000, 0.9)
    assert block_length(sticky) > 5 * block_length(plain)
    wide = resample(sticky, sticky[:, None]).median_sd
    assert wide > 2 * resample(plain, plain[:, None]).median_sd


def test_standard_error_of_a_mean_is_the_known_one() -> None:
    random = np.random.default_rng(8)
    series = noise(random, 4000, 0.6)
    known = math.sqrt((1 + 0.6) / (1 - 0.6) / 4000)
    assert resample(series, series[:, None]).mean_sds[0] == pytest.approx(known, rel=0.25)


def test_standard_error_of_a_median_is_the_known_one() -> None:
    series = np.random.default_rng(9).standard_normal(3000)
    known = math.sqrt(math.pi / 2 / 3000)
    assert resample(series, series[:, None]).median_sd == pytest.approx(known, rel=0.2)


def test_drift_leaves_few_independent_values_and_a_wide_error() -> None:
    random = np.random.default_rng(11)
    still = noise(random, 600, 0.3) * 0.02
    moving = still + np.linspace(0, 0.2, 600)
    first, second = (resample(own, own[:, None]) for own in (still, moving))
    assert second.effective_count < first.effective_count / 5
    assert second.median_sd > 10 * first.median_sd


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constant_series_has_no_error(value: float) -> None:
    series = np.full(50, value)
    drawn = resample(series, series[:, None])
    assert (drawn.median, drawn.median_sd, drawn.block) == (value, 0.0, 1)


def test_same_series_gives_the_same_answer() -> None:
    series = np.random.default_rng(12).standard_normal(100)
    first, second = (resample(series, series[:, None]) for _ in range(2))
    assert first.median_sd == second.median_sd


@pytest.mark.parametrize(("freedom", "quantile"), [(3, 3.182), (7, 2.365), (30, 2.042)])
def test_students_t_is_that_of_the_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(quantile, rel=0.02)
    assert student_p_value(quantile, freedom) == pytest.approx(0.05, rel=0.08)
