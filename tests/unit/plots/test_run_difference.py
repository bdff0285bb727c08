"""The picture of two runs: shares that add up, and differences with their own intervals."""

from __future__ import annotations

import numpy as np
import pytest

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.run_figures import Difference, run_difference_figure

PARTS = (
    Difference(name="forward", ns=2e6, low_ns=1.5e6, high_ns=3e6, is_sure=True),
    Difference(name="backward", ns=-1e5, low_ns=-4e5, high_ns=2e5, is_sure=False),
)


def test_steps_are_shares_of_each_run_and_parts_have_their_intervals() -> None:
    random = np.random.default_rng(1)
    before = (10 + random.random(100)) * NS_PER_MS
    after = (12 + random.random(400)) * NS_PER_MS
    figure = run_difference_figure(before, after, PARTS, title="t")
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
    figure = run_difference_figure(steps, steps, (), title="t")
    assert max(figure.data[0].x) < 12


@pytest.mark.parametrize("count", [0, 1])
def test_runs_of_no_or_one_step_can_be_drawn(count: int) -> None:
    figure = run_difference_figure(np.empty(0), np.full(count, 1e7), (), title="t")
    assert len(figure.data) == count
