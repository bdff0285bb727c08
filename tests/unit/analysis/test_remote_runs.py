"""Runs at addresses: put there and fetched from there with fsspec's own file systems."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from haiprof import Analyzer
from haiprof.base.errors import HaiprofError, MissingExtraError, RunNotFoundError, UsageError
from haiprof.cli import main
from haiprof.run_analysis.remote_runs import fetch_run, put_run
from haiprof.run_format.layout import RunPaths
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

STEPS = 40
HOST = "node-a"


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return recorded_run(tmp_path / "logs" / "job-1")


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket"


def recorded_run(root: Path, *, rank: int = 0, host: str = HOST, **manifest: Any) -> RunPaths:
    """A run of one rank that a launcher on `host` recorded, with a file of that node."""
    run = write_run(root)
    write_rank(
        run, spans_of("D F B O " * STEPS, span_ns=1_000_000, gap_ns=10_000), rank=rank, host=host
    )
    run.node(host).root.mkdir(parents=True)
    run.node(host).agent.write_text("{}")
    content = {**json.loads(run.manifest.read_text()), "host": host, **manifest}
    run.manifest.write_text(json.dumps(content))
    return run


def content_of(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and "answers" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_fetched_run_is_the_one_that_was_put(run: RunPaths, bucket: str, tmp_path: Path) -> None:
    result = put_run(run, bucket, host=HOST)
    assert result.target == f"{bucket}/job-1"
    assert result.file_count == len(content_of(run.root))
    (tmp_path / "here").mkdir()
    fetched = fetch_run(f"{bucket}/job-1", tmp_path / "here")
    assert content_of(fetched) == content_of(run.root)


def test_only_changed_files_are_put_again(run: RunPaths, bucket: str, tmp_path: Path) -> None:
    put_run(run, bucket, host=HOST)
    assert put_run(run, bucket, host=HOST).file_count == 0
    with run.rank(0).events.open("a") as file:
        file.write('{"type": "more"}\n')
    (tmp_path / "bucket" / "job-1" / "run.json").unlink()  # somebody removed it there
    assert put_run(run, bucket, host=HOST).file_count == 2
    assert content_of(tmp_path / "bucket" / "job-1") == content_of(run.root)


@pytest.mark.parametrize("state", [7, [], [1], [1, 2, 3], ["1", 2], {"0": 1}, None])
def test_damaged_record_of_what_was_put_is_put_again(
    run: RunPaths, bucket: str, state: object
) -> None:
    put_run(run, bucket, host=HOST)
    (record,) = run.answers.glob("put-*.json")
    content = json.loads(record.read_text())
    content["answer"]["files"]["run.json"] = state
    record.write_text(json.dumps(content))
    assert put_run(run, bucket, host=HOST).file_count == 1


def test_put_that_was_interrupted_goes_on_where_it_was(
    run: RunPaths, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = LocalFileSystem.put_file
    sent: list[tuple[Any, ...]] = []

    def put_three(self: LocalFileSystem, *words: Any, **options: Any) -> None:
        if len(sent) == 3:
            raise KeyboardInterrupt
        sent.append(words)
        whole(self, *words, **options)

    with monkeypatch.context() as context:
        context.setattr(LocalFileSystem, "put_file", put_three)
        with pytest.raises(KeyboardInterrupt):
            put_run(run, bucket, host=HOST)
    assert put_run(run, bucket, host=HOST).file_count == len(content_of(run.root)) - 3


def test_links_and_unfinished_files_are_not_put(run: RunPaths, bucket: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not the run's")
    (run.ranks / "0" / "link").symlink_to(secret)
    (run.root / "report" / f".verdict.json.{'0' * 16}").parent.mkdir(exist_ok=True)
    (run.root / "report" / f".verdict.json.{'0' * 16}").write_text("{")
    run.trace_parts.mkdir(parents=True)
    (run.trace_parts / "raw").write_text("{")
    put_run(run, bucket, host=HOST)
    names = set(content_of(tmp_path / "bucket" / "job-1"))
    assert not names & {"ranks/0/link", "traces/.parts/raw"}
    assert not any("verdict" in name for name in names)


def test_each_node_puts_its_own_files(bucket: str, tmp_path: Path) -> None:
    """Two nodes without a common disk recorded one job: two folders here, one run there."""
    first = recorded_run(tmp_path / "a" / "job-1")
    second = recorded_run(tmp_path / "b" / "job-1", rank=1, host="node-b")
    put_run(first, bucket, host=HOST)
    put_run(second, bucket, host="node-b")
    put_run(first, bucket, host=HOST)
    there = tmp_path / "bucket" / "job-1"
    assert json.loads((there / "run.json").read_text())["host"] == HOST
    assert set(content_of(there)) >= {"nodes/node-a/agent.json", "nodes/node-b/agent.json"}
    assert Analyzer(f"{bucket}/job-1").ranks()["rank"].to_list() == [0, 1]


def test_node_that_joined_a_shared_run_puts_its_own_files(
    run: RunPaths, bucket: str, tmp_path: Path
) -> None:
    report = run.rank(1).report
    report.parent.mkdir()
    report.write_text(json.dumps({**json.loads(run.rank(0).report.read_text()), "host": "node-b"}))
    put_run(run, bucket, host="node-b", only_node=True)
    assert set(content_of(tmp_path / "bucket" / "job-1")) == {"ranks/1/rank.json"}


def test_earlier_run_of_the_same_name_is_not_overwritten(bucket: str, tmp_path: Path) -> None:
    before = recorded_run(tmp_path / "a" / "job-1", start_wall_ns=1, end_wall_ns=2)
    put_run(before, bucket, host=HOST)
    again = recorded_run(tmp_path / "b" / "job-1", start_wall_ns=3)
    with pytest.raises(UsageError, match="an earlier run of that name is there"):
        put_run(again, bucket, host=HOST)


def test_newest_run_of_a_log_directory_is_fetched(bucket: str, tmp_path: Path) -> None:
    for number in (2, 9, 5):
        run = recorded_run(tmp_path / "logs" / f"job-{number}", start_wall_ns=number)
        put_run(run, bucket, host=HOST)
    (tmp_path / "here").mkdir()
    assert fetch_run(bucket, tmp_path / "here").name == "job-9"
    with pytest.raises(UsageError, match="exists already"):
        fetch_run(bucket, tmp_path / "here")


def test_analyzer_reads_memory(run: RunPaths) -> None:
    put_run(run, "memory://bucket/runs", host=HOST)
    analyzer = Analyzer("memory://bucket/runs")
    assert analyzer.steps().height == STEPS
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def test_names_that_lead_out_of_the_folder_are_not_fetched(tmp_path: Path) -> None:
    there = fsspec.filesystem("memory")
    there.pipe_file("/evil/job-1/run.json", b"{}")
    there.store["/evil/job-1/../../out"] = there.store["/evil/job-1/run.json"]
    there.store["/evil/job-1//etc/out"] = there.store["/evil/job-1/run.json"]
    fetched = fetch_run("memory://evil/job-1", tmp_path)
    assert [path.name for path in tmp_path.rglob("*")] == [fetched.name, "run.json"]
    there.rm("/evil", recursive=True)


def test_missing_package_is_named_with_its_extra(
    run: RunPaths, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="s3:// needs the package fsspec") as caught:
        put_run(run, "s3://bucket/runs", host=HOST)
    assert caught.value.hint == "pip install 'haiprof[remote]'"


def test_what_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="no haiprof run there"):
        fetch_run(f"file://{tmp_path}/nothing", tmp_path)
    with pytest.raises(UsageError, match="s4://: no such protocol"):
        fetch_run("s4://bucket", tmp_path)


def test_password_in_an_address_is_not_shown(run: RunPaths) -> None:
    with pytest.raises(HaiprofError) as caught:
        put_run(run, "ftp://me:hunter2@127.0.0.1:9/runs", host=HOST)
    assert "hunter2" not in str(caught.value)
    assert "ftp://me:***@127.0.0.1:9/runs/job-1: ConnectionRefusedError" in str(caught.value)


def test_command_line_puts_fetches_and_reads(
    run: RunPaths, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    assert main(["put", str(run.root.parent), bucket, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["address"] == f"{bucket}/job-1"
    assert main(["verdict", bucket, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_count"] == STEPS
    assert main(["verdict", bucket]) == 0
    card = "".join(capsys.readouterr().out.replace("│", "").split())  # whatever its width
    assert f"haiprofverdictrank{bucket}/job-1" in card
    for words, part in (["list", bucket], "only runs in a folder"), (["report", bucket], "-o FILE"):
        assert main(words) == 2
        assert part in capsys.readouterr().err
    assert os.listdir(temporary) == []
    assert main(["fetch", bucket, "-o", str(tmp_path / "here"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(tmp_path / "here" / "job-1")
    assert main(["put", str(run.root), f"file://{run.manifest}/in/a/file"]) == 1
    assert f"haiprof copy {run.root} file://" in capsys.readouterr().err


def test_log_directory_that_is_an_address_means_the_folder_that_is_recorded_into(
    run: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAIPROF_LOG_DIR", "s3://bucket/runs")
    monkeypatch.setenv("HAIPROF_LOCAL_DIR", str(run.root.parent))
    assert main(["verdict", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_count"] == STEPS
