"""Reads signals from a descriptor (signalfd), and lists those that concern a launcher.

`signal.sigtimedwait` of CPython (3.10 to 3.14) returns whatever lay on the stack when it was
interrupted, by SIGSTOP and SIGCONT for example, until its time was used up: a number that is no
signal, or one that nobody sent. The kernel's signalfd has no such state.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterable
from typing import NamedTuple

# Not for the job: they cannot be caught, are about a process's own doing, or Python's own business.
_OWN = (
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
PASSED_ON = frozenset(number for number in signal.valid_signals() if number not in _OWN)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

# glibc's and musl's sigset_t, and struct signalfd_siginfo: linux/signalfd.h.
_SIGSET_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_INFO = struct.Struct("<IiiII108x")


class Signal(NamedTuple):
    """A signal that has arrived."""

    number: int
    code: int
    """Who sent it: `si_code` of sigaction(2)."""
    pid: int = 0
    """The process that sent it; 0 where it was the kernel, or is in another PID namespace."""
    uid: int = 0
    """Its user."""


class SignalReader:
    """Takes blocked signals of the process that reads; a forked child reads its own."""

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = (ctypes.c_ulong * (_SIGSET_BITS // _WORD_BITS))()
        for number in numbers:
            mask[(number - 1) // _WORD_BITS] |= 1 << (number - 1) % _WORD_BITS
        library = ctypes.CDLL(None, use_errno=True)
        fd = library.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        if fd < 0:
            raise OSError(ctypes.get_errno(), f"signalfd: {os.strerror(ctypes.get_errno())}")
        self.fd = above_streams(fd)

    def read(self, wait_s: float = 0.0) -> Signal | None:
        """The next signal; None where none comes within the time."""
        if wait_s and not is_readable(self.fd, wait_s):
            return None
        try:
            number, _, code, pid, uid = _INFO.unpack(os.read(self.fd, _INFO.size))
        except BlockingIOError:
            return None
        return Signal(number, code, pid, uid)

    def close(self) -> None:
        """Closes the descriptor."""
        os.close(self.fd)


def above_streams(fd: int) -> int:
    """Moves a descriptor above the standard streams, also where those are closed."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def first_readable(fds: Iterable[int], wait_s: float | None) -> int | None:
    """The first descriptor with something to read, or an end; None where none has within a time."""
    poll = select.poll()  # not select.select: descriptors may be larger than 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ready = poll.poll(None if wait_s is None else wait_s * 1000)
    return ready[0][0] if ready else None


def is_readable(fd: int, wait_s: float | None) -> bool:
    """Whether there is something to read, or an end, within a time; without one it waits."""
    return first_readable((fd,), wait_s) is not None
