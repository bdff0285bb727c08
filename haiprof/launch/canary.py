"""Tells a signal sent to the launcher alone from one sent to its whole process group.

A signal from the terminal, `timeout`, or a scheduler that signals every process reaches the job by
itself; passing it on would deliver it twice. One sent to the launcher alone must be passed on. No
system call tells the two apart, but a small process in the same group does: if it got the signal
too, so did the job.
"""

from __future__ import annotations

import os
import select
import signal
import time

ANSWER_S = 0.05


class Canary:
    """A forked process in the launcher's group that reports the signals it receives."""

    def __init__(self) -> None:
        self._fd, write_fd = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _sing(write_fd, parent)
        os.close(write_fd)

    def heard(self, number: int) -> bool:
        """Whether the same signal reached the canary, waiting a moment for it."""
        deadline = time.monotonic() + ANSWER_S
        while (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._fd], [], [], left)
            if not ready:
                return False
            heard = os.read(self._fd, 1)
            if not heard:  # somebody killed it: pass signals on, twice is better than never
                time.sleep(left)
                return False
            if heard[0] == number:
                return True
        return False

    def close(self) -> None:
        """Ends the canary."""
        os.close(self._fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return  # somebody else ended it


def _sing(write_fd: int, parent: int) -> None:
    """The canary's whole life: one byte per signal, until the launcher is gone."""
    try:
        for fd in (0, 1, 2):
            os.close(fd)
        everything = signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        while os.getppid() == parent:
            info = signal.sigtimedwait(everything, 1.0)
            if info is not None:
                os.write(write_fd, bytes((info.si_signo,)))
    finally:
        os._exit(0)
