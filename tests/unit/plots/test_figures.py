"""Figures: numbers, gaps, panels, and the difference of two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.compare.comparison import Change
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.show.figures.job import run_difference_figure
from haiprof.show.figures.panel_table import PANEL_ROWS, panel_metrics
from haiprof.show.page.counter_data import gap_starts, with_gaps
from tests.unit.rundir.small_run import write_small_run


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


def test_panels_show_metrics_that_a_run_with_all_sources_has(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run", COUNTER_TABLES)
    counters = Analyzer(run.root).counters()
    known = set(counters.select("source", "metric").unique().rows())
    shown = panel_metrics()
    assert shown - known == set()


def test_row_is_filled_by_the_sources_of_its_metrics() -> None:
    for row in PANEL_ROWS:
        assert {source for source, _ in panel_metrics(row.panels)} <= set(row.sources), row.title


PARTS = (
    Change(
        title="forward",
        before_ns=0.0,
        after_ns=2e6,
        low_ns=1.5e6,
        high_ns=3e6,
        p_value=0.0,
        adjusted_p_value=0.0,
    ),
    Change(title="backward", before_ns=1e5, after_ns=0.0, low_ns=-4e5, high_ns=2e5, p_value=1.0),
)


def test_steps_are_shares_of_each_run_and_parts_have_their_intervals() -> None:
    random = np.random.default_rng(1)
    before = (10 + random.random(100)) * NS_PER_MS
    after = (12 + random.random(400)) * NS_PER_MS
    figure = run_difference_figure(before, after, PARTS)
    traces = {trace.name: trace for trace in figure.data}
    assert sum(traces["baseline"].y[:-1]) == pytest.approx(100)
    assert 98 <= sum(traces["new run"].y[:-1]) <= 100  # the longest 1 % may lie beyond the axis
    sure, unsure = traces["beyond chance"], traces["may be chance"]
    assert (list(sure.x), list(sure.y)) == ([2.0], ["forward"])
    assert list(sure.error_x.array) == pytest.approx([1.0])
    assert list(sure.error_x.arrayminus) == pytest.approx([0.5])
    assert list(unsure.y) == ["backward"]


def test_one_stall_does_not_hide_the_other_steps() -> None:
    steps = np.append(np.linspace(10, 11, 200), 5000.0) * NS_PER_MS
    figure = run_difference_figure(steps, steps, ())
    assert max(figure.data[0].x) < 12


@pytest.mark.parametrize("count", [0, 1])
def test_runs_of_no_or_one_step_can_be_drawn(count: int) -> None:
    figure = run_difference_figure(np.empty(0), np.full(count, 1e7), ())
    assert len(figure.data) == count
