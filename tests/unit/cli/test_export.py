"""`haiprof export` as users type it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import polars as pl
import pytest
from prometheus_client.parser import text_string_to_metric_families

import haiprof
from haiprof.cli import main
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import HOST
from tests.commands import Run
from tests.unit.analysis.recorded import (
    CLOCK,
    row_of,
    spans_of,
    write_rank,
    write_records,
    write_run,
)

SAMPLES = 5


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """The newest run of the log directory that a job started here would write to."""
    for name in [name for name in os.environ if name.startswith("HAIPROF_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(haiprof.__file__).parent.parent))
    job = write_run(tmp_path / "haiprof-logs" / "job-1")
    write_rank(job, spans_of("D F B O " * 20))
    rows = [
        row_of(HOST, time_ns=CLOCK.mono_ns + second * 10**9, cpu_count=2, disk_read_bytes=second)
        for second in range(SAMPLES)
    ]
    write_records(job.node("node0").records("host"), HOST, rows, host="node0")
    return job


def test_counters_of_the_newest_run_as_csv_is_the_default(
    job: RunPaths, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["export"]) == 0
    captured = capsysbinary.readouterr()
    frame = pl.read_csv(captured.out)
    assert frame.equals(haiprof.Analyzer(job.root).counters().cast(frame.schema))
    assert captured.err.decode().splitlines() == [
        "haiprof: these are its counters; others with --what: steps, phases, ranks; the ledger: "
        "haiprof verdict RUN --json"
    ]


def test_text_formats_go_to_stdout_and_nothing_else_does(
    job: RunPaths, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main(["export", str(job.root), "--format", "prometheus"]) == 0
    text = capsysbinary.readouterr().out.decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    assert names == {"haiprof_host_cpu_count", "system_disk_io_bytes"}
    assert main(["export", str(job.root), "--format", "otlp-json"]) == 0
    assert list(json.loads(capsysbinary.readouterr().out)) == ["resourceMetrics"]


@pytest.mark.parametrize("form", ["csv", "parquet", "prometheus", "otlp-json"])
def test_file_is_written_whole_and_named(
    job: RunPaths, tmp_path: Path, form: str, run: Run
) -> None:
    path = tmp_path / "out"
    captured = run("export", "--format", form, "-o", path)
    assert captured.out == ""
    assert str(path) in captured.err
    assert path.stat().st_size > 0
    assert {p.name for p in tmp_path.iterdir()} == {"haiprof-logs", "out"}


@pytest.mark.parametrize(("words", "message"), [
    (["--format", "parquet"], "-o FILE"),
    (["--format", "prometheus", "--what", "steps"], "counters only"),
    (["--format", "otlp-json", "--what", "ranks"], "counters only"),
    (["--format", "csv", "--lines"], "otlp-json"),
    (["--to", "xml"], "--to: expected one of"),
    (["--to", "perfeto"], "did you mean haiprof export --to perfetto?"),
    (["-o", "/nowhere/out.csv"], "/nowhere/out.csv"),
    (["-o", "haiprof-logs"], "not a regular file"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else None)  # fmt: skip
def test_what_does_not_go_together_is_refused(
    job: RunPaths, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("haiprof: error: ")


def test_file_is_kept_without_force(job: RunPaths, run: Run) -> None:
    path = Path("out.csv")
    path.write_text("mine")
    ran = run("export", "-o", path, status=2)
    assert "--force" in ran.err
    assert path.read_text() == "mine"
    assert main(["export", "-o", str(path), "--force"]) == 0
    assert path.read_text() != "mine"


def test_damage_is_told_on_stderr(job: RunPaths, capfd: pytest.CaptureFixture[str]) -> None:
    with job.node("node0").records("host").open("ab") as file:
        file.write(b"torn")
    assert main(["export", "--format", "prometheus"]) == 0
    assert "torn last record" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("form", "other"),
    [("tensorboard", "--to scalars"), ("perfetto", "--to merged -o FILE"), ("scalars", "--to csv")],
)
def test_form_that_writes_no_file_names_the_one_that_does(form: str, other: str, run: Run) -> None:
    ran = run("export", "--to", form, "-o", "it", status=2)
    assert f"haiprof export {other}" in ran.err


def test_help_of_forms_that_do_not_return_says_so_at_once(run: Run) -> None:
    for words in ([], ["--to", "tensorboard"], ["--to", "perfetto"]):
        first = run("export", *words, "--help").out.split("\n\n")[1]
        assert "until Ctrl-C" in " ".join(first.split()), words
