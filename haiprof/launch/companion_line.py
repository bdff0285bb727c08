"""The socket between launcher and companion: JSON packets, an end, and a heartbeat."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from haiprof.launch.signals import above_streams, is_readable

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
                close_stderr()
                return
            self._stopped.wait(PULSE_S)


def close_stderr() -> None:
    """Redirects stderr to /dev/null: the launcher is gone, and with it the reader."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    os.close(null)
