"""Trace windows of a run: what was recorded, and which steps it made slower."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.agent.trace_finisher import finish_parts
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.run_notes import traced_lines
from haiprof.run_analysis.windows import WINDOW_SCHEMA
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.raw_traces import Part
from haiprof.run_format.writer import LineWriter
from haiprof.show.summary import overview_summary
from tests.unit.analysis.recorded import CLOCK, spans_from, write_rank, write_run
from tests.unit.launch.parts import part_of, put_down

STEP_NS = 10_000_000
HOST = "node0"
START = {"type": "record_start", "time_ns": CLOCK.mono_ns, "optimizer_steps_before": 0}
END = {"type": "record_end", "time_ns": CLOCK.mono_ns + 1, "reason": "exit"}


def steps_of(durations: list[int]) -> list[tuple[int, int, int, int]]:
    """Spans (data, forward, backward, optimizer) of steps with these lengths, without gaps."""
    kinds = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
    rows, time = [], CLOCK.mono_ns
    for duration in durations:
        for kind in kinds:
            rows.append((kind, 0, time, time + duration // 4))
            time += duration // 4
    return rows


def traced_run(
    folder: Path,
    durations: list[int],
    *,
    ranks: int = 1,
    lines: Mapping[int, list[dict[str, Any]]] | None = None,
    **options: object,
) -> RunPaths:
    """A run with tracing on, whose ranks have these steps and these lines."""
    run = write_run(folder / "run")
    manifest = read_manifest(run)
    end_ns = manifest.start_wall_ns + 1
    options = {"trace": True, **options}
    write_manifest(run, replace(manifest, options=options, end_wall_ns=end_ns))
    run.trace_parts.mkdir(parents=True)
    for rank in range(ranks):
        own = (lines or {}).get(rank, [])
        write_rank(run, spans_from(steps_of(durations)), rank=rank, lines=[START, *own, END])
    return run


def window_line(part: Part, **more: Any) -> dict[str, Any]:
    return {
        "type": "trace_window", "time_ns": 5, "window": 0, "state": "recorded",
        "reason": "option", "steps": [20, 25], "stall_ns": 9, "stem": part.stem.text, **more,
    }  # fmt: skip


def recorded(run: RunPaths, part: Part, steps: tuple[int, int], **facts: Any) -> None:
    """Puts a window of these steps down, each `STEP_NS` long, and finishes it."""
    first, end = steps
    times = {
        "start_mono_ns": CLOCK.mono_ns + first * STEP_NS,
        "end_mono_ns": CLOCK.mono_ns + end * STEP_NS,
    }
    put_down(part, steps=[first, end], **{**times, **facts})
    run.node(HOST).root.mkdir(parents=True, exist_ok=True)
    writer = LineWriter(run.node(HOST).events)
    finish_parts(run, writer.append)
    writer.close()


def part(run: RunPaths, rank: int = 0, **more: Any) -> Part:
    return part_of(run, rank, host=HOST, pid=100 + rank, **more)


def test_run_without_tracing_has_no_windows_and_no_lines(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 30, trace=False)
    analyzer = Analyzer(run.root)
    assert analyzer.windows().is_empty()
    assert dict(analyzer.windows().schema) == WINDOW_SCHEMA
    assert not analyzer.steps()["traced"].any()
    assert diagnose(analyzer).traces == ()


def test_window_has_its_files_its_steps_and_what_it_cost(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 60, ranks=2)
    for rank in (0, 1):
        own = part(run, rank)
        writer = LineWriter(run.rank(rank).events)
        writer.append(window_line(own))
        writer.close()
        recorded(run, own, (20, 25), stop_ns=3, export_ns=7, start_ns=2, setup_ns=1)
    windows = Analyzer(run.root).windows()
    assert windows["rank"].to_list() == [0, 1]
    row = windows.row(1, named=True)
    assert (row["state"], row["trigger"], row["reason"]) == ("recorded", "option", None)
    assert (row["first_step"], row["end_step"], row["stall_ns"]) == (20, 25, 9)
    assert row["start_ns"] == CLOCK.wall_ns + 20 * STEP_NS
    assert Path(row["path"]) == part(run, 1).trace
    assert row["bytes"] == part(run, 1).trace.stat().st_size
    lines = diagnose(Analyzer(run.root)).traces
    assert lines[0].startswith("steps 20 to 24 on ranks 0 and 1: 2 files, ")
    assert lines[0].endswith(f"in {run.traces}; training stopped for 9.00 ns at most")
    assert f"haiprof trace report {run.root}" in lines[-1]


def test_traced_steps_are_marked_with_rehearsal_before_and_the_stall_after(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 60)
    recorded(run, part(run), (20, 25), stop_ns=STEP_NS // 10, export_ns=STEP_NS // 10)
    steps = Analyzer(run.root).steps()
    assert steps.filter("traced")["step"].to_list() == list(range(17, 26))


def test_microseconds_over_the_edge_mark_no_further_step(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 60)
    begin, end = (CLOCK.mono_ns + step * STEP_NS for step in (20, 25))
    facts = {"start_mono_ns": begin - 5_000, "end_mono_ns": end + 5_000}
    recorded(run, part(run), (20, 25), **facts)
    steps = Analyzer(run.root).steps()
    assert steps.filter("traced")["step"].to_list() == list(range(17, 25))


def test_slow_traced_steps_do_not_move_the_medians(tmp_path: Path) -> None:
    durations = [STEP_NS] * 20 + [5 * STEP_NS] * 30 + [STEP_NS] * 10
    run = traced_run(tmp_path, durations)
    end = CLOCK.mono_ns + (20 + 5 * 30) * STEP_NS
    recorded(run, part(run), (20, 50), end_mono_ns=end)
    analyzer = Analyzer(run.root)
    found = diagnose(analyzer)
    assert found.step_ns == STEP_NS
    assert found.step_count == 60
    assert overview_summary(analyzer).ranks[0].median_step_ns == STEP_NS
    assert (
        "33 steps of all ranks are left out of averages and findings: 30 in the traces, "
        "3 in which the profiler started or stopped"
    ) in found.traces


def test_run_that_was_traced_whole_is_judged_all_the_same(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 30)
    recorded(run, part(run), (0, 30))
    found = diagnose(Analyzer(run.root))
    assert found.step_ns == STEP_NS
    assert "30 of 30 steps were traced, which makes steps slower" in found.traces


def test_part_that_is_judged_has_its_own_steps_and_traces_alone(tmp_path: Path) -> None:
    """As `haiprof verdict --collect` judges what a running job does from its start on."""
    run = traced_run(tmp_path, [STEP_NS] * 60)
    for number, steps in enumerate([(10, 13), (50, 52)]):
        recorded(run, part(run, start=1000 + number), steps)
    found = diagnose(Analyzer(run.root), since_ns=CLOCK.wall_ns + 40 * STEP_NS)
    assert found.step_count == 20
    assert [line.partition(" on ")[0] for line in found.traces[:-2]] == ["steps 50 to 51"]
    assert found.traces[-2].endswith("2 in the traces, 3 in which the profiler started or stopped")
    found = diagnose(Analyzer(run.root), since_ns=CLOCK.wall_ns + 60 * STEP_NS)
    assert found.headline.startswith("no training steps: none began in the time that is judged")
    assert "haiprof snapshot" in found.headline
    assert found.traces == ()


def test_window_that_lies_raw_is_found_with_its_size(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 30)
    own = put_down(part(run), et="{}")
    row = Analyzer(run.root).windows().row(0, named=True)
    assert (row["state"], row["path"]) == ("recorded", str(own.raw))
    assert row["et_path"] == str(own.et_raw)
    assert row["bytes"] == row["raw_bytes"] == own.raw.stat().st_size


@pytest.mark.parametrize("state", ["refused", "failed"])
def test_refused_window_says_why_and_on_which_ranks(tmp_path: Path, state: str) -> None:
    reason = "the job's own profiler runs"
    line = {"type": "trace_window", "window": 0, "state": state, "reason": reason}
    lines = {rank: [line] for rank in (0, 1, 3)}
    run = traced_run(tmp_path, [STEP_NS] * 30, ranks=4, lines=lines)
    analyzer = Analyzer(run.root)
    assert analyzer.windows()["state"].to_list() == [state, state, "not reached", state]
    said = diagnose(analyzer).traces
    assert said[0] == f"ranks 0, 1 and 3: not traced: {reason}"
    assert said[1].startswith("rank 2: not traced: the job ended at step 30")


def test_rank_that_never_reached_the_window_says_so(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 60, steps="100:105")
    (row,) = Analyzer(run.root).windows().to_dicts()
    assert (row["state"], row["reason"]) == (
        "not reached", "the job ended at step 60, before step 100",
    )  # fmt: skip
    assert diagnose(Analyzer(run.root)).traces == (
        "rank 0: not traced: the job ended at step 60, before step 100",
    )


def test_running_job_has_not_missed_its_window(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_manifest(run, replace(read_manifest(run), options={"trace": True, "steps": "100:105"}))
    write_rank(run, spans_from(steps_of([STEP_NS] * 30)), lines=[START])
    assert Analyzer(run.root).windows().is_empty()


def test_cut_window_is_kept_and_says_why(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 23)
    recorded(run, part(run), (20, 23), cut="the job ended")
    (row,) = Analyzer(run.root).windows().to_dicts()
    assert (row["state"], row["reason"]) == ("cut", "the job ended")
    assert diagnose(Analyzer(run.root)).traces[0].endswith("; cut: the job ended")


def test_window_of_a_killed_rank_is_a_failed_one(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 23)
    run.node(HOST).root.mkdir(parents=True)
    writer = LineWriter(run.node(HOST).events)
    stem = part(run).stem.text
    writer.append(
        {"type": "trace_dropped", "stem": stem, "bytes": 7, "reason": "the process ended"}
    )
    writer.close()
    (row,) = Analyzer(run.root).windows().to_dicts()
    assert (row["rank"], row["state"], row["reason"]) == (0, "failed", "the process ended")


def test_windows_that_were_not_kept_are_one_line(tmp_path: Path) -> None:
    lines = [
        {"type": "trace_window", "window": n, "state": "dropped", "reason": "no step was slow"}
        for n in range(40)
    ]
    run = traced_run(tmp_path, [STEP_NS] * 30, lines={0: lines})
    assert diagnose(Analyzer(run.root)).traces == (
        "40 windows of rank 0 not kept: no step was slow",
    )
    lines = [
        {"type": "trace_window", "window": n, "state": "failed", "reason": f"reason {n}"}
        for n in range(20)
    ]
    run = traced_run(tmp_path / "kinds", [STEP_NS] * 30, lines={0: lines})
    found = diagnose(Analyzer(run.root)).traces
    assert len(found) == 6
    assert found[-1].startswith("and 15 more")


@pytest.mark.parametrize("damage", [
    {"window": "x", "steps": "20:25", "state": 7, "reason": [], "stem": 3},
    {"steps": [1, 2, 3], "stall_ns": 1 << 80, "stem": "../../x"},
    {"steps": [None, {}], "start_mono_ns": "now", "end_mono_ns": 1e300, "stem": None},
    {"steps": [5, 3], "start_mono_ns": -(1 << 62), "end_mono_ns": 1 << 62},
])  # fmt: skip
def test_damaged_lines_cost_their_window_and_no_more(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    line = {"type": "trace_window", **damage}
    run = traced_run(tmp_path, [STEP_NS] * 30, lines={0: [line]})
    node = run.node(HOST)
    node.root.mkdir(parents=True)
    node.events.write_text(
        "".join(
            json.dumps({"type": kind, "stem": stem, "part": damage}) + "\n"
            for kind in ("trace_written", "trace_dropped")
            for stem in ("../../etc/passwd", 7, None, "rank0_node0_100.77")
        )
    )
    analyzer = Analyzer(run.root)
    assert analyzer.windows().height >= 1
    assert analyzer.windows()["path"].null_count() == analyzer.windows().height
    assert analyzer.steps().height == 30
    assert traced_lines(analyzer)


def test_restarted_rank_has_windows_of_both_attempts(tmp_path: Path) -> None:
    run = traced_run(tmp_path, [STEP_NS] * 30)
    write_rank(run, spans_from(steps_of([STEP_NS] * 30)), attempt=1, pid=900, lines=[START, END])
    recorded(run, part(run), (5, 8))
    second = part_of(run, 0, host=HOST, pid=900, start=7000)
    recorded(run, second, (10, 12), attempt=1)
    analyzer = Analyzer(run.root)
    windows = analyzer.windows()
    assert windows.select("attempt", "first_step").rows() == [(0, 5), (1, 10)]
    traced = analyzer.steps().filter("traced").group_by("attempt").agg(pl.len()).sort("attempt")
    assert traced.rows() == [(0, 6), (1, 5)]


def test_what_was_watched_for_slow_steps_is_said_with_its_price(tmp_path: Path) -> None:
    line = {
        "type": "keep_slow", "time_ns": 5, "steps": 12_000, "watched": 1200, "slow_seen": 7,
        "slow_kept": 1, "kept_limit": 1, "cost_ns": 6 * 10**9, "usual_ns": STEP_NS,
        "cost_ratio": 0.049, "budget_ratio": 0.05,
        "memory_bytes": 12_000_000, "kept_bytes": 3_000_000, "refused": None,
    }  # fmt: skip
    run = traced_run(tmp_path, [STEP_NS] * 30, lines={0: [{**line, "steps": 9}, line]},
                     keep_slow=True)  # fmt: skip
    analyzer = Analyzer(run.root)
    first, second, *_ = traced_lines(analyzer)
    assert "1,200 of 12,000 steps (10 %) for 4.9 % of the time (--slow-cost 0.05)" in first
    assert "at most 11.4 MiB of memory per rank, 2.86 MiB of disk" in first
    assert "7 slow steps on the rank with most, 1 window kept" in second
    assert "a chance of 10 %, with --slow-cost 0.5 nearly always" in second
    assert "1 window kept, as many as --repeat 1 asks for: no later step was watched" in second
    assert first in diagnose(analyzer).traces
    assert first in overview_summary(analyzer).traces


@pytest.mark.parametrize("damage", [None, "x", -1, 1e300, True, [], {}])
def test_what_was_watched_may_be_damaged(damage: object, tmp_path: Path) -> None:
    fields = ("steps", "watched", "slow_seen", "cost_ratio", "budget_ratio", "memory_bytes")
    line = {"type": "keep_slow", **dict.fromkeys(fields, damage)}
    run = traced_run(tmp_path, [STEP_NS] * 30, lines={0: [line]}, keep_slow=True)
    analyzer = Analyzer(run.root)
    assert not any("watched" in line for line in traced_lines(analyzer))
