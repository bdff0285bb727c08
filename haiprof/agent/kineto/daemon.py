"""Replaces dynolog's daemon: a thread blocked in recv, which answers at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from haiprof.agent.kineto.messages import (
    CONTEXT,
    DATAGRAM_LIMIT_BYTES,
    OURS,
    REQUEST,
    decode,
    decode_ask,
    decode_ours,
    encode,
    encode_count,
    encode_ours,
    is_context,
)
from haiprof.agent.kineto.pending_requests import PendingRequests
from haiprof.base.safe_files import remove_file

_UCRED = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(256)
_STOP_S = 2.0

Address = str | bytes


class KinetoAgent:
    """Answers processes that run with KINETO_USE_DAEMON.

    A process waits 0.1 s for an answer, so this thread does nothing else. libkineto terminates its
    process on an answer from a path that does not begin with its configured folder: such a process
    gets no answer.
    """

    def __init__(self, address: str, failed: Callable[[str], None] = lambda _: None) -> None:
        self.address = address
        self.pending = PendingRequests()
        self.ignored_count = 0
        """Datagrams that were malformed, or another user's."""
        self._failed = failed
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    def bind(self) -> None:
        """Takes the address; messages wait until `start`."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            bound.bind(self.address)
        except OSError:
            bound.close()
            raise
        self._socket = bound

    def start(self) -> None:
        """Begins to answer."""
        self._thread = threading.Thread(target=self._run, name="haiprof-kineto", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and removes the socket."""
        bound = self._socket
        if bound is None:
            return
        self._ending.set()
        with contextlib.suppress(OSError):
            bound.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self._thread is None:
            self._close()
        else:
            self._thread.join(_STOP_S)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until it has ended; whether it has."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                self._answer_one()
        except OSError as error:
            self._failed(str(error.strerror or error))
        finally:
            self._close()

    def _close(self) -> None:
        """Closes the socket, also after an error: a socket without a reader is worse than none."""
        bound, self._socket = self._socket, None
        if bound is not None:
            bound.close()
            remove_socket(self.address)

    def _answer_one(self) -> None:
        assert self._socket is not None, "bind() comes first"
        datagram, ancillary, flags, sender = self._socket.recvmsg(
            DATAGRAM_LIMIT_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        pid, answered = _sender_pid(ancillary), False
        if pid is not None and sender and not flags & socket.MSG_TRUNC:
            answered = self._answer(pid, datagram, sender)
        self.ignored_count += not answered

    def _answer(self, pid: int, datagram: bytes, sender: Address) -> bool:
        """Answers one message; False for a malformed one."""
        message = decode(datagram)
        if message is None:
            return False
        if message.type == OURS:
            question = decode_ours(message.payload)
            if question is None:
                return False
            self._send(encode_ours(self.pending.answer(question)), sender)
            return True
        if not self._is_below_us(sender):
            return False
        ask = decode_ask(message.payload) if message.type == REQUEST else None
        if ask is not None:
            text, request = self.pending.note_client(pid, ask)
            if self._send(encode(REQUEST, os.fsencode(text)), sender) and request:
                self.pending.note_delivery(pid, request)
            return True
        if message.type == CONTEXT and is_context(message.payload):
            self._send(encode_count(max(len(self.pending.clients), 1)), sender)
            return True
        return False

    def _send(self, answer: bytes, receiver: Address) -> bool:
        """Sends an answer without waiting; whether the receiver took it."""
        assert self._socket is not None, "bind() comes first"
        try:
            self._socket.sendto(answer, socket.MSG_DONTWAIT, receiver)
        except OSError:
            return False
        return True

    def _is_below_us(self, sender: Address) -> bool:
        """Whether a process uses the same path for the folder as this agent."""
        name = os.fsdecode(sender)
        if self.address.startswith("\0"):
            return name.startswith("\0")
        return name.startswith(os.path.dirname(self.address) + "/")


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The sender's process id from the kernel; None for another user, or if not known.

    Descriptors that were sent along are closed.
    """
    sender: int | None = None
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            for (fd,) in struct.iter_unpack("=i", data[: len(data) // 4 * 4]):
                os.close(fd)
        elif kind == socket.SCM_CREDENTIALS and len(data) == _UCRED.size:
            pid, uid, _ = _UCRED.unpack(data)
            sender = pid if uid == os.getuid() and pid > 0 else None
    return sender


def remove_socket(address: str) -> None:
    """Removes a socket from its folder; an abstract one vanishes by itself."""
    if address.startswith("\0"):
        return
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):
            remove_file(Path(address), below=Path(address).parent)
