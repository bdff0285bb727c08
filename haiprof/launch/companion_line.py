"""The socket between launcher and companion, and signals read from a descriptor (signalfd)."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


PULSE_S = 1.0
_PACKET_LIMIT_BYTES = 1 << 20


class Line:
    """One end of it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=above_streams(fd))

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """Both ends."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ends[0].detach()), cls(ends[1].detach())

    @property
    def fd(self) -> int:
        """For poll(2)."""
        return self._socket.fileno()

    def send(self, **content: object) -> bool:
        """Sends a packet without waiting; whether the other end still exists."""
        try:
            self._socket.send(json.dumps(content).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # it does not read just now, as when it is stopped
        except OSError:
            return False
        return True

    def receive(self, wait_s: float | None) -> dict[str, Any] | None:
        """The next packet; None where none comes within the time. Without one it waits."""
        if not is_readable(self.fd, wait_s):
            return None
        try:
            packet = self._socket.recv(_PACKET_LIMIT_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError("the other end is gone")
        found: dict[str, Any] = json.loads(packet)
        return found

    def close(self) -> None:
        """Ends it."""
        self._socket.close()


class Pulse:
    """A heartbeat to the launcher once a second, silent while the run directory's disk hangs."""

    def __init__(self, line: Line, folder: Path) -> None:
        self._line, self._folder = line, folder
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins; once it has begun this does nothing."""
        if self._thread is None or not self._thread.is_alive():
            self._stopped.clear()
            self._thread = threading.Thread(target=self._beat, name="haiprof-pulse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends it, without waiting."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # an error is an answer, too
                os.utime(self._folder)
            if not self._line.send(pulse=time.monotonic()):
                discard(2)  # the launcher is gone, and with it the reader
                return
            self._stopped.wait(PULSE_S)


def discard(*fds: int) -> None:
    """Redirects descriptors to /dev/null: a pipe's reader sees its end, or there is none."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    if null not in fds:
        os.close(null)
