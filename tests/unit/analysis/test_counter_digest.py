"""Counters read metric by metric say what the frame of all of them says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.show.figures.panel_table import frame_reader, panel_metrics
from haiprof.show.summary import select_judged_samples, select_judged_steps
from tests.unit.report.fake_run import frame_digest
from tests.unit.report.many_ranks import write_many

RUNS = sorted(path for path in (Path(__file__).parents[2] / "data/runs").iterdir() if path.is_dir())


def check(path: Path) -> None:
    run = Analyzer(path)
    counters, judged = run.counters(), select_judged_steps(run.steps())
    inside = select_judged_samples(counters, judged, run.ranks())
    found, expected = run.counter_digest(judged), frame_digest(inside, counters)
    assert (found.span, set(found.present)) == (expected.span, expected.present)
    sources = {"process", "host", "gpu"}
    wanted = {key: own for key, own in expected.stats.items() if key[0] in sources}
    assert found.stats.keys() == wanted.keys()
    for owner, metrics in wanted.items():
        assert found.stats[owner].keys() == metrics.keys()
        for name, stat in metrics.items():
            got = found.stats[owner][name]
            assert (got.min, got.max) == (stat.min, stat.max)
            assert got.mean == pytest.approx(stat.mean, rel=1e-12)
    read = run.read_series(panel_metrics() & set(found.present))
    for frame, reader in ((counters, read), (inside, found.count_series(read))):
        for metric in sorted(panel_metrics()):
            series = reader(*metric)
            same = frame_reader(frame)(*metric)
            assert [own.owner for own in series] == [own.owner for own in same]
            for own, other in zip(series, same, strict=True):
                assert np.array_equal(own.time_ns, other.time_ns)
                assert np.array_equal(own.values, other.values)


@pytest.mark.parametrize("path", RUNS, ids=[path.name for path in RUNS])
def test_counters_of_kept_runs_are_the_same_by_metric_and_as_a_frame(path: Path) -> None:
    check(path)


def test_counters_of_many_ranks_are_the_same_by_metric_and_as_a_frame(tmp_path: Path) -> None:
    check(write_many(tmp_path / "run", ranks=20, steps=30, per_host=8))


def test_page_of_many_ranks_never_holds_all_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from haiprof.show.page.content import page_content

    root = write_many(tmp_path / "run", ranks=20, steps=30, per_host=8)
    monkeypatch.setattr(Analyzer, "counters", lambda _: pytest.fail("read as one frame"))
    page = page_content(Analyzer(root))
    names = [line["name"] for line in page.data["counters"]["lines"]]
    assert {"median of 20", "rank 19"} <= set(names)
    assert isinstance(page.summary.ranks[19].cpu_cores, float)
    assert pl.Series([rank.memory_rss_bytes for rank in page.summary.ranks]).is_not_null().all()
