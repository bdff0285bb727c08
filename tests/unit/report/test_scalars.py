from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.show.scalars import Progress, new_points
from tests.unit.report.fake_run import START_NS, empty_run, two_rank_run


def test_points_of_two_looks_are_each_taken_once(tmp_path: Path) -> None:
    data = two_rank_run(tmp_path, steps=20)
    early = data.steps().filter(data.steps()["step"] < 9)
    first, progress = new_points(early, data.counters(), Progress(), complete=False)
    second, _ = new_points(data.steps(), data.counters(), progress, complete=True)
    steps = [(p.rank, p.step) for p in (*first, *second) if "step_ms" in p.values]
    assert sorted(steps) == [(rank, step) for rank in (0, 1) for step in range(20)]
    assert not any("rss_gib" in p.values for p in second)


def test_points_last_step_of_a_running_job_waits(tmp_path: Path) -> None:
    data = two_rank_run(tmp_path, steps=3)
    points, _ = new_points(data.steps(), data.counters(), Progress(), complete=False)
    assert max(p.step for p in points if "step_ms" in p.values) == 1


def test_points_carry_phases_in_ms_and_the_steps_time(tmp_path: Path) -> None:
    points, _ = new_points(
        two_rank_run(tmp_path).steps(), empty_run(tmp_path).counters(), Progress(), complete=True
    )
    assert points[0].wall_ns == START_NS
    assert points[0].values["forward_ms"] == pytest.approx(60.0)
    assert points[0].values["step_ms"] == pytest.approx(160.0)


def test_points_of_fast_steps_are_thinned(tmp_path: Path) -> None:
    data, end_ns = empty_run(tmp_path), START_NS
    for step in range(2000):
        end_ns = data.add_step(0, step, end_ns, (0.1, 0.2, 0.1, 0.05, 0.05))
    points, _ = new_points(data.steps(), data.counters(), Progress(), complete=True)
    assert 45 <= len(points) <= 51
    assert min(b.wall_ns - a.wall_ns for a, b in pairwise(points)) >= (20 * NS_PER_MS)


def test_points_step_goes_on_through_a_restart(tmp_path: Path) -> None:
    data = empty_run(tmp_path)
    for attempt in (0, 1):
        data.add_step(0, 0, START_NS + attempt * NS_PER_S, (1.0, 1.0, 1.0, 1.0, 1.0))
        data.step_rows[-1]["attempt"] = attempt
    points, _ = new_points(data.steps(), data.counters(), Progress(), complete=True)
    assert [p.step for p in points] == [0, 1]
