"""A diagnosis as a folder: it opens elsewhere, and says the same without the run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.show.card import MAX_WIDTH
from tests.commands import Run
from tests.unit.analysis.recorded import WALL_OFFSET_NS
from tests.unit.analysis.trace.shared import kernel, write_trace
from tests.unit.diagnosis.stories import START_NS, write_story
from tests.unit.diagnosis.trace_stories import Story, write_ranks

LOADER = (30.0, 5.0, 10.0, 2.0)


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", str(MAX_WIDTH))  # as wide as the folder's texts


def test_folder_opens_without_the_run(tmp_path: Path, run: Run) -> None:
    job = write_story(tmp_path / "run", lambda *_: LOADER, ranks=4, gpu=0.5)
    slow = Story(gemm=560, relu=84)
    write_ranks(job / "traces", lambda rank: slow if rank == 2 else Story(), ranks=4)
    ended = replace(
        read_manifest(RunPaths(job)), end_wall_ns=START_NS + WALL_OFFSET_NS + 10**12, exit_status=0
    )
    write_manifest(RunPaths(job), ended)
    functions = run("functions", job).out
    card = run("verdict", job, "--all").out
    assert "report.html" in run("verdict", job, "--folder", tmp_path / "here").err
    there = tmp_path / "elsewhere"
    shutil.move(tmp_path / "here", there)
    shutil.rmtree(job)
    assert run("functions", there / "functions").out == functions
    assert (there / "functions.txt").read_text().split() == functions.split()
    assert (there / "verdict.txt").read_text().split()[:20] == card.split()[:20]
    document = json.loads((there / "diagnosis.json").read_text())
    assert document["findings"][0]["slug"] == "dataloader_bound"
    reports = json.loads((there / "functions.json").read_text())["reports"]
    assert reports["gpu-compute"]["slow"] == [2]
    assert "temporal" in run("trace-report", there / "summaries", "--json").out
    abnormal = pl.read_csv(there / "tables" / "functions_gpu-compute_abnormal.csv")
    assert abnormal["rank"].unique().to_list() == [2]
    counters = pl.read_csv(there / "tables" / "counters.csv")
    (use,) = counters.filter(
        (pl.col("metric") == "utilization_ratio") & (pl.col("rank") == 0)
    )["mean"]  # fmt: skip
    assert use == pytest.approx(0.5)
    readme = (there / "README.txt").read_text()
    for name in there.iterdir():
        assert name.name == "README.txt" or name.name in readme
    assert "Without what traces say" not in readme


def test_folder_of_a_run_without_traces_says_what_is_missing(tmp_path: Path, run: Run) -> None:
    job = write_story(tmp_path / "run", lambda *_: LOADER)
    run("diagnose", job, "--folder", tmp_path / "out")
    readme = (tmp_path / "out" / "README.txt").read_text()
    assert "Without what traces say (PerfTracker's five reports):" in readme
    assert not (tmp_path / "out" / "functions").exists()
    assert (tmp_path / "out" / "tables" / "counters.csv").exists()
    assert "dataloader-bound" in (tmp_path / "out" / "verdict.txt").read_text()


def test_folder_with_files_is_left_alone(tmp_path: Path, run: Run) -> None:
    job = write_story(tmp_path / "run", lambda *_: LOADER)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    ran = run("diagnose", job, "--folder", tmp_path / "out", status=2)
    assert "is not empty" in ran.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
    run("diagnose", job, "--folder", tmp_path / "o", "--last", "5", status=2)


def test_functions_of_a_run_have_its_hardware_samples(tmp_path: Path, run: Run) -> None:
    job = write_story(tmp_path / "run", lambda *_: LOADER, ranks=2, gpu=0.5)
    (job / "traces").mkdir()
    for rank in (0, 1):
        metadata = {"distributedInfo": {"rank": rank, "world_size": 2},
                    "baseTimeNanoseconds": START_NS + WALL_OFFSET_NS}  # fmt: skip
        events = [kernel("gemm", 0, 1_000_000), kernel("relu", 1_000_001, 100)]
        write_trace(job / "traces" / f"rank{rank}.json", events, metadata)
    content = run("functions", job, "--hardware", "--json").data
    found = {(row["rank"], row["name"], row["metric"]): row for row in content["hardware"]}
    assert found[1, "gemm", "utilization_ratio"]["mean"] == pytest.approx(0.5)
    assert found[0, None, "power_watts"]["mean"] == pytest.approx(90)
    assert not [key for key in found if key[1] == "relu"]
    text = run("functions", job, "--hardware").out
    assert "any gpu-compute" in text
    assert "utilization_ratio" in text
    assert "run" in run("functions", job / "traces", "--hardware", status=3).err
