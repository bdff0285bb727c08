"""A log directory whose disk hangs: writers wait in the kernel, where no signal reaches them.

A frozen ext4 image is the hardest kind: those waits cannot be ended by SIGKILL either, as those for
an NFS server can. Needs root, a loop device and fsfreeze.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from haiprof import Analyzer
from haiprof.in_job.recorder import EXIT_WAIT_S
from haiprof.launch.run import START_LIMIT_S
from haiprof.launch.supervisor import EXIT_LIMIT_S
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs, read_manifest
from tests.process.jobs import training
from tests.process.live import within
from tests.security.launched import LIMIT_S, Launched

pytestmark = pytest.mark.slow
SLACK_S = 20.0  # of a machine that does other things too
_TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")

TRAIN = training(
    'while not os.path.exists("end"):',
    before='print("ready", os.getpid(), flush=True); beats = open("beats", "ab", buffering=0)',
    each='beats.write(b"."); time.sleep(0.01)',
    after='print("done", flush=True); sys.exit(3)',
)


class Disk:
    """A file system that can be told to hang."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hang(self) -> None:
        subprocess.run(["fsfreeze", "-f", str(self.path)], check=True)

    def answer(self) -> None:
        subprocess.run(["fsfreeze", "-u", str(self.path)], check=False, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    lacking = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() or lacking:
        pytest.skip(f"no disk that hangs: {'no ' + ', '.join(lacking) if lacking else 'not root'}")
    image, path = tmp_path / "image", tmp_path / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    if subprocess.run(
        ["mount", "-o", "loop", str(image), str(path)], capture_output=True
    ).returncode:
        pytest.skip("no disk that hangs: no right to mount a loop device here")
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.answer()
        subprocess.run(["umount", "-l", str(path)], check=True)


def recorded(one: Launched) -> None:
    """Waits until the rank's thread has written some steps."""
    within(
        LIMIT_S,
        lambda: any(path.stat().st_size > 4000 for path in one.logs.glob("*/ranks/0/phases.rec")),
        "the rank's record",
    )


def seconds_from_its_end(one: Launched) -> float:
    """How long the launcher goes on once the job has said its last word."""
    within(LIMIT_S, lambda: "done" in one.out, "the job's end")
    began_s = time.monotonic()
    assert one.process.wait(START_LIMIT_S) == 3
    return time.monotonic() - began_s


@pytest.mark.proof
def test_job_starts_without_its_record(tmp_path: Path, disk: Disk) -> None:
    disk.hang()
    began_s = time.monotonic()
    with Launched(tmp_path / "job", log_dir=disk.path / "logs") as one:
        one.job()
        assert time.monotonic() - began_s < START_LIMIT_S + SLACK_S
        assert "no answer within 30 s: the job runs unrecorded" in one.err
        os.kill(one.launcher(), signal.SIGTERM)
        assert one.process.wait(30) == -signal.SIGTERM
        disk.answer()
        one.leaves_nothing()


def test_user_who_will_not_wait_for_the_start_ends_it(tmp_path: Path, disk: Disk) -> None:
    disk.hang()
    with Launched(tmp_path / "job", log_dir=disk.path / "logs") as one:
        within(LIMIT_S, lambda: len(psutil.Process(one.process.pid).children()) == 2, "the waiting")
        os.kill(one.process.pid, signal.SIGINT)
        assert one.process.wait(SLACK_S) == -signal.SIGINT
        assert one.out == ""
        disk.answer()
        one.leaves_nothing()


def test_exit_of_a_job_is_held_no_longer_than_stated(tmp_path: Path, disk: Disk) -> None:
    with Launched(tmp_path / "job", log_dir=disk.path / "logs") as one:
        one.beside()
        disk.hang()
        one.goes_on()
        one.end()
        assert seconds_from_its_end(one) < EXIT_LIMIT_S + SLACK_S
        assert "the log directory has not answered for 10 s" in one.err
        disk.answer()
        one.leaves_nothing()
        (run,) = find_runs(one.logs)
        assert read_manifest(RunPaths(run)).exit_status == 3, "written once the disk is back"


@pytest.mark.proof
def test_exit_of_a_rank_is_held_no_longer_than_stated(tmp_path: Path, disk: Disk) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    job = [sys.executable, str(script)]
    with Launched(tmp_path / "job", log_dir=disk.path / "logs", job=job) as one:
        one.job()
        recorded(one)
        disk.hang()
        time.sleep(2.5)  # its thread writes once a second
        one.goes_on()
        one.end()
        assert seconds_from_its_end(one) < EXIT_WAIT_S + EXIT_LIMIT_S + SLACK_S
        assert "the log directory has not answered for 10 s" in one.err
        disk.answer()
        one.leaves_nothing()
        assert Analyzer(one.logs).steps().height > 5


@pytest.mark.proof
def test_disk_that_comes_back_in_time_costs_nothing(tmp_path: Path, disk: Disk) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    job = [sys.executable, str(script)]
    with Launched(tmp_path / "job", log_dir=disk.path / "logs", job=job) as one:
        one.job()
        recorded(one)
        disk.hang()
        time.sleep(2.5)
        disk.answer()
        one.end()
        assert one.status() == 3
        assert Analyzer(one.logs).ranks()["recording_ended"].to_list() == ["exit"]
