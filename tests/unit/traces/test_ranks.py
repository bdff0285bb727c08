"""Whose trace a file is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof.base.errors import TraceFormatError
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.trace_format.find import by_rank, rank_in_name, trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.traces.texts import compact, op


@pytest.mark.parametrize(("name", "rank"), [
    ("rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz", 0),
    ("worker0_step_12.1694128201545.pt.trace.json.gz", 0),
    ("worker7.1623143089861.pt.trace.json", 7),
    ("sampled_rank-1.json.gz", 1),
    ("trace_rank_12.json", 12),
    ("host_123.rank7.json", 7),
    ("RANK3.json", 3),
    ("host_4711.1694128201545.pt.trace.json", None),
    ("worker-0_4711.1694128201545.pt.trace.json", None),
    ("job-worker-1_4711.1694128201545.pt.trace.json", None),
    ("frank-3.json", None),
    ("rank-20231103120000.json", None),
    ("trace.json", None),
])  # fmt: skip
def test_name_states_a_rank(name: str, rank: int | None) -> None:
    assert rank_in_name(name) == rank


def written(folder: Path, name: str, **metadata: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(compact([op()], **metadata))
    return path


def test_metadata_goes_before_the_name(tmp_path: Path) -> None:
    path = written(tmp_path, "rank5.json", distributedInfo={"rank": 3, "world_size": 8})
    assert (Trace(path).rank, Trace(path).world_size) == (3, 8)
    for said in ({"rank": "3"}, {"rank": -1}, {"rank": True}, {}, 7, None):
        assert Trace(written(tmp_path, "rank5.json", distributedInfo=said)).rank == 5


@pytest.mark.parametrize("is_running", [False, True])
def test_run_says_which_rank_a_process_was(tmp_path: Path, is_running: bool) -> None:
    run = RunPaths(tmp_path / "run")
    reports = [{"rank": 1, "host": "a", "pid": 77}, {"rank": 0, "host": "a", "pid": 78},
               {"rank": 2, "host": "b", "pid": 77}]  # fmt: skip
    run.root.mkdir()
    manifest = Manifest(
        haiprof_version="0", name="job", command=["x"], ranks=[] if is_running else reports
    )
    write_manifest(run, manifest)
    for report in reports if is_running else []:
        folder = run.rank(int(str(report["rank"])))
        folder.root.mkdir(parents=True)
        folder.report.write_text(json.dumps(report))
    traces = run.root / "traces"
    assert Trace(written(traces, "a_78.1694128201545.pt.trace.json")).rank == 0
    assert Trace(written(traces, "b_77.1694128201545.pt.trace.json")).rank == 2
    assert Trace(written(traces, "trace_78.json")).rank == 0
    assert Trace(written(traces, "trace_77.json")).rank is None  # either host's
    assert Trace(written(traces, "trace_79.json")).rank is None
    assert Trace(written(run.root, "trace_78.json")).rank is None


def test_a_traces_folder_outside_of_a_run_says_nothing(tmp_path: Path) -> None:
    assert Trace(written(tmp_path / "traces", "trace_78.json")).rank is None
    (tmp_path / "run.json").write_text("no manifest")
    assert Trace(written(tmp_path / "traces", "trace_78.json")).rank is None


def test_two_files_of_one_rank_are_an_error_that_names_both(tmp_path: Path) -> None:
    first = written(tmp_path, "a.json", distributedInfo={"rank": 1})
    second = written(tmp_path, "rank1.json")
    with pytest.raises(TraceFormatError) as error:
        by_rank(map(Trace, trace_files(tmp_path)))
    assert str(first) in str(error.value)
    assert str(second) in str(error.value)


def test_files_that_do_not_say_get_free_numbers(tmp_path: Path) -> None:
    written(tmp_path, "a.json")
    written(tmp_path, "b.json", distributedInfo={"rank": 0})
    found = by_rank(map(Trace, trace_files(tmp_path)))
    assert {rank: trace.path.name for rank, trace in found.items()} == {0: "b.json", 1: "a.json"}


def test_only_traces_are_found(tmp_path: Path) -> None:
    for name in (
        "b.json",
        "a.json.gz",
        ".hidden.json",
        "run.json",
        "a.txt",
        "a_with_counters.json",
    ):
        written(tmp_path, name)
    (tmp_path / "folder.json").mkdir()
    assert [path.name for path in trace_files(tmp_path)] == ["a.json.gz", "b.json"]
    assert trace_files(tmp_path / "a.txt") == [tmp_path / "a.txt"]
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(TraceFormatError, match=str(path)):
            trace_files(path)
