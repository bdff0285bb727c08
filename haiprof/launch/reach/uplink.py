"""An agent's line to the controller: a thread that waits for requests; replies go up it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from haiprof.launch.reach.wire import FRAME_LIMIT_BYTES, LENGTH, content, frame

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SEND_S = 5.0
_FULL = struct.pack("ll", 1, 0)  # a timeval: the launcher waits so long for a controller to read


class Uplink:
    """Connects, and connects again when the controller comes back.

    Args:
        address: The controller's host and port.
        token: What it wants to see.
        host: This node.
    """

    def __init__(self, address: tuple[str, int], token: str, host: str) -> None:
        self.requests: deque[dict[str, Any]] = deque(maxlen=1000)
        """What the controller asked, oldest first."""
        self.error: str | None = "not connected yet"
        """Why there is no connection; null while there is one."""
        self._address = address
        self._hello = {"token": token, "host": host}
        self._socket: socket.socket | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haiprof-uplink", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the connection."""
        self._stop.set()
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(SEND_S)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a reply; False where there is no connection, or nobody reads what comes up it."""
        connection = self._socket
        if connection is None:
            return False
        try:
            connection.sendall(frame(message))
        except OSError:
            with contextlib.suppress(OSError):  # nothing may follow a part of a frame
                connection.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                with socket.create_connection(self._address, timeout=SEND_S) as connection:
                    connection.sendall(frame(self._hello))
                    connection.settimeout(None)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _FULL)
                    self._socket, self.error = connection, None
                    if self._listen(connection):
                        pause_s = FIRST_PAUSE_S
                self.error = "the controller has closed the connection"
            except OSError as error:
                self.error = str(error)
            finally:
                self._socket = None
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _listen(self, connection: socket.socket) -> bool:
        """Takes requests until the connection ends; whether there were any."""
        heard = False
        while True:
            head = _read(connection, LENGTH.size)
            length = LENGTH.unpack(head)[0] if head else 0
            if not head or length > FRAME_LIMIT_BYTES:
                return heard
            message = content(_read(connection, length))
            if message is None:
                return heard
            heard = True
            self.requests.append(message)


def _read(connection: socket.socket, count: int) -> bytes:
    """So many bytes; fewer at the end of the connection are none."""
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)
