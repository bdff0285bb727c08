"""Trends and rises of series."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.base.statistics import growth_p_value, rise
from tests.sampling import examples


@pytest.mark.parametrize("count", [8, 20, 60])
def test_growth_p_value_has_its_level_without_a_trend(count: int) -> None:
    random = np.random.default_rng(3)
    below = [growth_p_value(random.integers(0, 50, count).astype(float)) < 0.05 for _ in range(900)]
    assert np.mean(below) == pytest.approx(0.05, abs=0.025)


def test_growth_p_value_of_eight_rising_points_is_small() -> None:
    assert growth_p_value(np.arange(8.0)) < 0.001
    assert growth_p_value(-np.arange(8.0)) > 0.999


def test_growth_of_a_constant_is_no_growth() -> None:
    assert growth_p_value(np.full(20, 3.0)) == 1.0


@pytest.mark.parametrize("place", [60, 100, 150])
def test_sudden_rise_is_dated(place: int) -> None:
    random = np.random.default_rng(1)
    values = 10 + 0.2 * random.standard_normal(200)
    values[place:] += 4
    found = rise(values)
    assert found.is_sudden
    assert found.since == pytest.approx(place, abs=2)


def test_gradual_rise_is_no_jump() -> None:
    random = np.random.default_rng(2)
    found = rise(10 + 0.02 * np.arange(300) + 0.3 * random.standard_normal(300))
    assert not found.is_sudden
    assert found.p_value < 0.01


@given(st.integers(0, 10_000))
@settings(max_examples=examples(40))
def test_noise_that_wanders_for_some_steps_seldom_counts_as_a_rise(seed: int) -> None:
    random = np.random.default_rng(seed)
    noise = np.convolve(random.standard_normal(1010), np.ones(10) / 10, "valid")
    found = rise(100 + 3 * noise)
    assert found.growth < 0.1
