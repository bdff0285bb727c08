"""The frames of a recorded run, through the facade."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.base.errors import RunFormatError, RunNotFoundError, UsageError
from haiprof.run_analysis import run_frames as analyzer_module
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.recorded import (
    GAP_NS,
    SPAN_NS,
    WALL_OFFSET_NS,
    spans_of,
    write_rank,
    write_records,
    write_run,
)

STEP_NS = 4 * (SPAN_NS + GAP_NS)
DEVICE_ROW = (1.0, 20.0, 30.0, 5.0, 60.0, 0)


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path / "run")


def test_steps_are_on_the_unix_clock_and_add_up(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O D F B O"))
    steps = Analyzer(run.root).steps()
    assert steps["start_ns"].to_list() == [1_000 + WALL_OFFSET_NS, 1_000 + WALL_OFFSET_NS + STEP_NS]
    phases = steps.select(pl_host()).sum_horizontal()
    assert phases.to_list() == steps["step_ns"].to_list() == [STEP_NS, STEP_NS - GAP_NS]
    assert steps["boundary"].to_list() == ["dataloader"] * 2
    assert steps["forward_device_ns"].null_count() == 2


def pl_host() -> list[str]:
    return [f"{p}_host_ns" for p in ("dataloader", "forward", "backward", "optimizer", "other")]


def test_phase_that_is_never_seen_is_null_and_one_that_is_missing_in_a_step_is_zero(
    run: RunPaths,
) -> None:
    phases = dict.fromkeys(("forward", "backward", "optimizer"), "ok")
    write_rank(run, spans_of("F B O F B O"), rank=0, phases={**phases, "dataloader": "patched"})
    write_rank(run, spans_of("D F B O D B O"), rank=1)
    analyzer = Analyzer(run.root)
    steps = analyzer.steps()
    assert steps["dataloader_host_ns"].to_list() == [None, None, 100, 100]
    assert steps["forward_host_ns"].to_list() == [100, 100, 100, 0]
    assert "dataloader: patched" in analyzer.ranks()["notes"][0].to_list()


def test_loader_of_the_evaluation_alone_is_not_the_loader_of_the_steps(run: RunPaths) -> None:
    write_rank(run, spans_of("F B O D E END F B O"))
    assert Analyzer(run.root).steps()["dataloader_host_ns"].null_count() == 2


def write_device(
    run: RunPaths, line: str, *rows: tuple[float, ...] | None, table: schema.Table = schema.DEVICE
) -> None:
    """Device records of each optimizer span in turn, none where the row is null."""
    spans = spans_of(line)
    write_rank(run, spans, device="cuda")
    ends = spans.end_ns[spans.kind == schema.OPTIMIZER].tolist()
    width = len(table.columns)
    records = [
        (end, *row, 12.0, 30.0)[:width]
        for end, row in zip(ends, rows, strict=True)
        if row is not None
    ]
    write_records(run.rank(0).device, table, records)


def test_device_times_are_summed_over_the_optimizers_of_a_step(run: RunPaths) -> None:
    write_device(run, "D F B O0 F B O1 " * 2, *[DEVICE_ROW] * 4)
    steps = Analyzer(run.root).steps()
    assert steps["forward_device_ns"].to_list() == [40, 40]
    assert steps["other_device_ns"].to_list() == [8, 8]
    assert steps["idle_device_ns"].to_list() == [24, 24]
    _, _, busy = RunFrames(run.root).step_positions(0)
    assert busy is not None
    assert (busy[1] - busy[0]).tolist() == [30] * 4


@pytest.mark.parametrize(("line", "rows", "expected"), [
    ("D F B O D F B O", [DEVICE_ROW, None], [20, None]),
    ("D F B O D F B O", [DEVICE_ROW, (*DEVICE_ROW[:-1], 1)], [20, None]),
    ("D F B O D F B O", [(float("nan"), *[float("nan")] * 4, 0), DEVICE_ROW], [None, 20]),
    ("D F B S(O) D F B S D F B S(O) D F B S(O)", [DEVICE_ROW] * 3, [20, None, None, 20]),
    ("D F B O E D F B O", [DEVICE_ROW] * 2, [20, 20]),
    ("D N F B O D N F B O", [DEVICE_ROW] * 2, [None, None]),
])  # fmt: skip
def test_device_time_is_null_where_it_is_not_known(
    run: RunPaths, line: str, rows: list[tuple[float, ...] | None], expected: list[int | None]
) -> None:
    write_device(run, line, *rows)
    assert Analyzer(run.root).steps()["forward_device_ns"].to_list() == expected


def test_recordings_without_idle_times_have_their_device_times(run: RunPaths) -> None:
    old = schema.Table("device", schema.DEVICE.columns[:-2])
    write_device(run, "D F B O0 F B O1 " * 2, *[DEVICE_ROW] * 4, table=old)
    steps = Analyzer(run.root).steps()
    assert steps["forward_device_ns"].to_list() == [40, 40]
    assert steps["idle_device_ns"].to_list() == [None, None]
    assert RunFrames(run.root).step_positions(0)[2] is None


def test_device_other_time_is_null_just_after_an_evaluation(run: RunPaths) -> None:
    write_device(run, "D F B O E D F B O D F B O", *[DEVICE_ROW] * 3)
    assert Analyzer(run.root).steps()["other_device_ns"].to_list() == [4, None, 4]


def test_phases_have_names_steps_and_exclusive_times(run: RunPaths) -> None:
    write_rank(run, spans_of("D O0(F B) GC E SAVE"))
    spans = Analyzer(run.root).phases()
    rows = spans.select("phase", "name", "step", "self_ns").rows()
    assert rows == [
        ("dataloader", None, 0, SPAN_NS),
        ("optimizer", "AdamW", 0, 3 * GAP_NS),
        ("forward", "GPT", 0, SPAN_NS),
        ("backward", None, 0, SPAN_NS),
        ("gc", None, 0, SPAN_NS),
        ("eval", "GPT", None, SPAN_NS),
        ("save", None, None, SPAN_NS),
    ]


def test_ranks_tell_what_was_recorded_and_what_it_cost(run: RunPaths) -> None:
    lines: list[dict[str, object]] = [
        {"type": "record_start", "time_ns": 900, "optimizer_steps_before": 0},
        {"type": "cost", "event_count": 1, "event_ns": 9, "elapsed_ns": 50, "drain_cpu_ns": 1},
        {"type": "cost", "event_count": 8, "event_ns": 100, "elapsed_ns": 10_000,
         "module_call_ns": 25, "drain_cpu_ns": 300, "sampling_held_ns": 100},
        {"type": "record_end", "time_ns": 5_000, "reason": "time"},
        {"type": "patch_failed", "phase": "forward", "reason": "no such name"},
    ]  # fmt: skip
    write_rank(run, spans_of("D F B O E D F B O D F B"), lines=lines, rank=3)
    (row,) = Analyzer(run.root).ranks().rows(named=True)
    assert (row["rank"], row["pid"], row["host"], row["step_count"]) == (3, 103, "node0", 2)
    assert (row["eval_ns"], row["unfinished_micro_step_count"]) == (SPAN_NS, 1)
    assert row["record_end_ns"] - row["record_start_ns"] == 4_100
    assert row["recording_ended"] == "time"
    steps = Analyzer(run.root).steps()["step_ns"]
    assert row["cost_ns_per_step"] == (8 * 100 + 100) / 2
    assert row["cost_ratio"] == pytest.approx(450.0 / float(steps.to_numpy().mean()))
    assert row["beside_cpu_ratio"] == 0.03
    assert "forward is not measured: no such name" in row["notes"]
    assert "1 forward and backward pass after the last step belongs to no step" in row["notes"]


def test_rank_that_cannot_be_read_leaves_the_others(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"), rank=0)
    write_rank(run, spans_of("D F B O"), rank=1)
    run.rank(1).phases.write_bytes(b"\0" * 50)
    analyzer = Analyzer(run.root)
    assert analyzer.steps()["rank"].to_list() == [0]
    assert analyzer.ranks()["step_count"].to_list() == [1, None]
    assert any("ranks/1/phases.rec" in note for note in analyzer.notes())


def test_restarted_rank_has_attempts(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"), rank=0)
    write_rank(run, spans_of("D F B O D F B O"), rank=0, attempt=1)
    steps = Analyzer(run.root).steps()
    assert steps.select("attempt", "step").rows() == [(0, 0), (1, 0), (1, 1)]


def test_log_directory_gives_its_newest_run(tmp_path: Path) -> None:
    old, new = write_run(tmp_path / "b"), write_run(tmp_path / "a")
    content = json.loads(new.manifest.read_bytes())
    new.manifest.write_text(json.dumps({**content, "start_wall_ns": 2**62, "name": "newest"}))
    assert Analyzer(tmp_path).manifest().name == "newest"
    assert Analyzer(old.root).run == old
    assert Analyzer(old.root).steps().height == 0


def test_manifest_that_is_damaged_is_an_error_only_for_who_asks(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"))
    run.manifest.write_bytes(b"{")
    analyzer = Analyzer(run.root)
    assert analyzer.steps().height == 1
    assert any("run.json" in note for note in analyzer.notes())
    with pytest.raises(RunFormatError, match=r"run\.json"):
        analyzer.manifest()


def test_constructor_does_not_read(tmp_path: Path) -> None:
    analyzer = Analyzer(tmp_path / "later")
    with pytest.raises(RunNotFoundError):
        analyzer.steps()
    shutil.copytree(write_run(tmp_path / "x").root, tmp_path / "later")
    assert analyzer.steps().height == 0


def test_part_of_a_run_keeps_numbers_and_leaves_the_rest_out(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O D F B O D F B O SAVE D F B O"))
    whole = Analyzer(run.root)
    third = whole.steps().row(2, named=True)
    part = whole.last((third["step_ns"] + 4 * (SPAN_NS + GAP_NS)) / 1e9)
    assert part.steps()["step"].to_list() == [2, 3]
    assert part.phases()["step"].drop_nulls().unique().to_list() == [2, 3]
    assert part.pauses().height == 1
    assert part.ranks()["step_count"].to_list() == [2]
    assert "looked at" in part.notes()[0]
    first = third["start_ns"]
    before = Analyzer(run.root, between=(0, first))
    assert before.steps()["step"].to_list() == [0, 1]
    assert before.pauses().height == 0
    assert Analyzer(run.root, between=(0, 1)).steps().height == 0


def test_spans_that_are_too_many_to_keep_are_read_again_and_are_the_same(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rank(run, spans_of("D F B O GC D F B O E"), rank=0)
    write_rank(run, spans_of("D F B O SAVE D F B O"), rank=1)
    kept = Analyzer(run.root)
    monkeypatch.setattr(analyzer_module, "_KEPT_RECORDS", 0)
    again = Analyzer(run.root)
    assert again.steps().equals(kept.steps())
    with run.rank(1).phases.open("ab") as file:  # the job goes on
        file.write(run.rank(1).phases.read_bytes()[-schema.PHASES.record_bytes :])
    assert again.phases().equals(kept.phases())
    run.rank(0).phases.unlink()
    assert Analyzer(run.root).phases()["rank"].unique().to_list() == [1]


def test_traceback_of_an_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        Analyzer(write_run(tmp_path / "run").root).describe("stepz")
    assert caught.value.__notes__ == [f"hint: {caught.value.hint}"]
    assert "steps" in caught.value.hint
