"""Answers requests while the job runs: how far a rank is, its stacks, its last collectives."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from haiprof.base.descriptors import Descriptor
from haiprof.in_job.collectives import FlightRecorder
from haiprof.in_job.frames import frame_lines, read_stacks
from haiprof.in_job.spans import RingMemory
from haiprof.in_job.threads import start_deaf_thread
from haiprof.run_format.control import (
    MESSAGE_LIMIT_BYTES,
    QUESTION,
    conform,
    control_socket,
    encode_message,
    read_object,
)
from haiprof.run_format.layout import RunPaths

RETRY_AFTER_S = (0.0, 0.5, 2.0, 8.0)  # the agent starts beside the job, and so may come later

MAX_DEPTH = 100
MAX_THREADS = 64
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_PR_SET_PTRACER = 0x59616D61  # linux/prctl.h: "Yama"
_UCRED = struct.Struct("3i")

Handler = Callable[[str, Mapping[str, Any]], Mapping[str, Any] | None]
"""From a request's id and arguments to the reply; None where that follows later."""


class Line:
    """One connection to the agent of this node, which the job may close under our hands."""

    def __init__(self, connection: socket.socket) -> None:
        self._descriptor = Descriptor(connection.detach())

    @classmethod
    def open(
        cls, run: RunPaths, hello: Mapping[str, Any], *, ring: RingMemory | None = None
    ) -> Line:
        """Connects and says who this is; the agent is given the ring, which is its from then on."""
        folder, path = control_socket(run, socket.gethostname())
        own = Descriptor(folder)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(path.replace(f"/fd/{folder}/", f"/fd/{own.number}/"))
            told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            pid, uid, _ = _UCRED.unpack(told)
            if uid != os.geteuid():
                raise PermissionError(1, f"another user (uid {uid}) listens there")
        except OSError:
            connection.close()
            raise
        finally:
            own.close()
        let_look(pid)
        line = cls(connection)
        number = None if ring is None else ring.descriptor()
        line.send(encode_message({"hello": dict(hello)}), give=number)
        if ring is not None and number is not None:
            ring.close()
        return line

    def is_ours(self) -> bool:
        """Whether the job has left it alone."""
        return self._descriptor.is_ours()

    def send(self, message: bytes, *, give: int | None = None) -> None:
        """Sends one message, without waiting."""
        right = None if give is None else array("i", [give])
        rights = [] if right is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, right)]
        with self._borrow() as connection:
            connection.sendmsg([message], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def receive(self) -> bytes:
        """The next message; empty once the agent is gone."""
        return os.read(self._descriptor.check(), MESSAGE_LIMIT_BYTES)

    def close(self) -> None:
        """Lets go of our end, unless its number is somebody else's by now."""
        self._descriptor.close()

    @contextlib.contextmanager
    def _borrow(self) -> Iterator[socket.socket]:
        """A socket object for one call: one that lived on would close the number with itself."""
        number = self._descriptor.check()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, fileno=number)
        try:
            yield connection
        finally:
            connection.detach()


def let_look(pid: int, *, scope: Path = _PTRACE_SCOPE) -> None:
    """Lets the agent of this node, and what it starts, see this process's stack (py-spy)."""
    # Yama (ptrace_scope 1) lets only parents do so, and the agent is none below torchrun. Where it
    # is stricter, or absent, nothing is done.
    try:
        if scope.read_text(encoding="ascii").strip() != "1":
            return
    except (OSError, ValueError):
        return  # no Yama in this kernel
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)


class Commands:
    """The rank's end of the control socket: one thread, asleep in a read of it."""

    def __init__(
        self, run: RunPaths, handlers: Mapping[str, Handler], note: Callable[[dict[str, Any]], None]
    ) -> None:
        self.run = run
        self.handlers = dict(handlers)
        self._note = note
        self._hello: dict[str, Any] = {}
        self._ring: RingMemory | None = None
        self._line: Line | None = None
        self._closed = False

    def start(self, hello: Mapping[str, Any], *, ring: RingMemory | None = None) -> None:
        """Starts the thread."""
        self._hello = dict(hello)
        self._ring = ring
        start_deaf_thread(self._serve)

    def reply(self, request_id: str, content: Mapping[str, Any]) -> bool:
        """Sends a reply from any thread, without waiting; False if it could not be sent."""
        line = self._line
        if line is None:
            return False
        message = encode_message({"id": request_id, **content})
        try:
            if not line.is_ours():
                line = self._connect_again()
            line.send(message)
        except OSError:
            return False
        return True

    def forget(self) -> None:
        """In a forked child: the connection is the parent's, and stays open there."""
        self._closed = True
        line, self._line = self._line, None
        if line is not None:
            line.close()

    def _serve(self) -> None:
        try:
            line = self._connect()
            while line is not None and not self._closed:
                packet = (line if line.is_ours() else self._connect_again()).receive()
                if packet:
                    self._answer(packet)
                elif line is self._line:
                    return
                line = self._line
        except OSError as error:
            if not self._closed:
                self._note({"type": "control", "state": "lost", "reason": str(error)})

    def _connect(self) -> Line | None:
        reason = "no agent"
        for pause_s in RETRY_AFTER_S:
            time.sleep(pause_s)
            if self._closed:
                return None
            try:
                self._line = Line.open(self.run, self._hello, ring=self._ring)
            except OSError as error:
                reason = str(error)
            else:
                return self._line
        self._note({"type": "control", "state": "unreachable", "reason": reason})
        if self._ring is not None:
            self._ring.close()
            self._note({"type": "no_ring", "reason": f"no agent to give it to: {reason}"})
        return None

    def _connect_again(self) -> Line:
        """Another line, after the job has closed our end of the one before."""
        self._note({"type": "control", "state": "lost", "reason": "the job has closed our socket"})
        self._line = Line.open(self.run, self._hello)
        return self._line

    def _answer(self, packet: bytes) -> None:
        question = conform(read_object(packet), QUESTION)
        if question is None:
            return  # not from our agent
        request_id, kind, arguments = question["id"], question["kind"], question["arguments"]
        handler = self.handlers.get(kind)
        if handler is None:
            self.reply(request_id, {"state": "refused", "reason": f"no request {kind!r} here"})
            return
        try:
            content = handler(request_id, arguments)
        except Exception as error:
            content = {"state": "failed", "reason": f"{type(error).__name__}: {error}"}
        if content is not None:
            self.reply(request_id, content)


def handlers(
    flight_recorder: Callable[[], FlightRecorder | None], progress: Callable[[], Mapping[str, Any]]
) -> dict[str, Handler]:
    """The handlers that need nothing of the training thread, by kind of request."""

    def status(_: str, __: Mapping[str, Any]) -> Mapping[str, Any]:
        times = {"mono_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}
        return {"state": "done", **times, **progress()}

    def stacks(_: str, __: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"state": "done", "wall_ns": time.time_ns(), "threads": thread_stacks()}

    def collectives(_: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        recorder = flight_recorder()
        if recorder is None:
            return {"state": "refused", "reason": "the Flight Recorder is not read here"}
        recorder.beat()
        groups = {str(group): list(status) for group, status in recorder.status().items()}
        path = recorder.dump() if arguments.get("entries") else None
        return {"state": "done", "groups": groups, "path": path.name if path else None}

    return {"status": status, "stacks": stacks, "collectives": collectives}


def thread_stacks() -> list[dict[str, Any]]:
    """What every Python thread of this process is doing."""
    # One entry per thread, the main thread first: `name`, `main`, and `frames` from the outermost
    # to the innermost as [file, line, function]. A thread inside C shows the line that called it.
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    found = []
    for ident, stack in read_stacks(None, limit=MAX_DEPTH).items():
        if ident != own:
            name, frames = names.get(ident, "?"), [*map(list, frame_lines(stack))]
            found.append({"name": name, "main": ident == main, "frames": frames})
    found.sort(key=lambda thread: not thread["main"])
    return found[:MAX_THREADS]
