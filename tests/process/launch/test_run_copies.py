"""When a run is put at its address: every few minutes, less often where slow, and at the end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from haiprof.launch.run_directories import PUT_EVERY_S, PUT_LIMIT_S, RunCopies
from haiprof.run_format.layout import RunPaths

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
