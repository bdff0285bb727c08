"""Signals to a job and to haiprof's own processes: each row of docs/signals.md.

Those of Slurm and torchrun are in tests/process/test_suspended_jobs.py, those of a terminal in
tests/process/launch/test_supervisor.py.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from haiprof.launch.supervisor import EXIT_LIMIT_S
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs, read_manifest
from tests.process.jobs import environment
from tests.security.launched import Launched, within

QUIET = ("--quiet",)
ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
STOP_S = 1.2  # longer than the 0.7 s after which a launcher once ended with 126


@pytest.mark.parametrize("name", [*ENDING, "SIGUSR1", "SIGWINCH"])
@pytest.mark.parametrize("to", ["launcher", "group"])
def test_signal_reaches_the_job_once(tmp_path: Path, name: str, to: str) -> None:
    with Launched(tmp_path, handles=[name, "SIGCONT"], options=QUIET) as one:
        one.beside()
        kill: Callable[[int, int], None] = os.kill if to == "launcher" else os.killpg
        kill(one.process.pid, getattr(signal, name))
        within(one.got, "the signal")
        one.goes_on()  # a second one would have come by now
        one.end()
        assert one.status() == 3
        assert one.got() == [name]


@pytest.mark.parametrize("name", ENDING)
def test_job_that_a_signal_ends_ends_the_launcher_by_the_same(tmp_path: Path, name: str) -> None:
    with Launched(tmp_path / "bare", bare=True) as bare, Launched(tmp_path / "under") as under:
        for one in (bare, under):
            one.job()
            os.kill(one.process.pid, getattr(signal, name))
        assert under.status() == bare.status()


# -- stopped and continued -----------------------------------------------------------------------


@pytest.mark.parametrize("to", ["launcher", "job", "recorder", "canary"])
def test_one_that_is_stopped_alone_goes_on_as_if_nothing_had_been(tmp_path: Path, to: str) -> None:
    with Launched(tmp_path, handles=["SIGUSR1"], options=QUIET) as one:
        pids = {"launcher": one.launcher(), "job": one.job(), **one.beside()}
        os.kill(pids[to], signal.SIGSTOP)
        one.stand_still(pids[to])
        if to != "job":
            one.goes_on()
        time.sleep(STOP_S)
        os.kill(pids[to], signal.SIGCONT)
        os.kill(pids["launcher"], signal.SIGUSR1)
        within(one.got, "a signal after it")
        one.end()
        assert one.status() == 3
        assert one.got() == ["SIGUSR1"]
        assert "cannot run" not in one.err


@pytest.mark.proof
@pytest.mark.slow
def test_recording_process_that_stays_stopped_holds_the_end_for_ten_seconds(tmp_path: Path) -> None:
    with Launched(tmp_path) as one:
        recorder = one.beside()["recorder"]
        os.kill(recorder, signal.SIGSTOP)
        one.end()
        within(lambda: "done" in one.out, "the job's end")
        began_s = time.monotonic()
        assert one.process.wait(30) == 3
        assert time.monotonic() - began_s < EXIT_LIMIT_S + 5
        os.kill(recorder, signal.SIGCONT)
        one.leaves_nothing()


def test_launcher_that_is_stopped_while_the_job_ends_has_its_status(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        job = one.job()
        os.kill(one.launcher(), signal.SIGSTOP)
        one.end()
        within(lambda: one.states(job) == {psutil.STATUS_ZOMBIE}, "the job's end")
        os.kill(one.launcher() if psutil.pid_exists(job) else one.process.pid, signal.SIGCONT)
        assert one.status() == 3


@pytest.mark.parametrize("sequence", [["SIGSTOP"], ["SIGTSTP"], ["SIGTSTP", "SIGSTOP"]])
@pytest.mark.parametrize("wakes", ["group", "launcher"])
def test_whole_job_is_stopped_and_continued(
    tmp_path: Path, sequence: list[str], wakes: str
) -> None:
    """Twice each: what came late of the first stop must not spoil the second."""
    with Launched(tmp_path, handles=["SIGUSR1"], options=QUIET) as one:
        pids = [one.launcher(), one.job(), *one.beside().values()]
        for _ in range(2):
            for name in sequence:
                os.killpg(one.process.pid, getattr(signal, name))
                one.stand_still(pids[0], pids[1])
            time.sleep(STOP_S)
            (os.killpg if wakes == "group" else os.kill)(one.process.pid, signal.SIGCONT)
            one.goes_on()
            within(
                lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all"
            )  # fmt: skip
        os.killpg(one.process.pid, signal.SIGUSR1)
        within(one.got, "a signal after it")
        one.goes_on()
        assert one.got() == ["SIGUSR1"]
        one.end()
        assert one.status() == 3


def test_suspend_of_the_launcher_alone_suspends_all_and_continues_all(tmp_path: Path) -> None:
    """Ctrl-Z, as a program sends it that knows the launcher alone."""
    with Launched(tmp_path, options=QUIET) as one:
        pids = [one.launcher(), one.job(), one.beside()["recorder"]]
        os.kill(pids[0], signal.SIGTSTP)
        one.stand_still(*pids)
        time.sleep(STOP_S)
        os.kill(pids[0], signal.SIGCONT)
        one.goes_on()
        within(lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all")
        one.end()
        assert one.status() == 3


def test_suspend_stop_and_continue_in_quick_succession_leave_nobody_behind(tmp_path: Path) -> None:
    """A launcher that stops itself for a SIGTSTP, after the SIGCONT has come, stops for ever."""
    with Launched(tmp_path, options=QUIET) as one:
        pids = [one.launcher(), one.job(), one.beside()["recorder"]]
        for hundredth in range(0, 30, 3):
            os.kill(pids[0], signal.SIGTSTP)
            time.sleep(hundredth / 100)
            os.kill(pids[0], signal.SIGSTOP)
            time.sleep(0.01)
            os.kill(pids[0], signal.SIGCONT)
            one.goes_on()
            within(lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all")
        one.end()
        assert one.status() == 3


# -- killed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_launcher_that_is_killed_leaves_the_job_and_its_record(tmp_path: Path, name: str) -> None:
    with Launched(tmp_path) as one:
        job = one.job()
        one.beside()
        os.kill(one.launcher(), getattr(signal, name))
        assert one.process.wait(30) == -getattr(signal, name)
        one.goes_on()
        within(lambda: f"the job goes on as process {job}" in one.err, "what becomes of it")
        within(lambda: _listed_pids(one) == [job], "the job in the list")
        one.end()
        one.leaves_nothing()
        assert "done" in one.out, "stdout stays the job's"
        (run,) = find_runs(one.logs)
        manifest = read_manifest(RunPaths(run))
        assert (manifest.exit_status, manifest.signal) == (None, None), "nobody knows it"
        assert manifest.end_wall_ns is not None


def test_job_that_has_outlived_its_launcher_ends_by_the_pid_that_ps_shows(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        one.beside()
        os.kill(one.launcher(), signal.SIGKILL)
        one.goes_on()
        (pid,) = within(lambda: _listed_pids(one), "the job")
        os.kill(pid, signal.SIGTERM)
        one.leaves_nothing()


def test_recording_process_that_is_killed_leaves_the_job_and_its_status(tmp_path: Path) -> None:
    with Launched(tmp_path, handles=["SIGUSR1"]) as one:
        os.kill(one.beside()["recorder"], signal.SIGKILL)
        within(lambda: "(SIGKILL); the job goes on" in one.err, "word of it")
        os.kill(one.launcher(), signal.SIGUSR1)
        within(one.got, "a signal after it")
        one.end()
        assert one.status() == 3
        assert "done" in one.out


def test_canary_that_is_killed_costs_nothing_but_a_signal_twice(tmp_path: Path) -> None:
    with Launched(tmp_path, handles=["SIGUSR1"], options=QUIET) as one:
        os.kill(one.beside()["canary"], signal.SIGKILL)
        os.kill(one.launcher(), signal.SIGUSR1)
        within(one.got, "the signal")
        one.end()
        assert one.status() == 3


def test_all_of_haiprof_killed_leaves_the_job_alone(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        for pid in [*one.beside().values(), one.launcher()]:
            os.kill(pid, signal.SIGKILL)
        one.goes_on()
        one.end()
        one.leaves_nothing()
        assert one.out.splitlines()[-1] == "done"


def test_group_that_is_killed_is_gone(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        one.beside()
        os.killpg(one.process.pid, signal.SIGKILL)
        assert one.status() == -signal.SIGKILL


# -- by other programs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before",
    [
        ("timeout", "3"),
        ("timeout", "-s", "KILL", "3"),
        ("timeout", "-k", "1", "3"),
        ("timeout", "--foreground", "3"),
        ("nohup", "timeout", "-s", "HUP", "-k", "1", "3"),
    ],
    ids=" ".join,
)
def test_timeout_ends_the_job_as_bare(tmp_path: Path, before: tuple[str, ...]) -> None:
    with (
        Launched(tmp_path / "bare", bare=True, before=before) as bare,
        Launched(tmp_path / "under", before=before, options=QUIET) as under,
    ):
        assert under.status() == bare.status()


def test_job_in_a_session_of_its_own_gets_what_the_launcher_gets(tmp_path: Path) -> None:
    with Launched(tmp_path, inside=["setsid", "-w"], options=QUIET) as one:
        one.job()
        os.killpg(one.process.pid, signal.SIGTERM)
        assert one.process.wait(30) != 0


def test_caller_that_gives_up_must_mean_the_group(tmp_path: Path) -> None:
    """`subprocess.run(timeout=)` kills one process; with `process_group` and killpg all end."""
    with Launched(tmp_path, options=QUIET) as one:
        one.beside()
        one.process.kill()
        one.process.wait()
        one.goes_on()
        os.killpg(one.process.pid, signal.SIGTERM)
        one.leaves_nothing()


def _listed_pids(one: Launched) -> list[int]:
    """What `haiprof ps` tells somebody to signal."""
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", "ps", "--json", "--log-dir", str(one.logs)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    return [job["pid"] for job in jobs if Path(job["path"]).parent == one.logs]
