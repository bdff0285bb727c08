"""NCCL's RAS as its documentation has it: greeting, TIMEOUT, SET FORMAT, STATUS, then it closes.

Source: docs/userguide/source/troubleshooting/ras.rst and src/ras of NCCL.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any


class FakeRas:
    """Answers one connection after another, each with the next of its answers, then the last."""

    def __init__(
        self, answers: Sequence[str], *, knows_json: bool = True, breaks: str = ""
    ) -> None:
        self.answers, self.knows_json, self.breaks = list(answers), knows_json, breaks
        self.heard: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(10)

    def _serve(self) -> None:
        number = 0
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(10)
                self._talk(connection, self.answers[min(number, len(self.answers) - 1)])
            number += 1

    def _talk(self, connection: socket.socket, answer: str) -> None:
        for line in connection.makefile("rb"):
            said = line.decode().strip()
            self.heard.append(said)
            if self.breaks == "silent":
                continue
            if said.upper().startswith("CLIENT PROTOCOL "):
                reply = "220 smtp ready\n" if self.breaks == "other" else "SERVER PROTOCOL 2\n"
            elif said.upper() == "SET FORMAT JSON" and not self.knows_json:
                reply = f"ERROR: Unknown command {said}\n"
            elif said.upper() == "VERBOSE STATUS":
                whole = answer.encode()
                half = self.breaks == "half"
                connection.sendall(whole[: len(whole) // 2] if half else whole)
                if self.breaks == "endless":
                    with contextlib.suppress(OSError):
                        while True:
                            connection.sendall(b"x" * 65536)
                return
            else:
                reply = "OK\n"
            connection.sendall(reply.encode())


@contextlib.contextmanager
def fake_ras(*answers: str, **how: Any) -> Iterator[FakeRas]:
    server = FakeRas(answers, **how)
    try:
        yield server
    finally:
        server.close()
