"""An agent's connection to the controller: a thread waits for requests and sends replies."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.agent.reach.messages import FRAME_LIMIT_BYTES, LENGTH, SIGNATURE_BYTES, Budget, seal
from haiprof.agent.reach.proof import (
    AGENT,
    ANSWER_BYTES,
    CONTROLLER,
    MAGIC,
    NONCE_BYTES,
    Handshake,
    Signer,
    new_nonce,
)
from haiprof.base.messages import print_message

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
SEND_S = 5.0
PROOF_S = 20.0
"""A controller may take some seconds when thousands of agents connect at once."""
REQUESTS_PER_S = 50
"""A controller sends no more requests per second than this: people make them."""
KEPT_REQUESTS = 200
_FULL = struct.pack("ll", 1, 0)  # a timeval: send timeout


class NotProvenError(OSError):
    """The peer at the controller's address does not hold the token."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An authenticated connection."""

    connection: socket.socket
    outgoing: Signer
    incoming: Signer


class Uplink:
    """Connects, and reconnects when the controller comes back."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        self.requests: deque[bytes] = deque(maxlen=KEPT_REQUESTS)
        """Requests of the controller that were not taken yet, oldest first."""
        self.error: str | None = "not connected yet"
        """Why there is no connection; None while there is one."""
        self._address = address
        self._key = key
        self._line: _Line | None = None
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haiprof-uplink", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the connection."""
        self._stop.set()
        line = self._line
        if line is not None:
            with contextlib.suppress(OSError):
                line.connection.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(SEND_S)

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a reply; False without a connection, or where the controller does not read."""
        line = self._line
        if line is None:
            return False
        try:
            line.connection.sendall(seal(json.dumps(message).encode(), line.outgoing))
        except OSError:
            with contextlib.suppress(OSError):  # a frame was sent in part
                line.connection.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                with socket.create_connection(self._address, timeout=SEND_S) as connection:
                    self._line = _prove(connection, self._key)
                    self.error = None
                    if self._listen(self._line):
                        pause_s = FIRST_PAUSE_S
                self.error = "the controller has closed the connection"
            except NotProvenError as error:
                self.error = str(error)
                self._warn()
            except (OSError, ValueError) as error:  # ValueError: no host can have that name
                self.error = str(error)
            finally:
                self._line = None
            self._stop.wait(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    def _warn(self) -> None:
        """Warns once: it may be another user's process, or the token of another job."""
        if not self._warned:
            self._warned = True
            host, port = self._address
            print_message(
                f"--reach: {self.error} ({host}, port {port}); nothing was told to it; trying "
                "again: until then requests do not reach this node"
            )

    def _listen(self, line: _Line) -> bool:
        """Receives requests until the connection ends; whether there were any."""
        heard = False
        budget = Budget(REQUESTS_PER_S)
        while True:
            framed = _read(line.connection, LENGTH.size)
            length = LENGTH.unpack(framed)[0] if framed else 0
            if not framed or length > FRAME_LIMIT_BYTES:
                return heard
            framed += _read(line.connection, length)
            signature = _read(line.connection, SIGNATURE_BYTES)
            if not line.incoming.is_next(framed, signature) or not budget.spend(time.monotonic()):
                return heard
            heard = True
            self.requests.append(framed[LENGTH.size :])


def _prove(connection: socket.socket, key: bytes) -> _Line:
    """Checks the controller's proof, then sends this end's."""
    nonce = new_nonce()
    connection.sendall(MAGIC + nonce)
    answer = _read(connection, ANSWER_BYTES, until_s=time.monotonic() + PROOF_S)
    if not answer:
        raise ConnectionError("the controller has closed the connection")
    handshake = Handshake(key=key, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES])
    if not handshake.is_proof(CONTROLLER, answer[NONCE_BYTES:]):
        raise NotProvenError("what listens there does not have the same token")
    connection.sendall(handshake.proof(AGENT))
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _FULL)
    return _Line(connection, handshake.signer(AGENT), handshake.signer(CONTROLLER))


def _read(connection: socket.socket, count: int, *, until_s: float | None = None) -> bytes:
    """Reads exactly so many bytes."""
    data = bytearray()
    while len(data) < count:
        if until_s is not None:
            connection.settimeout(max(until_s - time.monotonic(), 0.001))
        piece = connection.recv(count - len(data))
        if not piece:
            return b""
        data += piece
    return bytes(data)
