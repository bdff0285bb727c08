from __future__ import annotations

import numpy as np

from haiprof.show.figures.panels import gap_starts, points_per_series, thin_points, with_gaps


def test_kept_points_short_series_is_whole() -> None:
    assert len(thin_points(np.arange(5000.0))) == 5000


def test_kept_points_long_series_keeps_a_single_spike() -> None:
    values = np.random.default_rng(0).normal(10, 0.1, 400_000)
    values[123_456], values[300_001] = 99.0, -99.0
    kept = thin_points(values)
    assert len(kept) <= 5000
    assert {0, 123_456, 300_001, 399_999} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()


def test_points_per_series_of_many_ranks_is_bounded() -> None:
    assert points_per_series(1) == 5000
    assert points_per_series(1000) == 200


def test_gap_starts_finds_the_pause() -> None:
    times = np.array([0.0, 1, 2, 3, 60, 61, 62])
    assert gap_starts(times).tolist() == [3]


def test_gap_starts_slow_step_is_no_pause() -> None:
    starts = np.array([0.0, 1, 2, 3, 60, 61])
    ends = np.append(starts[1:], 62.0)
    assert gap_starts(starts, ends).tolist() == []


def test_with_gaps_puts_an_empty_point_into_the_pause() -> None:
    times, values = np.array([0.0, 1, 2, 60, 61]), np.ones(5)
    x, y = with_gaps(np.arange(5), np.array([2]), [times, values], times)
    assert x.tolist() == [0, 1, 2, 2, 60, 61]
    assert np.isnan(y[3])
    assert np.isfinite(np.delete(y, 3)).all()
