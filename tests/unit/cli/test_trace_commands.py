from __future__ import annotations

import gzip
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl
import pytest

from haiprof.base.errors import UsageError
from haiprof.cli.shared import parse_steps
from haiprof.trace_analysis import report as report_module
from haiprof.trace_analysis.report import SECTIONS
from tests.commands import Run
from tests.sampling import first_of
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    Event,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
    write_trace,
)


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HAIPROF_DEBUG")]:
        monkeypatch.delenv(name)


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """Two ranks of two steps; rank 1 computes for twice as long."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for rank in (0, 1):
        rank_file(folder, rank, [
            step(1, 0, 100), step(2, 100, 100), launch(5, 5), launch(6, 105),
            kernel("gemm", 10, 20 * (rank + 1), correlation=5),
            kernel("gemm", 110, 20 * (rank + 1), correlation=6),
        ])  # fmt: skip
    return folder


def test_report_shows_people_tables_and_the_next_command(ranks: Path, run: Run) -> None:
    _, out, err = run("trace-report", ranks)
    assert "2 ranks" in out.splitlines()[1]
    assert "profiler steps 1 to 2" in out.splitlines()[1]
    titles = ("GPU time", "Steps as", "Kernels by", "Idle time of", "Launches", "Launch queues")
    for title in titles:
        assert any(line.startswith(title) for line in out.splitlines()), title
    assert "no collective" in out
    assert f"next: haiprof trace query {ranks} --schema" in err
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize("command", ["trace report", "report"])
@pytest.mark.parametrize(
    ("text", "why"), [('{"traceEvents": [{"ph": "X", "na', "cut off"), ("[]", "no events")]
)
def test_report_of_a_trace_without_anything_readable_is_one_error(
    command: str, text: str, why: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.json"
    path.write_text(text)
    _, out, err = run(*command.split(), path, status=5)
    assert out == ""
    assert f"{path}: nothing to report: " in err
    assert why in err
    assert sorted(tmp_path.glob("*.html")) == []


def test_report_as_json_is_all_that_is_printed(ranks: Path, run: Run) -> None:
    ran = run("trace-report", ranks, "--json", "--steps", "2")
    found = ran.data
    assert ran.err == ""
    assert (found["ranks"], found["steps"]) == ([0, 1], [2, 3])
    assert [row["compute_ns"] for row in found["tables"]["temporal"]] == [20_000, 40_000]


def test_report_as_csv_is_one_file_per_table(ranks: Path, tmp_path: Path, run: Run) -> None:
    folder = tmp_path / "new" / "tables"
    err = run("trace-report", ranks, "--csv", folder, "--rank", 1).err
    assert {path.stem for path in folder.iterdir()} < set(SECTIONS)
    assert pl.read_csv(folder / "temporal.csv")["compute_ns"].to_list() == [80_000]
    assert f"tables to {folder}" in err
    assert "already exists" in run("trace-report", ranks, "--csv", folder, status=2).err
    assert pl.read_csv(folder / "temporal.csv").height == 1
    run("trace-report", ranks, "--csv", folder, "--force")
    assert pl.read_csv(folder / "temporal.csv").height == 2


@pytest.mark.parametrize(("words", "status", "message"), [
    (["trace-report", "/nowhere.json"], 4, "/nowhere.json"),
    (["trace-report", "{}", "--steps", "9:10"], 5, "it has 1 to 2"),
    (["trace-report", "{}", "--steps", "x"], 2, "--steps x"),
    (["trace-report", "{}", "--rank", "7"], 5, "no trace of rank 7"),
    (["trace-report", "{}", "--cluster", "slurm:nodes=2"], 2, "nodes=2 is no option"),
    (["trace-report", "{}", "--cluster", "head"], 2, "not an address"),
    (["trace-report"], 3, "haiprof-logs"),
    (["query", "{}"], 2, "--schema"),
    (["trace-diff", "{}", "{}", "--fail-if-slower", "x"], 2, "--fail-if-slower x"),
    (["critical-path", "{}", "--steps", "1", "--annotation", "a"], 2, "two windows"),
    (["critical-path", "{}", "--rank", "7"], 5, "rank 7"),
    (["memory-timeline", "{}"], 5, "no memory event"),
    (["query", "{}", "select 1", "--schema"], 2, "--schema"),
    (["query", "{}", "select 1", "--json", "--csv"], 2, "--json"),
    (["query", "{}", "select nope from gpu"], 2, "no column 'nope'"),
    (["query", "{}", "select * from read_csv('/etc/hosts')"], 2, "no files"),
    (["query", "/nowhere", "select 1"], 4, "/nowhere"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_error_is_one_line_and_a_status(
    ranks: Path,
    words: list[str],
    status: int,
    message: str,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ranks.parent)  # where no log directory is
    _, out, err = run(*(word.replace("{}", str(ranks)) for word in words), status=status)
    lines = err.splitlines()
    assert out == ""
    assert lines[0].startswith("haiprof: error: ")
    assert message in lines[0]
    assert all(line.startswith("haiprof: hint: ") for line in lines[1:])


@pytest.mark.parametrize(
    ("text", "steps"), [(None, None), ("3", (3, 4)), ("3:7", (3, 7)), ("0:1", (0, 1))]
)
def test_steps_are_first_and_after_last(text: str | None, steps: tuple[int, int] | None) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["", ":", "3:", ":3", "3:3", "4:3", "a:b", "-1:2", "1:2:3", "1.5"])
def test_steps_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--steps"):
        parse_steps(text)


def test_long_work_says_so_on_stderr(
    ranks: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.cli.shared._QUIET_S", 0.05)
    monkeypatch.setattr("haiprof.cli.shared._EVERY_S", 0.0)
    original: Callable[..., object] = report_module._visit

    def slow(trace: object, **options: object) -> object:
        time.sleep(0.2)
        return original(trace, **options)

    monkeypatch.setattr(report_module, "_visit", slow)
    _, out, err = run("trace-report", ranks)
    assert "reading traces" in err
    assert "1 of 2 traces" in err
    assert "reading" not in out


def test_query_shows_numbers_as_they_are(ranks: Path, run: Run) -> None:
    sql = "select rank, sum(dur_ns) as ns from gpu group by rank order by rank"
    out = run("query", ranks, sql).out
    assert [line.split() for line in out.splitlines()] == [
        ["rank", "ns"],
        ["0", "40000"],
        ["1", "80000"],
        ["2", "rows"],
    ]
    assert run("query", ranks, sql, "--json").data == {
        "columns": [{"name": "rank", "type": "Int64"}, {"name": "ns", "type": "Int64"}],
        "rows": [{"rank": 0, "ns": 40_000}, {"rank": 1, "ns": 80_000}],
        "row_count": 2,
        "faults": [],
    }
    limited = run("query", ranks, sql, "--json", "--limit", "1").data
    assert (len(limited["rows"]), limited["row_count"]) == (1, 2)
    assert run("query", ranks, sql, "--csv")[1] == "rank,ns\n0,40000\n1,80000\n"


def test_query_shows_the_first_rows_of_many(tmp_path: Path, run: Run) -> None:
    rank_file(tmp_path, 0, [event("aten::add", "cpu_op", place, 1) for place in range(80)])
    out = run("query", tmp_path, "select event, sequence_number from ops").out
    assert len(out.splitlines()) == 52
    assert out.splitlines()[-1].startswith("80 rows, the first 50")
    assert "\N{EN DASH}" in out


def test_query_names_the_columns_that_have_no_room(ranks: Path, run: Run) -> None:
    out = run("query", ranks, "select * from gpu limit 1").out
    head, *_, note = out.split("\n", 1)
    names = run("query", ranks, "select * from gpu limit 1", "--json").data["columns"]
    shown = head.split()
    assert shown == [each["name"] for each in names[: len(shown)]]
    hidden = ", ".join(each["name"] for each in names[len(shown) :])
    assert f"no room for {hidden}: select fewer" in " ".join(note.split())


def test_query_schema_has_units_and_meanings(ranks: Path, run: Run) -> None:
    out = run("query", ranks, "--schema").out
    rows = [line.split() for line in out.splitlines()]
    assert ["dur_ns", "Int64", "ns", "duration;", "0", "of", "what", "has", "none"] in rows
    found = run("query", ranks, "--schema", "--json").data
    assert found["tables"]["gpu"]["columns"][0] == {
        "name": "rank", "type": "Int64", "unit": "", "meaning": "of the trace",
    }  # fmt: skip


@pytest.mark.parametrize("name", first_of(REAL_TRACES, "dlrm_v100_8ranks"))
def test_report_of_real_traces_fits_the_width(name: str, run: Run) -> None:
    out = run("trace-report", traces(name)).out
    assert max(map(len, out.splitlines())) <= 100
    assert "None" not in out
    assert "nan" not in out


def steps_of(folder: Path, times_us: Sequence[int]) -> Path:
    """A rank whose steps take so long."""
    folder.mkdir()
    events, at = [], 0
    for number, time_us in enumerate(times_us):
        events += [step(number, at, time_us), launch(number + 1, at + 1)]
        events.append(kernel("gemm", at + 5, time_us - 10, correlation=number + 1))
        at += time_us
    rank_file(folder, 0, events, world_size=1)
    return folder


def test_comparison_of_one_step_each_says_what_is_known_and_has_no_empty_table(
    tmp_path: Path, run: Run
) -> None:
    paths = [
        write_trace(tmp_path / f"{us}.json", [
            step(1, 0, 90), event("aten::mm", "cpu_op", 0, 9), launch(1, 1),
            kernel("gemm", 10, us, correlation=1),
        ]) for us in (60, 6)
    ]  # fmt: skip
    out = run("trace-diff", *paths).said
    assert out.startswith(
        "the same time; too few measurements to tell a difference from chance: 1 and 1 steps"
    )
    assert "Kernels per step, the largest difference first" in out
    assert "Operators on the host: each takes the same time in both" in out
    assert "Operators on the host per step" not in out


SLOW, FAST = (200, 202, 204, 206, 208, 210), (100, 102, 104, 106, 108, 110)


@pytest.mark.parametrize(
    ("test", "percent", "status"),
    [(SLOW, "5%", 10), (SLOW, "5", 10), (SLOW, "120%", 0), (FAST, "5%", 0), ((300,), "5%", 5)],
)
def test_diff_fails_where_steps_are_slower(
    tmp_path: Path, test: Sequence[int], percent: str, status: int, run: Run
) -> None:
    before, after = steps_of(tmp_path / "before", FAST), steps_of(tmp_path / "after", test)
    words = ("trace-diff", before, after, "--fail-if-slower", percent)
    _, out, err = run(*words, status=status)
    assert ("cannot be decided" in err) == (status == 5)
    run("trace-diff", before, after)
    if test is SLOW:
        assert "95.2 % more time" in out
        assert "gemm" in out


def test_diff_as_json_is_whole(tmp_path: Path, run: Run) -> None:
    before, after = steps_of(tmp_path / "before", FAST), steps_of(tmp_path / "after", SLOW)
    found = run("trace-diff", before, after, "--json").data
    assert found["is_slower"] is True
    assert found["step_time"]["difference_ns"] == 100_000
    assert {row["name"] for row in found["names"]} >= {"gemm", "(GPU idle)"}


def test_critical_path_adds_up(ranks: Path, tmp_path: Path, run: Run) -> None:
    words = ("critical-path", ranks, "--rank", 1, "--steps", "2")
    _, out, err = run(*words, "--overlay", tmp_path)
    assert "cpu_bound" in out
    assert "cudaLaunchKernel" in out
    written = Path(err.split("wrote ", 1)[1].strip())
    assert written.parent == tmp_path
    assert b"critical" in gzip.decompress(written.read_bytes())
    found = run(*words, "--json").data
    total = sum(row["duration_ns"] for row in found["summary"])
    assert total == found["end_ns"] - found["start_ns"]


def allocation(ts_us: int, size: int, total: int, address: int) -> Event:
    return event(
        "[memory]", "cpu_instant_event", ts_us, 0,
        **{"Bytes": size, "Addr": address, "Device Type": 1, "Device Id": 0,
           "Total Allocated": total, "Total Reserved": 4096},
    )  # fmt: skip


def test_memory_timeline_names_the_peak(tmp_path: Path, run: Run) -> None:
    events = [
        event("aten::empty", "cpu_op", 9, 5), allocation(10, 1024, 2048, 1),
        allocation(20, 1024, 3072, 2), allocation(30, -1024, 2048, 1),
    ]  # fmt: skip
    rank_file(tmp_path, 0, events)
    out = run("memory-timeline", tmp_path).out
    assert "Alive at the peak of rank 0, cuda 0: 3.00 KiB" in out
    assert "aten::empty" in out
    found = run("memory-timeline", tmp_path, "--rank", 0, "--json").data
    assert sum(row["size_bytes"] for row in found["at_peak"]) == 3072


@pytest.mark.parametrize(
    "name",
    first_of(["tl_h100_qwen05_mem_stack", "tb_resnet50_nw0_v100"], "tl_h100_qwen05_mem_stack"),
)
def test_memory_of_real_traces_fits_the_width(name: str, run: Run) -> None:
    out = run("memory-timeline", traces(name)).out
    assert max(map(len, out.splitlines())) <= 100


def test_traces_of_a_cpu_job_have_no_heading_over_dashes(tmp_path: Path, run: Run) -> None:
    rank_file(tmp_path, 0, [step(1, 0, 1000), event("aten::mm", "cpu_op", 100, 500)])
    out = run("trace-report", tmp_path).out
    steps = out.partition("where their time goes")[2].partition("Operators")[0]
    assert {"DataLoader", "operators", "rest"} <= set(steps.split())
    assert "operators: on the CPU" in " ".join(steps.split())
    assert not {"kernels", "communication", "copies", "launches"} & set(steps.split())
    assert "no rows" in run("trace-table", "kernels", tmp_path).out
    out = run("functions", tmp_path).out
    assert "Operators by call stack" in out
    assert "Python functions by call stack" not in out


@pytest.mark.parametrize("question", ["select 1", "--schema"])
def test_query_of_file_that_is_no_trace_is_refused(question: str, tmp_path: Path, run: Run) -> None:
    (tmp_path / "tiny.py").write_text("print(1)")
    (tmp_path / "X.sqlite").write_bytes(b"SQLite format 3\0 and no more")
    for name in ("tiny.py", "X.sqlite"):
        refused, report = (
            run(*words, status=4)
            for words in (["query", tmp_path / name, question], ["trace-report", tmp_path / name])
        )
        assert refused.out == ""
        assert refused.err == report.err
