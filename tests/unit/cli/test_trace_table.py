"""`haiprof trace tables`: HTA's cut-offs as options, and what they change."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from haiprof.cli.traces import NAMES
from haiprof.show.views.tables import TABLES
from tests.commands import Run
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three kernels of 60, 30 and 10 us, whose calls take 20, 60 and 5 us."""
    events = [step(1, 0, 1000), event("aten::layer_norm", "cpu_op", 5, 300)]
    for number, (dur, call, delay) in enumerate(((60, 20, 10), (30, 60, 120), (10, 5, 3))):
        at = 10 + number * 250
        events += [
            launch(number + 1, at, call),
            kernel(f"kernel_{number}", at + call + delay, dur, correlation=number + 1),
        ]
    traces = tmp_path / "traces"
    traces.mkdir()
    rank_file(traces, 0, events, world_size=1)
    return traces


def rows(run: Run, *words: object) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run("trace-table", *words, "--json").data["rows"]
    return found


def test_help_names_the_tables_that_there_are() -> None:
    assert tuple(TABLES) == NAMES


def test_kernels_are_limited_by_number_and_by_share(trace: Path, run: Run) -> None:
    def names(*words: object) -> list[str]:
        return [row["name"] for row in rows(run, "kernels", trace, *words)]

    assert names() == ["kernel_0", "kernel_1", "kernel_2"]
    assert names("--num-kernels", 1) == ["kernel_0", "others"]
    assert names("--duration-ratio", 0.85) == ["kernel_0", "kernel_1", "others"]


def test_cutoffs_say_what_an_outlier_is(trace: Path, run: Run) -> None:
    def counted(*words: object) -> tuple[int, int]:
        (row,) = rows(run, "launches", trace, *words)
        return row["runtime_outlier_count"], row["launch_delay_outlier_count"]

    assert counted() == (1, 1)
    assert counted("--runtime-cutoff", 10) == (2, 1)
    assert counted("--launch-delay-cutoff", 200, "--runtime-cutoff", 4) == (3, 0)
    each = rows(run, "single-launches", trace, "--runtime-cutoff", 10)
    assert [row["is_runtime_outlier"] for row in each] == [True, True, False]


def test_counter_traces_go_into_a_new_folder(trace: Path, tmp_path: Path, run: Run) -> None:
    (row,) = rows(run, "counter-traces", trace, "-o", tmp_path / "made" / "here")
    found = json.loads(gzip.decompress(Path(row["path"]).read_bytes()))["traceEvents"]
    assert {one["ph"] for one in found} >= {"C", "X"}
    assert [path.name for path in trace.iterdir()] == ["rank0.json"]


def test_a_table_is_csv_whole_and_a_view_in_a_hundred_columns(trace: Path, run: Run) -> None:
    (row,) = csv.DictReader(io.StringIO(run("trace-table", "annotations", trace, "--csv").out))
    assert (row["name"], row["count"], row["sum_ns"]) == ("ProfilerStep#1", "1", "1000000")
    out = run("trace-table", "annotations", trace).out
    assert "ProfilerStep#1" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(("words", "said"), [
    (["nothing"], "no table nothing"),
    (["kernels", "--top", "3"], "takes no --top"),
    (["sequences"], "of which operator"),
    (["counter-traces", "--steps", "1"], "without --steps"),
])  # fmt: skip
def test_what_does_not_fit_is_said(trace: Path, words: list[str], said: str, run: Run) -> None:
    name, *options = words
    ran = run("trace-table", name, trace, *options, status=2)
    assert said in ran.err


def test_run_in_the_table_s_place_is_told_the_tables_and_the_right_command(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without a log directory
    ran = run("trace", "tables", trace, status=2)
    assert f"trace tables: no table {trace}; there are kernels, launches" in ran.err
    assert f"hint: haiprof trace tables kernels {trace}" in ran.err
