"""Jobs whose log directory is an address: recorded here, put there, never disturbed by it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import newest_run
from tests.process.jobs import PYTHON, REPOSITORY, environment
from tests.process.live import within
from tests.two_nodes import Node, two_nodes

JOB = """
import sys, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
print("done")
sys.exit(3)
"""
TRAINS_ON = """
import threading, sys, torch
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
print("TRAINS", flush=True)
while not ended.wait(0.01):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""
MAKE_BUCKET = "import sys, urllib.request as u; u.urlopen(u.Request(sys.argv[1], method='PUT'))"


def run_with_address(
    folder: Path, address: str, *options: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The job under haiprof, with an address as its log directory; recorded into `here`."""
    (folder / "train.py").write_text(JOB)
    command = [PYTHON, "-m", "haiprof", "train.py", "--log-dir", address, *options]
    variables["HAIPROF_LOCAL_DIR"] = str(folder / "here")
    return subprocess.run(
        command, cwd=folder, env=environment(variables), capture_output=True, text=True, timeout=240
    )


def content_of(root: Path) -> dict[str, bytes]:
    files = [path for path in root.rglob("*") if path.is_file() and "answers" not in path.parts]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def test_run_is_recorded_here_and_put_at_its_address(tmp_path: Path) -> None:
    address = f"file://{tmp_path}/there"
    done = run_with_address(tmp_path, address)
    assert (done.returncode, done.stdout) == (3, "done\n")
    run = RunPaths(newest_run(tmp_path / "here"))
    assert content_of(tmp_path / "there" / run.root.name) == content_of(run.root)
    assert run.verdict_json.exists()
    assert f"it is put at {address}/{run.root.name} every 5 minutes and at the end" in done.stderr
    assert f"at {address}/{run.root.name}\n" in done.stderr
    assert address not in run.manifest.read_text()  # it may hold a password


def test_address_that_cannot_be_written_is_said_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    address = f"file://{tmp_path}/file/below"
    done = run_with_address(tmp_path, address, "--quiet")
    assert (done.returncode, done.stdout) == (3, "done\n")
    run = newest_run(tmp_path / "here")
    assert f"haiprof: error: {address}/{run.name}: NotADirectoryError" in done.stderr
    assert f"the run is in {run}" in done.stderr
    assert f"haiprof copy {run} {address}" in done.stderr


def test_protocol_without_its_package_is_refused_before_the_job(tmp_path: Path) -> None:
    done = run_with_address(tmp_path, "nonsense://bucket")
    assert (done.returncode, done.stdout) == (2, "")
    assert "nonsense://: no such protocol" in done.stderr


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An S3 server on this machine with an empty bucket; the variables that lead clients to it."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with open(tmp_path / "s3.log", "w+") as log:
        words = [sys.executable, "-m", "moto.server", "-p", "0"]
        server = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        try:
            said = within(60, lambda: _running_on((tmp_path / "s3.log").read_text()))
            request = urllib.request.Request(f"{said}/bucket", method="PUT")
            urllib.request.urlopen(request).close()
            yield {
                "AWS_ENDPOINT_URL": said,
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        finally:
            server.terminate()
            server.wait()


def _running_on(text: str) -> str | None:
    _, found, rest = text.partition("Running on ")
    return rest.split()[0] if found and "\n" in rest else None


@contextmanager
def training(folder: Path) -> Iterator[int]:
    """The id of a process that trains without haiprof, until this is left."""
    command = [PYTHON, "-c", TRAINS_ON]
    process = subprocess.Popen(
        command, cwd=folder, env=environment({}), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "TRAINS\n"
        yield process.pid
    finally:
        process.communicate(timeout=60)  # closes its input
    assert process.returncode == 0


def attach_with_address(folder: Path, address: str, **variables: str) -> RunPaths:
    """A second of a process that runs already, recorded into `here`; its run there."""
    command = [PYTHON, "-m", "haiprof", "attach"]
    variables["HAIPROF_LOCAL_DIR"] = str(folder / "here")
    with training(folder) as pid:
        done = subprocess.run(
            [*command, str(pid), "--time", "1", "--log-dir", address],
            cwd=folder, env=environment(variables), capture_output=True, text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunPaths(newest_run(folder / "here"))
    assert f"at {address}/{run.root.name}\n" in done.stderr
    return run


def test_attached_recording_is_put_at_its_address(tmp_path: Path) -> None:
    run = attach_with_address(tmp_path, f"file://{tmp_path}/there")
    assert content_of(tmp_path / "there" / run.root.name) == content_of(run.root)
    assert json.loads(run.manifest.read_text())["end_wall_ns"]


@pytest.mark.proof
def test_attached_recording_is_put_at_s3(tmp_path: Path, s3: dict[str, str]) -> None:
    run = attach_with_address(tmp_path, "s3://bucket/runs", **s3)
    subprocess.run(
        [PYTHON, "-m", "haiprof", "fetch", "s3://bucket/runs", "-o", str(tmp_path / "fetched")],
        env=environment(s3), check=True, capture_output=True,
    )  # fmt: skip
    assert content_of(tmp_path / "fetched" / run.root.name) == content_of(run.root)


@contextmanager
def s3_on(node: Node, log: Path) -> Iterator[dict[str, str]]:
    """An S3 server on one of two nodes, with an empty bucket; the variables that lead there."""
    words = [sys.executable, "-m", "moto.server", "-H", node.address, "-p", "5000"]
    with log.open("w") as out:
        server = subprocess.Popen(node.words(*words), stdout=out, stderr=subprocess.STDOUT)
    try:
        url = within(120, lambda: _running_on(log.read_text()))
        node.run(sys.executable, "-c", MAKE_BUCKET, f"{url}/bucket")
        yield {"AWS_ENDPOINT_URL": url, "AWS_ACCESS_KEY_ID": "testing",
               "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
    finally:
        server.terminate()
        server.wait()


@pytest.mark.proof
def test_two_nodes_with_disks_of_their_own_meet_at_one_address(tmp_path: Path) -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    (tmp_path / "train.py").write_text(JOB)
    with two_nodes() as nodes, s3_on(nodes[0], tmp_path / "s3.log") as s3:
        launchers = [_launch(node, rank, tmp_path, s3) for rank, node in enumerate(nodes)]
        said = [launcher.communicate(timeout=240)[1] for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [3, 3], said
        command = [PYTHON, "-m", "haiprof", "fetch", "s3://bucket/runs", "-o", str(tmp_path / "f")]
        subprocess.run(nodes[1].words(*command), env=environment(s3), check=True)
    (fetched,) = (tmp_path / "f").iterdir()  # one run, of both
    run = RunPaths(fetched)
    assert {host.name for host in run.nodes.iterdir()} == {"node-1", "node-2"}
    assert [rank for rank, _, _ in run.rank_folders()] == [0, 1]
    verdict = Analyzer(fetched).verdict()
    assert (verdict.ranks, verdict.step_count) == ((0, 1), 40)
    for place, text in enumerate(said):
        assert f"at s3://bucket/runs/{fetched.name}\n" in text, place


def _launch(node: Node, rank: int, folder: Path, s3: dict[str, str]) -> subprocess.Popen[str]:
    """One node's launcher, which records onto a disk of its own."""
    haiprof = [PYTHON, "-m", "haiprof", "--log-dir", "s3://bucket/runs", "--run-id", "two"]
    variables = {**s3, "HAIPROF_LOCAL_DIR": str(folder / f"here-{rank}"),
                 "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2"}  # fmt: skip
    return subprocess.Popen(
        node.words(*haiprof, "train.py", folder=folder), env=environment(variables),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.proof
def test_s3_holds_the_run_and_every_command_reads_it_there(
    tmp_path: Path, s3: dict[str, str]
) -> None:
    done = run_with_address(tmp_path, "s3://bucket/runs", **s3)
    assert done.returncode == 3
    assert "error" not in done.stderr
    variables = {**environment(s3), "HAIPROF_LOCAL_DIR": str(tmp_path / "here")}

    def ask(*words: str) -> str:
        command = [PYTHON, "-m", "haiprof", *words]
        return subprocess.run(
            command, cwd=REPOSITORY, env=variables, capture_output=True, text=True, check=True
        ).stdout

    assert json.loads(ask("verdict", "s3://bucket/runs", "--json"))["step_count"] == 20
    ask("fetch", "s3://bucket/runs", "-o", str(tmp_path / "fetched"))
    (fetched,) = (tmp_path / "fetched").iterdir()
    assert content_of(fetched) == content_of(tmp_path / "here" / fetched.name)
    again = json.loads(ask("put", str(tmp_path / "here"), "s3://bucket/runs", "--json"))
    assert (again["files"], again["bytes"]) == (0, 0)
    missing = subprocess.run(
        [PYTHON, "-m", "haiprof", "put", str(fetched), "s3://no-such-bucket/runs"],
        env=variables, capture_output=True, text=True,
    )  # fmt: skip
    assert missing.returncode == 1
    assert "NoSuchBucket" in missing.stderr or "does not exist" in missing.stderr
    assert os.listdir(tmp_path / "fetched") == [fetched.name]
