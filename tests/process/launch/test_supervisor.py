"""The job as haiprof's child: its signals, its terminal and its exit status stay its own."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from haiprof.linux.processes import WatchedProcess
from tests.process.live import within
from tests.sampling import first_of

LOG = """
import os, signal, sys, time
log = open(sys.argv[1], "a", buffering=1)
def note(number, frame):
    log.write(signal.Signals(number).name + "\\n")
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, note)
log.write("ready %d\\n" % os.getpid())
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    time.sleep(0.02)
"""


class Job:
    """A job under haiprof that writes down the signals it receives."""

    def __init__(self, tmp_path: Path, seconds: float = 120, **popen: object) -> None:
        script = tmp_path / "job.py"
        script.write_text(LOG)
        self.log = tmp_path / "signals.log"
        command = [sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path / "logs"), "--quiet"]
        self.process = subprocess.Popen(
            [*command, str(script), str(self.log), str(seconds)],
            **popen,  # type: ignore[call-overload]
        )
        self.job_pid = int(self.wait_for("ready").split()[1])
        time.sleep(0.3)

    def kill(self) -> None:
        """The job first: it is not its launcher's to end."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.job_pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()

    def lines(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1] if self.log.exists() else []

    def wait_for(self, word: str) -> str:
        return within(60, lambda: next((x for x in self.lines() if x.startswith(word)), None), word)

    def count(self, name: str) -> int:
        self.wait_for(name)
        time.sleep(0.4)  # a second delivery would come within this
        return self.lines().count(name)


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        job.kill()


def haiprof(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path / "logs"), "--quiet", *words],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("status", first_of([0, 1, 7, 255], 7))
def test_exit_status_is_the_jobs_own(tmp_path: Path, status: int) -> None:
    assert haiprof(tmp_path, "bash", "-c", f"exit {status}").returncode == status


@pytest.mark.parametrize("name", first_of(["SIGTERM", "SIGKILL", "SIGINT", "SIGSEGV"], "SIGKILL"))
def test_death_by_a_signal_is_passed_up_and_said(tmp_path: Path, name: str) -> None:
    done = haiprof(tmp_path, "bash", "-c", f"kill -{name[3:]} $$")
    assert done.returncode == -getattr(signal, name)
    assert f"ended by {name}" in done.stderr


@pytest.mark.proof
def test_real_time_signal_is_passed_up(tmp_path: Path) -> None:
    assert haiprof(tmp_path, "bash", "-c", "kill -37 $$").returncode == -37


def test_status_survives_a_caller_that_ignores_its_children(tmp_path: Path) -> None:
    words = f"{sys.executable} -m haiprof --log-dir {tmp_path} --quiet bash -c 'exit 3'"
    script = f"(trap '' CHLD; exec {words}); echo $?"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "3\n"


@pytest.mark.proof
def test_alarm_set_before_the_launcher_reaches_the_job(tmp_path: Path) -> None:
    code = "import os, signal, sys; signal.alarm(2); os.execv(sys.argv[1], sys.argv[1:])"
    words = [sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path), "--quiet", "sleep", "60"]
    done = subprocess.run([sys.executable, "-c", code, *words], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM


def test_missing_program_ends_like_in_a_shell(tmp_path: Path) -> None:
    done = haiprof(tmp_path, "no-such-program-here")
    assert done.returncode == 127
    assert "no-such-program-here" in done.stderr


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (b"\x03", "SIGINT"),
        pytest.param(b"\x1c", "SIGQUIT", marks=pytest.mark.proof),
        pytest.param(None, "SIGHUP", marks=pytest.mark.proof),
    ],
)
def test_terminal_reaches_the_job_once(
    tmp_path: Path, jobs: list[Job], keys: bytes | None, name: str
) -> None:
    """Ctrl-C, Ctrl-Backslash, and a window that is closed."""
    master, slave = pty.openpty()

    def own_terminal() -> None:
        os.setsid()
        import fcntl
        import termios

        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    jobs.append(job := Job(tmp_path, stdin=slave, preexec_fn=own_terminal))
    os.close(slave)
    if keys is None:
        os.close(master)
    else:
        os.write(master, keys)
    assert job.count(name) == 1
    if keys is not None:
        os.close(master)


def test_stdin_belongs_to_the_job(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path), "--quiet", "cat"],
        input="hello", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout == "hello"


@pytest.mark.proof
def test_handlers_ignored_by_the_caller_stay_ignored(tmp_path: Path) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)"
    done = subprocess.run(
        ["nohup", sys.executable, "-m", "haiprof", "--log-dir", str(tmp_path), "--quiet",
         "python3", "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "True"


ENDS = {
    "import sys; sys.exit(3)": (3, None),
    "import os; os._exit(0)": (0, None),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (None, signal.SIGKILL),
    "import ctypes; ctypes.string_at(0)": (None, signal.SIGSEGV),
}


@pytest.mark.parametrize("reaped", [False, True])
@pytest.mark.parametrize("code", ENDS)
def test_status_of_a_process_is_read_before_its_parent_asks_and_after(
    code: str, reaped: bool
) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
    watched = WatchedProcess(child.pid)
    try:
        assert child.stdin is not None
        child.stdin.write(b"\n")
        child.stdin.close()
        if reaped:
            child.wait()
        else:
            within(60, lambda: bool(select.select([watched.fd], [], [], 0)[0]))
        found = watched.read_exit()
        if found.source == "gone":
            pytest.skip("before Linux 6.15 nobody knows it once the parent has asked")
        assert (found.status, found.signal) == ENDS[code]
    finally:
        child.wait()
        watched.close()
