"""The job as a child process: its terminal, its signals and its exit status stay its own."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from haiprof.launch.canary import Canary

TICK_S = 0.5
STOP_ANSWER_S = 0.2

_PR_SET_PDEATHSIG = 1
_SI_KERNEL = 0x80  # sent by the kernel
_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
# What a terminal's driver sends, and to the whole foreground group: an alarm() is the kernel's too.
_FROM_TERMINAL = (
    *_STOPS, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGWINCH, signal.SIGCONT,
)  # fmt: skip
# Not for the job: they cannot be caught, are about a process's own doing, or Python's own business.
_OWN = (
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    status: int
    """Exit status; 128 + the signal's number when one ended it."""
    signal: int | None
    """The signal that ended it."""

    @property
    def signal_name(self) -> str | None:
        """`SIGTERM`, and `SIG37` for one without a name."""
        if self.signal is None:
            return None
        try:
            return signal.Signals(self.signal).name
        except ValueError:
            return f"SIG{self.signal}"


class Supervisor:
    """Starts the job in the launcher's own process group and session, and passes signals on."""

    def __init__(self) -> None:
        passed_on = {number for number in signal.valid_signals() if number not in _OWN}
        self._waited = {*passed_on, signal.SIGCHLD}
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        self._child_before = signal.getsignal(signal.SIGCHLD)
        if self._child_before == signal.SIG_IGN:  # the kernel would throw the job's status away
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._canary = Canary()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The job's process id."""
        return self._child.pid if self._child is not None else 0

    def start(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Starts the job with the signal mask and the descriptors that the launcher was given.

        Raises:
            OSError: The program does not exist or cannot be executed.
        """
        prctl = ctypes.CDLL(None).prctl
        launcher, child_before = os.getpid(), self._child_before

        def in_child() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed launcher leaves no orphan
            if os.getppid() != launcher:
                os._exit(127)
            if child_before == signal.SIG_IGN:
                signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            self.unblock()

        def start(words: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(words, env=dict(environ), close_fds=False, preexec_fn=in_child)

        try:
            self._child = start(command)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            self._child = start(["/bin/sh", *command])  # no first line: as shells do

    def wait(self, tick: Callable[[], None]) -> Outcome:
        """Passes signals on until the job ends; calls `tick` about twice a second."""
        assert self._child is not None, "start() comes first"
        while self._child.poll() is None:
            info = signal.sigtimedwait(self._waited, TICK_S)
            if info is None:
                tick()
            elif info.si_signo != signal.SIGCHLD:
                self._pass_on(info.si_signo, info.si_code)
        code = self._child.returncode
        if code >= 0:
            return Outcome(code, None)
        return Outcome(128 - code, -code)

    def unblock(self) -> None:
        """Gives a child of ours the signal mask that the launcher was started with."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)

    def asked_to_end(self, wait_s: float = 0.1) -> bool:
        """Whether somebody asks the launcher itself to end, now that the job is over."""
        return signal.sigtimedwait(ENDING, wait_s) is not None

    def close(self) -> None:
        """Ends the canary. Signals stay blocked: after the job none may replace its status."""
        self._canary.close()
        while signal.sigtimedwait(self._waited - {signal.SIGCHLD}, 0) is not None:
            continue  # what came while the job was ending was meant for the job

    def _pass_on(self, number: int, code: int) -> None:
        heard = self._canary.heard(number)  # asked in any case, so that no answer is left over
        by_terminal = code == _SI_KERNEL and number in _FROM_TERMINAL
        child = self._child
        if child is not None and not by_terminal and not (heard and _in_our_group(child.pid)):
            child.send_signal(number)
        if number in _STOPS and _stops(self.pid):
            os.kill(os.getpid(), signal.SIGSTOP)


def _in_our_group(pid: int) -> bool:
    """Whether the job has stayed in our process group: not after setsid, say."""
    try:
        return os.getpgid(pid) == os.getpgrp()
    except OSError:
        return True


def _stops(pid: int) -> bool:
    """Whether the job stops within a moment; it may have a handler, or no shell to go on with."""
    deadline = time.monotonic() + STOP_ANSWER_S
    while time.monotonic() < deadline:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return False
        if stat.rpartition(")")[2].split()[0] == "T":
            return True
        time.sleep(STOP_ANSWER_S / 20)
    return False


def die_of(number: int) -> None:
    """Ends this process as the job was ended, so that the caller sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job's core is the one that matters
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
