"""Ranks over time and the bars of late ranks: numbers as they were measured."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.run_analysis.collectives import LATENESS_SCHEMA
from haiprof.run_analysis.ranks import rank_grid
from haiprof.show.figures.job import LINE_LIMIT, late_ranks_figure, over_time_figure
from haiprof.show.figures.style import VERMILLION
from tests.unit.report.many_ranks import write_flight, write_many


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Analyzer:
    root = write_many(tmp_path_factory.mktemp("map") / "run", ranks=12, steps=80)
    write_flight(root, ranks=12, late_rank=5, late_ns=9_000_000)
    return Analyzer(root)


def test_spread_of_many_ranks_names_the_slowest(run: Analyzer) -> None:
    grid = rank_grid(run.steps())
    assert grid is not None
    assert len(grid.ranks) > LINE_LIMIT
    figure = over_time_figure(grid, start_ns=grid.start_ns)
    lines = {trace.name: trace for trace in figure.data}
    assert np.nanmedian(lines["median rank"].y) == pytest.approx(101, rel=0.02)
    assert set(lines["slowest rank"].customdata) >= {5}
    assert {"forward", "backward", "dataloader"} <= set(lines)


def test_late_rank_is_the_highest_bar(run: Analyzer) -> None:
    figure = late_ranks_figure(run.lateness(), step_ns=1e8)
    bars = dict(zip(figure.data[0].x, figure.data[0].y, strict=True))
    assert max(bars, key=lambda rank: bars[rank]) == 5
    assert bars[5] == pytest.approx(9, rel=0.01)
    assert figure.layout.xaxis.dtick == 1  # each of few ranks is named


@pytest.mark.parametrize(
    ("step_ns", "hung", "marked"),
    [(1e8, (), {5}), (1e10, (), set()), (None, (), {5}), (1e8, (2,), {2})],
)
def test_only_a_rank_that_is_late_by_much_or_hung_is_marked_as_late(
    run: Analyzer, step_ns: float | None, hung: tuple[int, ...], marked: set[int]
) -> None:
    figure = late_ranks_figure(run.lateness(), step_ns=step_ns, hung=hung)
    colors = dict(zip(figure.data[0].x, figure.data[0].marker.color, strict=True))
    assert {rank for rank, color in colors.items() if color == VERMILLION} == marked


def test_nothing_measured_has_no_bar() -> None:
    empty = pl.DataFrame(schema=LATENESS_SCHEMA)
    assert not late_ranks_figure(empty, step_ns=None).data[0].x
