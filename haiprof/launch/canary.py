"""Tells a signal sent to the launcher alone from one sent to its whole process group.

A signal from the terminal, `timeout`, or a scheduler that signals every process reaches the job by
itself; passing it on would deliver it twice. One sent to the launcher alone must be passed on. No
system call tells the two apart, but a small process in the same group does: if it got the signal
too, so did the job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import time

ANSWER_S = 0.05
_RECORD = struct.Struct("<qq")  # signal, CLOCK_MONOTONIC ns: a late answer is no answer to the next


class Canary:
    """A forked process in the launcher's group that reports the signals it receives."""

    def __init__(self) -> None:
        self._handled_ns = 0
        self._fd, write_fd = _pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _sing(write_fd, parent)
        os.close(write_fd)

    def heard(self, number: int) -> bool:
        """Whether the same signal reached the canary, waiting a moment for it."""
        deadline = time.monotonic() + ANSWER_S
        answer = False
        while not answer and (left := deadline - time.monotonic()) > 0:
            ready, _, _ = select.select([self._fd], [], [], left)
            heard = os.read(self._fd, _RECORD.size) if ready else b""
            if not heard:  # silence; or somebody killed it: twice is better than never
                break
            heard_number, heard_ns = _RECORD.unpack(heard)
            answer = heard_number == number and heard_ns > self._handled_ns
        self._handled_ns = time.monotonic_ns()
        return answer

    def close(self) -> None:
        """Ends the canary."""
        os.close(self._fd)
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            return  # somebody else ended it


def _pipe() -> tuple[int, int]:
    """A pipe that stands above the standard streams, also where those are closed."""
    ends = os.pipe()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in ends]
    for fd in ends:
        os.close(fd)
    return moved[0], moved[1]


def _sing(write_fd: int, parent: int) -> None:
    """The canary's whole life: one record per signal, until the launcher is gone."""
    try:
        for fd in (0, 1, 2):
            with contextlib.suppress(OSError):
                os.close(fd)
        everything = signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        while os.getppid() == parent:
            info = signal.sigtimedwait(everything, 1.0)
            if info is not None:
                os.write(write_fd, _RECORD.pack(info.si_signo, time.monotonic_ns()))
    finally:
        os._exit(0)
