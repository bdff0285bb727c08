"""Jobs whose log directory is an address: when they are put there; nothing disturbs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from haiprof.launch.run_directories import PUT_EVERY_S, PUT_LIMIT_S, RunCopies
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import newest_run
from tests.process.jobs import PYTHON, REPOSITORY, environment, training
from tests.process.live import LiveJob, within

JOB = training("for _ in range(20):", each="", after='print("done"); sys.exit(3)')
TRAINS_ON = training("while True:", before='print("TRAINS", flush=True)')


def run_with_address(
    folder: Path, address: str, *options: str, job: str = JOB, **variables: str
) -> subprocess.CompletedProcess[str]:
    """The job under haiprof, with an address as its log directory; recorded into `here`."""
    (folder / "train.py").write_text(job)
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
    done = run_with_address(
        tmp_path, address, "--quiet", job="import sys; print('done'); sys.exit(3)"
    )
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


@pytest.mark.proof
def test_attached_recording_is_put_at_its_address(tmp_path: Path) -> None:
    """A second of a process that runs already, recorded into `here`."""
    (tmp_path / "train.py").write_text(TRAINS_ON)
    address, here = f"file://{tmp_path}/there", {"HAIPROF_LOCAL_DIR": str(tmp_path / "here")}
    with LiveJob(tmp_path, ["python", "train.py"], haiprof=False) as job:
        words = ("attach", job.pid, "--time", "1", "--log-dir", address)
        done = subprocess.run([PYTHON, "-m", "haiprof", *words], cwd=tmp_path, timeout=240,
                              env=environment(here), capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = RunPaths(newest_run(tmp_path / "here"))
    assert f"at {address}/{run.root.name}\n" in done.stderr
    assert content_of(tmp_path / "there" / run.root.name) == content_of(run.root)
    assert json.loads(run.manifest.read_text())["end_wall_ns"]


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


ADDRESS = "s3://me:hunter2@bucket/runs"
RUN = RunPaths(Path("/logs/job-1"))


class Desk:
    """Starts a command in place of `put`, and has a clock that is set."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.now_s = 0.0
        self.started: list[tuple[list[str], bool]] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self.copies = RunCopies(RUN, ADDRESS, self.start, clock=lambda: self.now_s)

    def start(self, words: Sequence[str], background: bool) -> subprocess.Popen[bytes]:
        self.started.append((list(words), background))
        self.processes.append(subprocess.Popen(["/bin/sh", "-c", self.program]))
        return self.processes[-1]

    def tick_at(self, now_s: float) -> int:
        """Ticks at a time, after what was started has ended; how many were started so far."""
        self.now_s = now_s
        self.copies.tick()
        return len(self.started)

    def end_process(self, now_s: float) -> None:
        self.processes[-1].wait()
        self.tick_at(now_s)


def test_copies_are_made_every_five_minutes_and_at_the_end() -> None:
    desk = Desk("exit 0")
    assert desk.tick_at(PUT_EVERY_S - 1) == 0
    assert desk.tick_at(PUT_EVERY_S) == 1
    desk.end_process(PUT_EVERY_S + 2)
    assert desk.tick_at(2 * PUT_EVERY_S + 1) == 1
    assert desk.tick_at(2 * PUT_EVERY_S + 2) == 2
    desk.processes[-1].wait()
    desk.copies.finish(lambda: False, quiet=False)
    assert desk.started == [(["--quiet"], True), (["--quiet"], True), ([], False)]


def test_slow_copies_are_made_less_often() -> None:
    desk = Desk("exit 0")
    desk.tick_at(PUT_EVERY_S)
    desk.end_process(2 * PUT_EVERY_S)  # it took five minutes: a twentieth of the time is 100
    assert desk.tick_at(20 * PUT_EVERY_S) == 1
    assert desk.tick_at(22 * PUT_EVERY_S) == 2
    desk.processes[-1].wait()


def test_failure_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk("exit 1")
    for number in (1, 2):
        desk.tick_at(number * 2 * PUT_EVERY_S)
        desk.end_process(number * 2 * PUT_EVERY_S)
    assert [words for words, _ in desk.started] == [["--quiet"], ["--silent"]]
    expected = "haiprof: the job is not affected; tried again in 5 minutes\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("asked", [True, False], ids=["ended by the user", "time limit"])
def test_last_copy_is_not_waited_for_without_end(
    asked: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk("exec sleep 1000")

    def wait() -> bool:
        desk.now_s += PUT_LIMIT_S / 2
        return asked

    desk.copies.finish(wait, quiet=True)
    assert desk.processes[-1].returncode is not None
    said = capsys.readouterr().err
    assert "the run is in /logs/job-1" in said
    assert "haiprof copy /logs/job-1 's3://me:***@bucket/runs'" in said
    assert "hunter2" not in said


def test_last_copy_that_was_interrupted_is_said_with_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Desk("kill -INT $$").copies.finish(lambda: False, quiet=False)
    said = capsys.readouterr().err
    assert "is not complete, as it was interrupted; the run is in /logs/job-1" in said
    assert "haiprof copy /logs/job-1" in said


def test_process_that_cannot_be_started_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(words: Sequence[str], background: bool) -> subprocess.Popen[bytes]:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    copies = RunCopies(RUN, ADDRESS, fail)
    copies.finish(lambda: False, quiet=True)
    assert "cannot be put (Resource temporarily unavailable)" in capsys.readouterr().err
