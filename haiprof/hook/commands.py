"""Answers requests while the job runs: one thread, asleep in a read of the agent's socket."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from haiprof.hook.threads import start_deaf_thread
from haiprof.rundir.control import (
    MESSAGE_LIMIT_BYTES,
    control_socket,
    decode_message,
    encode_message,
)
from haiprof.rundir.layout import RunPaths

RETRY_AFTER_S = (0.0, 0.5, 2.0, 8.0)
"""The agent starts beside the job, and so may come later than a rank that starts quickly."""

Handler = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""From a request's id and arguments to the reply; null where that follows later."""


class Commands:
    """The rank's end of the control socket.

    Args:
        run: The run directory.
        handlers: By kind of request; called on the thread of this object, never on the job's own.
        note: Takes one line for events.jsonl.
    """

    def __init__(
        self,
        run: RunPaths,
        handlers: Mapping[str, Handler],
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self.run = run
        self.handlers = dict(handlers)
        self._note = note
        self._socket: socket.socket | None = None
        self._closed = False

    def start(self, hello: Mapping[str, Any]) -> None:
        """Starts the thread; `hello` tells the agent who this is (rank, attempt, pid)."""
        start_deaf_thread(self._serve, dict(hello))

    def reply(self, request_id: str, content: Mapping[str, Any]) -> bool:
        """Sends a reply from any thread, without waiting; False if it could not be sent."""
        connection = self._socket
        if connection is None:
            return False
        try:
            connection.send(encode_message({"id": request_id, **content}), socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def stop(self) -> None:
        """Ends the connection and its thread."""
        self._closed = True
        connection = self._socket
        if connection is not None:
            with contextlib.suppress(OSError):  # the agent was gone before
                connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, and stays open there."""
        self._closed = True
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _serve(self, hello: dict[str, Any]) -> None:
        try:
            connection = self._connect()
            if connection is None:
                return
            connection.send(encode_message({"hello": hello}))
            while not self._closed:
                packet = connection.recv(MESSAGE_LIMIT_BYTES)
                if not packet:
                    return
                self._answer(packet)
        except OSError as error:
            if not self._closed:
                self._note({"type": "control", "state": "lost", "reason": str(error)})

    def _connect(self) -> socket.socket | None:
        reason = "no agent"
        for pause_s in RETRY_AFTER_S:
            time.sleep(pause_s)
            if self._closed:
                return None
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                folder, path = control_socket(self.run, socket.gethostname())
                try:
                    connection.connect(path)
                finally:
                    os.close(folder)
            except OSError as error:
                connection.close()
                reason = str(error)
            else:
                self._socket = connection
                return connection
        self._note({"type": "control", "state": "unreachable", "reason": reason})
        return None

    def _answer(self, packet: bytes) -> None:
        message = decode_message(packet) or {}
        request_id, kind = message.get("id"), message.get("kind")
        arguments = message.get("arguments")
        if not isinstance(request_id, str) or not isinstance(arguments, dict):
            return  # not from our agent
        handler = self.handlers.get(str(kind))
        if handler is None:
            self.reply(request_id, {"state": "refused", "reason": f"no request {kind!r} here"})
            return
        try:
            content = handler(request_id, arguments)
        except Exception as error:
            content = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        if content is not None:
            self.reply(request_id, content)
