"""The job as a child process: its terminal, its signals and its exit status stay its own."""

from __future__ import annotations

import ctypes
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
_SI_KERNEL = 0x80  # sent by the terminal driver: the whole foreground group has it already
_STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
_PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
    signal.SIGCONT,
    signal.SIGALRM,
    signal.SIGURG,
    *_STOPS,
)


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    status: int
    """Exit status; 128 + the signal's number when one ended it."""
    signal: signal.Signals | None
    """The signal that ended it."""


class Supervisor:
    """Starts the job in the launcher's own process group and session, and passes signals on."""

    def __init__(self) -> None:
        self._waited = {*_PASSED_ON, signal.SIGCHLD}
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
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
        launcher, mask = os.getpid(), self._mask_before

        def in_child() -> None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed launcher leaves no orphan
            if os.getppid() != launcher:
                os._exit(127)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        self._child = subprocess.Popen(
            command, env=dict(environ), close_fds=False, preexec_fn=in_child
        )

    def wait(self, tick: Callable[[], None]) -> Outcome:
        """Passes signals on until the job ends; calls `tick` about twice a second."""
        assert self._child is not None, "start() comes first"
        while self._child.poll() is None:
            info = signal.sigtimedwait(self._waited, TICK_S)
            if info is None:
                tick()
            elif info.si_signo != signal.SIGCHLD:
                self._pass_on(signal.Signals(info.si_signo), info.si_code)
        code = self._child.returncode
        if code >= 0:
            return Outcome(code, None)
        return Outcome(128 - code, signal.Signals(-code))

    def close(self) -> None:
        """Ends the canary and gives the launcher its own signals back."""
        self._canary.close()
        while signal.sigtimedwait(self._waited - {signal.SIGCHLD}, 0) is not None:
            continue  # what came while the job was ending was meant for the job
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)

    def _pass_on(self, number: signal.Signals, code: int) -> None:
        alone = code != _SI_KERNEL and not self._canary.heard(number)
        if alone and self._child is not None:
            self._child.send_signal(number)
        if number in _STOPS and _stops(self.pid):
            os.kill(os.getpid(), signal.SIGSTOP)


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


def die_of(number: signal.Signals) -> None:
    """Ends this process as the job was ended, so that the caller sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job's core is the one that matters
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
