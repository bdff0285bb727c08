"""Distinguishes a signal to the launcher alone from one to its whole process group.

A signal from the terminal, `timeout`, or a scheduler that signals every process reaches the job
directly; forwarding it would deliver it twice. One sent to the launcher alone must be forwarded. No
system call distinguishes the two, but a small process in the same group does: if it got the signal
too, so did the job.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import time

from haiprof.launch.signals import SignalReader, above_streams, is_readable

ANSWER_S = 0.05
_RECORD = struct.Struct("<qq")  # signal, CLOCK_MONOTONIC ns: a late answer is no answer to the next


class Canary:
    """A forked process in the launcher's group that reports the signals it receives."""

    def __init__(self) -> None:
        self._handled_ns = 0
        self._fd, write_fd = map(above_streams, os.pipe())
        self.pid = os.fork()
        if self.pid == 0:
            _report_signals(self._fd, write_fd)
        os.close(write_fd)

    def has_received(self, number: int) -> bool:
        """Whether the same signal reached the canary, waiting a moment for it."""
        deadline = time.monotonic() + ANSWER_S
        answer = False
        while not answer and (left := deadline - time.monotonic()) > 0:
            heard = os.read(self._fd, _RECORD.size) if is_readable(self._fd, left) else b""
            if not heard:  # no answer, or it was killed: delivering twice is better than never
                break
            heard_number, heard_ns = _RECORD.unpack(heard)
            answer = heard_number == number and heard_ns > self._handled_ns
        self._handled_ns = time.monotonic_ns()
        return answer

    def leave(self) -> None:
        """In another child of the launcher: the canary is not its own."""
        os.close(self._fd)

    def close(self) -> None:
        """Ends the canary."""
        os.close(self._fd)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else ended it
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _report_signals(read_fd: int, write_fd: int) -> None:
    """The canary's whole life: one record per signal, until nobody reads them any more."""
    try:
        for fd in (0, 1, 2, read_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        everything = signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        reader = SignalReader(everything - {signal.SIGKILL, signal.SIGSTOP})
        events = select.poll()
        events.register(reader.fd, select.POLLIN)
        events.register(write_fd, 0)  # tells of POLLERR: the launcher is gone
        while write_fd not in dict(events.poll()):
            got = reader.read()
            if got is not None:
                os.write(write_fd, _RECORD.pack(got.number, time.monotonic_ns()))
    finally:
        os._exit(0)
