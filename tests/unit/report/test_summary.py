"""Summaries of runs and ranks, live scalars, and the header of a run."""

from __future__ import annotations

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.errors import MissingDataError
from haiprof.base.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from haiprof.cli.output import json_text
from haiprof.diagnosis.engine import diagnose
from haiprof.show.card import view_text
from haiprof.show.rank_summary import one_rank_summary
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.scalars import Progress, new_points
from haiprof.show.summary import overview_summary
from haiprof.show.text import steps_text
from haiprof.show.views.run import overview_view, rank_view
from tests.unit.report.fake_run import START_NS, empty_run, two_rank_run
from tests.unit.report.many_ranks import write_many


def test_overview_summary_has_what_was_put_in(tmp_path: Path) -> None:
    found = overview_summary(two_rank_run(tmp_path, gpu=True))
    slow = found.ranks[1]
    assert (slow.rank, slow.step_count, slow.median_step_ns) == (1, 200, 180 * NS_PER_MS)
    assert slow.split_ns["forward"] == 80 * NS_PER_MS
    assert slow.cpu_cores == pytest.approx(1.0)
    assert slow.memory_rss_bytes == 1.5 * BYTES_PER_GIB
    assert slow.gpu_utilization_ratio == pytest.approx(0.3)
    assert found.nodes[0].memory_used_bytes == 6 * BYTES_PER_GIB
    assert found.gpus[1].power_watts == pytest.approx(212.0)
    assert found.missing.keys().isdisjoint({"processes", "node", "GPU"})
    assert "InfiniBand" in found.missing


def test_ranks_have_the_mean_step_of_the_verdict(tmp_path: Path) -> None:
    run = Analyzer(write_many(tmp_path / "run", ranks=2, steps=60))
    found, verdict = overview_summary(run).ranks, diagnose(run)
    assert [one_rank_summary(run, rank).mean_step_ns for rank in (0, 1)] == [
        rank.mean_step_ns for rank in found
    ]
    assert sum(rank.mean_step_ns or 0.0 for rank in found) / 2 == pytest.approx(verdict.step_ns)
    for phase, ns in verdict.split.items():
        assert sum(rank.split_ns[phase] or 0.0 for rank in found) / 2 == pytest.approx(ns or 0.0)


def test_overview_summary_says_why_something_is_missing(tmp_path: Path) -> None:
    found = overview_summary(two_rank_run(tmp_path))
    assert found.ranks[0].gpu_utilization_ratio is None
    assert found.ranks[0].device_split_ns is None
    assert "GPU" in found.missing
    rank = found.ranks[0]
    assert sum(ns or 0.0 for ns in rank.split_ns.values()) == pytest.approx(rank.mean_step_ns)
    assert (rank.mean_step_ns or 0.0) > (rank.median_step_ns or 0.0)  # of one slow step
    data = two_rank_run(tmp_path)
    node = data.run.node("node-1")
    node.root.mkdir(parents=True)
    node.events.write_text('{"type":"counter_missing","source":"gpu","reason":"no NVML"}\n')
    assert overview_summary(data).missing["GPU"] == "no NVML"
    data = empty_run(tmp_path, options={"recorder": ["phases", "host"]})
    assert "--recorder" in overview_summary(data).missing["processes"]
    found = overview_summary(empty_run(tmp_path))
    assert (found.ranks, found.series, found.span) == ((), (), None)


def disturbed_run(folder: Path) -> Any:
    """Two ranks with a slow first step, traced ones, a start-up, and memory that falls to 0."""
    data = two_rank_run(folder)
    for row in data.step_rows:
        if row["step"] == 0:
            row["forward_host_ns"] = int(str(row["forward_host_ns"])) + 20_000 * NS_PER_MS
            row["step_ns"] = int(str(row["step_ns"])) + 20_000 * NS_PER_MS
            row["start_ns"] = int(str(row["start_ns"])) - 20_000 * NS_PER_MS
        row["traced"] = row["step"] in (100, 101)
        if row["traced"]:
            row["backward_host_ns"] = int(str(row["backward_host_ns"])) + 5000 * NS_PER_MS
            row["step_ns"] = int(str(row["step_ns"])) + 5000 * NS_PER_MS
    end_ns = max(int(str(row["start_ns"])) + int(str(row["step_ns"])) for row in data.step_rows)
    for rank in (0, 1):
        for second, gib in ((-15, 40.0), (60, 0.0)):  # loading a checkpoint; the process ends
            time_ns = (START_NS if second < 0 else end_ns) + second * NS_PER_S
            data.add_sample(time_ns, "memory_rss_bytes", gib * BYTES_PER_GIB, source="process",
                            rank=rank)  # fmt: skip
    return data


def test_no_screen_counts_warm_up_traced_steps_or_the_end_of_a_process(tmp_path: Path) -> None:
    data = disturbed_run(tmp_path)
    overview, rank = overview_summary(data), one_rank_summary(data, 1)
    for found in (*overview.series, *rank.counter_series, *rank.phase_series):
        if found.title == "step time":
            longest_ms = 456 if found.label == "rank 0" else 180
            assert found.max == longest_ms * NS_PER_MS
        if found.title.startswith("memory of ranks"):
            assert found.max == found.mean == 1.5 * BYTES_PER_GIB
            assert all(value in (None, 1.5 * BYTES_PER_GIB) for value in found.values)
    assert overview.ranks[0].memory_rss_bytes == 1.5 * BYTES_PER_GIB
    assert not {0, 100, 101} & {slow.step for slow in rank.slowest}
    assert {stat.phase: stat.max_ns for stat in rank.phases}["backward"] == 80 * NS_PER_MS
    assert overview.window is not None
    assert overview.span is not None
    assert overview.span.start_ns < overview.window.start_ns
    assert overview.window.end_ns < overview.span.end_ns


def test_every_screen_has_the_same_number_of_steps(tmp_path: Path) -> None:
    assert steps_text(400, 2) == "2 ranks · 200 steps each"
    assert steps_text(401, 2) == "2 ranks · 401 steps together"
    assert steps_text(1, 1) == "1 rank · 1 step"
    data = disturbed_run(tmp_path)
    for width in (80, 120):
        text = view_text(overview_view(overview_summary(data), width=width), width=width)
        assert "2 ranks · 200 steps each" in text
    assert "200 steps" in view_text(rank_view(one_rank_summary(data, 1)), width=80)


def test_overview_summary_is_plain_json(tmp_path: Path) -> None:
    content = json.loads(json_text(overview_summary(two_rank_run(tmp_path)).as_json()))
    assert content["ranks"][0]["split_ns"]["forward"] == 60 * NS_PER_MS
    assert content["ranks"][0]["gpu_power_watts"] is None


def test_rank_summary_names_the_slow_step_and_its_phase(tmp_path: Path) -> None:
    slowest = one_rank_summary(two_rank_run(tmp_path), 0).slowest[0]
    assert (slowest.step, slowest.longest_excess) == (50, "dataloader")
    assert slowest.longest_excess_ns == 296 * NS_PER_MS
    events = {e.phase: e for e in one_rank_summary(two_rank_run(tmp_path), 0).events}
    assert (events["gc"].count, events["save"].total_ns) == (1, 900 * NS_PER_MS)


def test_rank_summary_takes_the_last_attempt(tmp_path: Path) -> None:
    data = two_rank_run(tmp_path)
    data.rank_rows.append({**data.rank_rows[0], "attempt": 1})
    found = one_rank_summary(data, 0)
    assert (found.attempt, found.other_attempts, found.step_count) == (1, (0,), 0)


def test_rank_summary_unknown_rank_says_which_there_are(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match="no rank 7") as caught:
        one_rank_summary(two_rank_run(tmp_path), 7)
    assert "0, 1" in caught.value.hint


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


GOES_ON: dict[str, Any] = {"end_wall_ns": None, "exit_status": None}


def header(folder: Path, **manifest: Any) -> RunHeader:
    run = empty_run(folder, **manifest).run
    return run_header(run, manifest_or_none(run))


@pytest.mark.parametrize(("manifest", "state", "outcome", "duration_ns"), [
    pytest.param({}, "ended", "ended, exit 0", 63 * NS_PER_S, id="ended"),
    pytest.param({"exit_status": None, "signal": "SIGTERM"}, "ended", "ended by SIGTERM",
                 63 * NS_PER_S, id="signal"),
    pytest.param({**GOES_ON, "start_wall_ns": NS_PER_S}, "killed", None, None,
                 id="pid-of-a-younger-process"),
    pytest.param({**GOES_ON, "launcher_pid": 2**22 + 1}, "killed", None, None,
                 id="no-launcher"),
])  # fmt: skip
def test_header_says_how_the_run_ended(
    tmp_path: Path, manifest: dict[str, Any], state: str, outcome: str | None, duration_ns: int
) -> None:
    found = header(tmp_path, **manifest)
    assert (found.state, found.duration_ns) == (state, duration_ns)
    assert outcome in (None, found.outcome)


def test_header_run_with_living_launcher_is_running(tmp_path: Path) -> None:
    found = header(tmp_path, **GOES_ON, start_wall_ns=time.time_ns())
    assert found.state == "running"
    assert found.duration_ns is not None


def test_header_run_of_another_host_lives_while_its_files_grow(tmp_path: Path) -> None:
    record = tmp_path / "nodes" / "far" / "host.rec"
    record.parent.mkdir(parents=True)
    record.write_bytes(b"")
    assert header(tmp_path, **GOES_ON, host="far").state == "running"
    os.utime(record, (time.time() - 3600, time.time() - 3600))
    assert header(tmp_path, **GOES_ON, host="far").state == "killed"


def test_header_damaged_manifest_still_names_the_run(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "train-1").run
    run.manifest.write_text("{")
    found = run_header(run, manifest_or_none(run))
    assert (found.name, found.start_wall_ns) == ("train-1", None)
    assert found.state == found.outcome == "damaged"
