from __future__ import annotations

from pathlib import Path

from haiprof import Analyzer
from haiprof.run_format.tables import COUNTER_TABLES
from haiprof.show.figures.panel_table import PANEL_ROWS, row_metrics
from tests.unit.rundir.small_run import write_small_run


def test_panels_show_metrics_that_a_run_with_all_sources_has(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run", COUNTER_TABLES)
    counters = Analyzer(run.root).counters()
    known = set(counters.select("source", "metric").unique().rows())
    shown = {metric for row in PANEL_ROWS for metric in row_metrics(row)}
    assert shown - known == set()


def test_row_is_filled_by_the_sources_of_its_metrics() -> None:
    for row in PANEL_ROWS:
        assert {source for source, _ in row_metrics(row)} <= set(row.sources), row.title
