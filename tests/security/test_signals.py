"""Signals to a job and to haiprof's own processes: each row of docs/signals.md.

Those of Slurm and torchrun are in tests/process/test_suspended_jobs.py, those of a terminal in
tests/process/launch/test_supervisor.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from haiprof import Analyzer
from haiprof.launch.supervisor import EXIT_LIMIT_S
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs, read_manifest
from tests.process.jobs import run_command
from tests.process.live import within
from tests.sampling import first_of
from tests.security.launched import LIMIT_S, Launched

QUIET = ("--quiet",)
ENDING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
STOP_S = 1.2  # longer than the 0.7 s after which a launcher once ended with 126


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """`launch(name, ...)`: a job in a folder of its own; several of them wait at the same time."""
    with ExitStack() as jobs:

        def start(name: str, **how: Any) -> Launched:
            return jobs.enter_context(Launched(tmp_path / name, **how))

        yield start


@pytest.mark.parametrize("to", first_of(["launcher", "group"], "launcher"))
def test_signals_reach_the_job_once_each(launch: Callable[..., Launched], to: str) -> None:
    """Each is the first one of a job: what came before it must not matter, nor be needed."""
    names = [*ENDING, "SIGUSR1", "SIGWINCH"]
    jobs = {name: launch(name, handles=[*names, "SIGCONT"], options=QUIET) for name in names}
    kill: Callable[[int, int], None] = os.kill if to == "launcher" else os.killpg
    for name, one in jobs.items():
        one.beside()
        kill(one.process.pid, getattr(signal, name))
        within(LIMIT_S, one.got, "the signal")
    for name, one in jobs.items():
        one.goes_on()  # a second one would have come by now
        assert one.got() == [name]
        one.end()
    assert {name: one.status() for name, one in jobs.items()} == dict.fromkeys(names, 3)
    assert {name: one.got() for name, one in jobs.items()} == {name: [name] for name in names}


def test_job_that_a_signal_ends_ends_the_launcher_by_the_same(
    launch: Callable[..., Launched],
) -> None:
    pairs = {n: (launch(f"{n}-bare", bare=True), launch(f"{n}-under")) for n in ENDING}
    for name, pair in pairs.items():
        for one in pair:
            one.job()
            os.kill(one.process.pid, getattr(signal, name))
    statuses = {name: (bare.status(), under.status()) for name, (bare, under) in pairs.items()}
    assert [bare for bare, _ in statuses.values()] == [under for _, under in statuses.values()]
    assert len({bare for bare, _ in statuses.values()}) == len(ENDING)


# -- stopped and continued -----------------------------------------------------------------------


def test_one_that_is_stopped_alone_goes_on_as_if_nothing_had_been(
    launch: Callable[..., Launched],
) -> None:
    names = ("launcher", "job", "recorder", "canary")
    jobs = {name: launch(name, handles=["SIGUSR1"], options=QUIET) for name in names}
    launchers = {name: one.launcher() for name, one in jobs.items()}
    stopped = {
        name: {"launcher": launchers[name], "job": one.job(), **one.beside()}[name]
        for name, one in jobs.items()
    }
    for name, one in jobs.items():
        os.kill(stopped[name], signal.SIGSTOP)
        one.stand_still(stopped[name])
        if name != "job":
            one.goes_on()
    time.sleep(STOP_S)
    for name, one in jobs.items():
        os.kill(stopped[name], signal.SIGCONT)
        os.kill(launchers[name], signal.SIGUSR1)
        within(LIMIT_S, one.got, f"a signal after the stop of the {name}")
        one.end()
    for name, one in jobs.items():
        assert (name, one.status(), one.got()) == (name, 3, ["SIGUSR1"])
        assert "cannot run" not in one.err, name


@pytest.mark.proof
@pytest.mark.slow
def test_recording_process_that_stays_stopped_holds_the_end_for_ten_seconds(tmp_path: Path) -> None:
    with Launched(tmp_path) as one:
        recorder = one.beside()["recorder"]
        os.kill(recorder, signal.SIGSTOP)
        one.end()
        within(LIMIT_S, lambda: "done" in one.out, "the job's end")
        began_s = time.monotonic()
        assert one.process.wait(60) == 3
        assert time.monotonic() - began_s < EXIT_LIMIT_S + 20
        with suppress(ProcessLookupError):  # the kernel woke it: its group is orphaned
            os.kill(recorder, signal.SIGCONT)
        one.leaves_nothing()


def test_launcher_that_is_stopped_while_the_job_ends_has_its_status(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        job = one.job()
        os.kill(one.launcher(), signal.SIGSTOP)
        one.end()
        within(LIMIT_S, lambda: one.states(job) == {psutil.STATUS_ZOMBIE}, "the job's end")
        os.kill(one.launcher() if psutil.pid_exists(job) else one.process.pid, signal.SIGCONT)
        assert one.status() == 3


def test_signal_that_ended_the_job_first_is_still_told(tmp_path: Path) -> None:
    """Slurm sends SIGCONT and SIGTERM to all: the job is gone before the launcher has read both."""
    with Launched(tmp_path, options=QUIET) as one:
        one.beside()
        one.goes_on()
        launcher, job = one.launcher(), one.job()
        os.kill(launcher, signal.SIGSTOP)
        one.stand_still(launcher)
        for pid, number in (
            (launcher, signal.SIGUSR1), (launcher, signal.SIGTERM), (job, signal.SIGTERM)
        ):  # fmt: skip
            os.kill(pid, number)
        within(LIMIT_S, lambda: one.states(job) == {psutil.STATUS_ZOMBIE}, "the job's end")
        os.kill(launcher, signal.SIGCONT)
        assert one.status() == -signal.SIGTERM
    (death,) = Analyzer(one.logs).deaths()
    assert (death.cause, death.certain) == ("signal", True), death


@pytest.mark.parametrize("wakes", first_of(["group", "launcher"], "group"))
def test_whole_job_is_stopped_and_continued(launch: Callable[..., Launched], wakes: str) -> None:
    """Twice each: what came late of the first stop must not spoil the second."""
    sequences = ("SIGSTOP", "SIGTSTP", "SIGTSTP SIGSTOP")
    jobs = {names: launch(names, handles=["SIGUSR1"], options=QUIET) for names in sequences}
    pids = {n: [one.launcher(), one.job(), *one.beside().values()] for n, one in jobs.items()}
    for _ in range(2):
        for names, one in jobs.items():
            for name in names.split():
                os.killpg(one.process.pid, getattr(signal, name))
                one.stand_still(*pids[names][:2])
        time.sleep(STOP_S)
        for one in jobs.values():
            (os.killpg if wakes == "group" else os.kill)(one.process.pid, signal.SIGCONT)
        for names, one in jobs.items():
            one.goes_on()
            _nobody_stands_still(one, pids[names])
    for one in jobs.values():
        os.killpg(one.process.pid, signal.SIGUSR1)
        within(LIMIT_S, one.got, "a signal after it")
        one.goes_on()
        assert one.got() == ["SIGUSR1"]
        one.end()
    assert {names: one.status() for names, one in jobs.items()} == dict.fromkeys(sequences, 3)


def _nobody_stands_still(one: Launched, pids: list[int]) -> None:
    within(LIMIT_S, lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all")


def test_suspend_of_the_launcher_alone_suspends_all_and_continues_all(tmp_path: Path) -> None:
    """Ctrl-Z, as a program sends it that knows the launcher alone."""
    with Launched(tmp_path, options=QUIET) as one:
        pids = [one.launcher(), one.job(), one.beside()["recorder"]]
        os.kill(pids[0], signal.SIGTSTP)
        one.stand_still(*pids)
        time.sleep(STOP_S)
        os.kill(pids[0], signal.SIGCONT)
        one.goes_on()
        within(LIMIT_S, lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all")
        one.end()
        assert one.status() == 3


@pytest.mark.proof
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
            within(
                LIMIT_S, lambda: psutil.STATUS_STOPPED not in one.states(*pids), "continuing of all"
            )
        one.end()
        assert one.status() == 3


@pytest.mark.proof
def test_group_that_is_continued_while_the_launcher_asks_who_got_the_suspend(
    tmp_path: Path,
) -> None:
    """What the launcher sends the job for a SIGTSTP after the group's SIGCONT stops it for ever."""
    with Launched(tmp_path, options=QUIET) as one:
        beside = one.beside()
        pids = [one.launcher(), one.job(), *beside.values()]
        for ms in range(0, 60, 6):
            os.kill(beside["canary"], signal.SIGSTOP)  # it is slow to answer
            os.killpg(one.process.pid, signal.SIGTSTP)
            time.sleep(ms / 1000)
            os.killpg(one.process.pid, signal.SIGSTOP)
            one.stand_still(*pids)
            time.sleep(0.1)
            os.killpg(one.process.pid, signal.SIGCONT)
            one.goes_on()
            time.sleep(0.3)
            _nobody_stands_still(one, pids)
            one.goes_on()
        one.end()
        assert one.status() == 3


# -- killed --------------------------------------------------------------------------------------


def test_launcher_that_is_killed_leaves_the_job_and_its_record(
    launch: Callable[..., Launched],
) -> None:
    jobs = {name: launch(name) for name in ("SIGKILL", "SIGSEGV", "SIGABRT")}
    for name, one in jobs.items():
        one.beside()
        os.kill(one.launcher(), getattr(signal, name))
        assert one.process.wait(30) == -getattr(signal, name)
    for one in jobs.values():
        _outlives_its_launcher(one, one.job())
        one.end()
    for one in jobs.values():
        one.leaves_nothing()
        assert "done" in one.out, "stdout stays the job's"
        (run,) = find_runs(one.logs)
        manifest = read_manifest(RunPaths(run))
        assert (manifest.exit_status, manifest.signal) == (None, None), "nobody knows it"
        assert manifest.end_wall_ns is not None


def _outlives_its_launcher(one: Launched, job: int) -> None:
    one.goes_on()
    within(LIMIT_S, lambda: f"the job goes on as process {job}" in one.err, "what becomes of it")
    within(LIMIT_S, lambda: _listed_pids(one) == [job], "the job in the list")


def test_job_that_has_outlived_its_launcher_ends_by_its_pid_and_by_its_group(
    launch: Callable[..., Launched],
) -> None:
    """The pid is the one that `ps` shows; `subprocess.run(timeout=)` kills the launcher alone."""
    jobs = by_pid, by_group = launch("pid", options=QUIET), launch("group", options=QUIET)
    for one in jobs:
        one.beside()
        one.process.kill()
        one.process.wait()
        one.goes_on()
    (pid,) = within(LIMIT_S, lambda: _listed_pids(by_pid), "the job")
    os.kill(pid, signal.SIGTERM)
    os.killpg(by_group.process.pid, signal.SIGTERM)
    for one in jobs:
        one.leaves_nothing()


def test_recording_process_that_is_killed_leaves_the_job_and_its_status(tmp_path: Path) -> None:
    with Launched(tmp_path, handles=["SIGUSR1"]) as one:
        os.kill(one.beside()["recorder"], signal.SIGKILL)
        within(LIMIT_S, lambda: "(SIGKILL); the job goes on" in one.err, "word of it")
        os.kill(one.launcher(), signal.SIGUSR1)
        within(LIMIT_S, one.got, "a signal after it")
        one.end()
        assert one.status() == 3
        assert "done" in one.out


@pytest.mark.proof
def test_canary_that_is_killed_costs_nothing_but_a_signal_twice(tmp_path: Path) -> None:
    with Launched(tmp_path, handles=["SIGUSR1"], options=QUIET) as one:
        os.kill(one.beside()["canary"], signal.SIGKILL)
        os.kill(one.launcher(), signal.SIGUSR1)
        within(LIMIT_S, one.got, "the signal")
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


@pytest.mark.proof
def test_group_that_is_killed_is_gone(tmp_path: Path) -> None:
    with Launched(tmp_path, options=QUIET) as one:
        one.beside()
        os.killpg(one.process.pid, signal.SIGKILL)
        assert one.status() == -signal.SIGKILL


# -- by other programs ---------------------------------------------------------------------------


def test_timeout_ends_the_job_as_bare(launch: Callable[..., Launched]) -> None:
    befores = (
        "timeout 3",
        "timeout -s KILL 3",
        "timeout -k 1 3",
        "timeout --foreground 3",
        "nohup timeout -s HUP -k 1 3",
    )
    bare, under = (
        {before: launch(f"{before} {how}", before=before.split(), **options) for before in befores}
        for how, options in (("bare", {"bare": True}), ("under", {"options": QUIET}))
    )
    expected = {before: one.status() for before, one in bare.items()}
    assert {before: one.status() for before, one in under.items()} == expected


@pytest.mark.proof
def test_job_in_a_session_of_its_own_gets_what_the_launcher_gets(tmp_path: Path) -> None:
    with Launched(tmp_path, inside=["setsid", "-w"], options=QUIET) as one:
        one.job()
        os.killpg(one.process.pid, signal.SIGTERM)
        assert one.process.wait(30) != 0


def _listed_pids(one: Launched) -> list[int]:
    """What `haiprof ls --live` tells somebody to signal."""
    done = run_command(["ps", "--json", "--log-dir", str(one.logs)], folder=one.folder)
    assert done.returncode == 0, done.stderr
    jobs = json.loads(done.stdout)["jobs"]
    return [job["pid"] for job in jobs if Path(job["path"]).parent == one.logs]
