"""Hands requests from the run directory to the ranks of this node, and their replies back."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from haiprof.errors import RunFormatError
from haiprof.rundir.control import (
    MESSAGE_LIMIT_BYTES,
    Request,
    control_socket,
    decode_message,
    encode_message,
    make_private,
    parse_request,
    pending_requests,
    post_member,
    post_reply,
)
from haiprof.rundir.layout import RankPaths, RunPaths
from haiprof.samplers.procfs import process_state

if TYPE_CHECKING:
    from haiprof.launch.reach.controller import Controller
    from haiprof.launch.reach.uplink import Uplink

TELL_S = 15.0
"""So often an agent tells a controller, which may have been away, which ranks it has."""
_STEPS_ID = "steps"
"""Of the agent's own question for how far a rank is; ids of requests hold a time."""
_BACKLOG = 1024
_NAME = re.compile(r"\d{1,7}(\.\d{1,4})?\Z", re.ASCII)
_PACKETS_PER_TICK = 64
_UCRED = struct.Struct("3i")


class LiveRank(NamedTuple):
    """A rank of this node that can be asked."""

    rank: int
    pid: int
    paths: RankPaths
    told_steps: int | None = None
    """Its optimizer steps, as it last answered `ask_steps`; null before."""


@dataclass(slots=True)
class Peer:
    """A rank's connection."""

    connection: socket.socket
    pid: int
    """As the kernel knows it."""
    rank: int | None = None
    name: str = ""
    """`3`, `3.1` for its second attempt; empty until it has said who it is."""
    told_steps: int | None = None


@dataclass
class Relay:
    """The agent's end of the control sockets; all of it happens in the launcher's tick.

    Args:
        run: The run directory.
        host: This node.
    """

    run: RunPaths
    host: str
    peers: list[Peer] = field(default_factory=list)
    controller: Controller | None = None
    """Hands requests to agents that do not share this run directory."""
    uplink: Uplink | None = None
    """Brings requests from the controller, where the run directory is not shared."""
    _told_s: float = 0.0
    _listener: socket.socket | None = None
    _seen: set[str] = field(default_factory=set)
    _asked: dict[str, Request] = field(default_factory=dict)
    _remote: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Listens for the ranks of this node; requests from before its start are not for it.

        Raises:
            OSError: The file system takes no sockets, or another agent listens here.
        """
        make_private(self.run.control, self.run.control_requests, self.run.control_replies)
        pending_requests(self.run, self._seen)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            folder, path = control_socket(self.run, self.host)
            try:
                listener.bind(path)
            finally:
                os.close(folder)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        self._listener = listener

    def tick(self) -> None:
        """Lets ranks in, passes new requests on, and writes down what was answered."""
        self._accept()
        for peer in list(self.peers):
            self._read(peer)
        for request in pending_requests(self.run, self._seen):
            self._pass_on(request)
            if self.controller is not None:
                self.controller.broadcast(request.as_json())
        if self.uplink is not None:
            self._from_above(self.uplink)
        if self.controller is not None:
            self._from_below(self.controller)

    def _pass_on(self, request: Request) -> None:
        self._asked[request.id] = request
        for peer in list(self.peers):  # one that is gone is dropped meanwhile
            self._ask(peer, request)

    def _from_above(self, uplink: Uplink) -> None:
        """Requests from the controller; and who is here, for it to know whom to wait for."""
        while uplink.requests:
            with contextlib.suppress(RunFormatError):  # not of ours
                request = parse_request(uplink.requests.popleft(), "controller")
                if request.id not in self._asked and request.expires_wall_ns > time.time_ns():
                    self._remote.add(request.id)
                    self._pass_on(request)
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            for peer in self.peers:
                self._introduce(peer)

    def _introduce(self, peer: Peer) -> None:
        if self.uplink is not None and peer.name:
            member = {"name": peer.name, "rank": peer.rank, "host": self.host, "pid": peer.pid}
            self.uplink.send({"member": member})

    def _from_below(self, controller: Controller) -> None:
        """What agents of other nodes sent."""
        for _ in range(len(controller.replies)):
            message = controller.replies.popleft()
            member, reply = message.get("member"), message.get("reply")
            said = member if isinstance(member, dict) else reply
            name = said.get("name") if isinstance(said, dict) else None
            if not isinstance(said, dict) or not isinstance(name, str) or not _NAME.match(name):
                continue
            with contextlib.suppress(OSError):  # full disk: whoever asked sees a silent rank
                if isinstance(member, dict):
                    post_member(self.run, name, member)
                elif message.get("id") in self._asked:
                    post_reply(self.run, str(message["id"]), name, said)

    def live_ranks(self) -> list[LiveRank]:
        """Each rank that is connected."""
        return [
            LiveRank(
                peer.rank,
                peer.pid,
                self.run.rank(peer.rank, int(peer.name.partition(".")[2] or 0)),
                peer.told_steps,
            )
            for peer in self.peers
            if peer.rank is not None
        ]

    def ask_steps(self, pids: Collection[int]) -> None:
        """Asks some processes how many optimizer steps there were; `live_ranks` has the answers."""
        question = encode_message({"id": _STEPS_ID, "kind": "status", "arguments": {}})
        for peer in list(self.peers):
            if peer.pid in pids:
                try:
                    peer.connection.send(question)
                except BlockingIOError:
                    continue  # it has not even taken the last one
                except OSError:
                    self._drop(peer)

    def stop(self) -> None:
        """Closes everything and takes the socket out of the run directory."""
        for line in (self.controller, self.uplink):
            if line is not None:
                line.stop()
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            for peer in list(self.peers):
                self._read(peer)  # what came with the last breath
        for peer in self.peers:
            peer.connection.close()
        self.peers.clear()
        listener.close()
        with contextlib.suppress(OSError):
            folder, path = control_socket(self.run, self.host)
            try:
                os.unlink(path)
            finally:
                os.close(folder)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            pid, uid, _ = _UCRED.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if uid != os.getuid():
                connection.close()
                continue
            connection.setblocking(False)
            self.peers.append(Peer(connection, pid))

    def _ask(self, peer: Peer, request: Request) -> None:
        if not peer.name or (request.ranks is not None and peer.rank not in request.ranks):
            return
        if request.kind == "stacks":  # one that is stopped cannot say so itself
            self._keep(peer, request.id, {"state": "asked", "process": process_state(peer.pid)})
        try:
            peer.connection.send(encode_message(request.as_json()))
        except BlockingIOError:
            self._keep(peer, request.id, {"state": "refused", "reason": "its requests pile up"})
        except OSError:
            self._drop(peer)

    def _read(self, peer: Peer) -> None:
        for _ in range(_PACKETS_PER_TICK):
            try:
                packet = peer.connection.recv(MESSAGE_LIMIT_BYTES)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._drop(peer)
                return
            self._take(peer, decode_message(packet) or {})

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        hello, request_id = message.get("hello"), message.get("id")
        if isinstance(hello, dict) and not peer.name:
            rank, attempt = hello.get("rank"), hello.get("attempt")
            if type(rank) is int and type(attempt) is int:
                peer.rank = rank
                peer.name = f"{rank}.{attempt}" if attempt else str(rank)
                self._introduce(peer)
            return
        if request_id == _STEPS_ID:
            steps = message.get("step")
            peer.told_steps = steps if type(steps) is int else None
        elif isinstance(request_id, str) and request_id in self._asked and peer.name:
            self._keep(peer, request_id, {k: v for k, v in message.items() if k != "id"})

    def _keep(self, peer: Peer, request_id: str, content: dict[str, Any]) -> None:
        said = {"rank": peer.rank, "host": self.host, "pid": peer.pid, **content}
        if request_id in self._remote and self.uplink is not None:
            above = {**said, "name": peer.name, "run": str(self.run.root)}
            self.uplink.send({"id": request_id, "reply": above})
            return
        with contextlib.suppress(OSError):  # full disk: whoever asked sees a silent rank
            post_reply(self.run, request_id, peer.name, said)

    def _drop(self, peer: Peer) -> None:
        peer.connection.close()
        self.peers.remove(peer)
