"""Relays requests from the run directory to the ranks of this node, their replies, and rings."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import time
from array import array
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haiprof.base.errors import RunFormatError
from haiprof.base.safe_files import remove_file
from haiprof.linux.procfs import process_state, read_start_ticks, still_runs
from haiprof.run_format.control import (
    HELLO,
    MEMBER,
    MESSAGE_LIMIT_BYTES,
    REMOTE_REPLY,
    REPLY,
    Request,
    conform,
    control_socket,
    encode_message,
    is_id,
    open_requests,
    parse_request,
    pending_requests,
    post_member,
    post_reply,
    read_object,
)
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import read_records
from haiprof.run_format.ring import NEVER, RING_BYTES, RING_CAPACITY, read_ring
from haiprof.run_format.schema import PHASES, TAG_BITS
from haiprof.run_format.writer import add_records, note_line

if TYPE_CHECKING:
    from haiprof.agent.reach import Controller, Uplink

_F_GET_SEALS = 1034  # of <linux/fcntl.h>; the module has it from Python 3.13 on
_SEAL_SHRINK, _SEAL_GROW = 0x0002, 0x0004
_ROOT = Path("/")


class _HeldRing(NamedTuple):
    """A ring that a rank has given us: we hold a descriptor."""

    number: int
    pid: int
    """0 for a process of another PID namespace: its end is seen by that of the job alone."""
    start_ticks: int | None
    """None where it had ended before we looked."""
    paths: RankPaths


def _is_ring(number: int) -> bool:
    """Whether it is sealed memory of a ring's size, whose owner we are: reading it cannot hang."""
    state = os.fstat(number)
    if not stat.S_ISREG(state.st_mode) or state.st_size != RING_BYTES:
        return False
    if state.st_uid != os.geteuid():
        return False
    try:
        seals = fcntl.fcntl(number, _F_GET_SEALS)
    except OSError:  # a file of a disk
        return False
    return seals & (_SEAL_SHRINK | _SEAL_GROW) == _SEAL_SHRINK | _SEAL_GROW


def _keep(held: _HeldRing) -> None:
    """Adds to the file what it lacks, and says how the recording ended, if not by itself."""
    try:
        ring = read_ring(os.pread(held.number, RING_BYTES, 0))
    finally:
        os.close(held.number)
    if ring is None or ring.ended:
        return
    kept, reason = 0, None
    try:
        path = held.paths.phases
        spans = ring.lacking(read_records(path, first=-RING_CAPACITY).data)
        lacking = len(spans)
        if spans:
            data = array("q", [word for span in spans for word in span]).tobytes()
            kept = add_records(path, PHASES, data) // PHASES.record_bytes
        if kept < lacking:
            reason = "no space left"
    except (OSError, RunFormatError) as error:
        lacking, reason = len(ring.lacking(b"")), str(error)
    last_ns = ring.records[-1][1] >> TAG_BITS if ring.records else None
    note_line(held.paths.events, {
        "type": "unclean_end", "time_ns": time.perf_counter_ns(), "last_span_ns": last_ns,
        "open_ns": ring.open_ns, "optimizer_steps": ring.step_count,
        "recording": ring.opens_ns < NEVER, "added_span_count": kept,
        "lost_span_count": lacking - kept + ring.overwritten, "reason": reason,
    })  # fmt: skip


TELL_S = 15.0
"""Interval at which an agent announces its ranks to the controller, which may have restarted."""
_STEPS_ID = "steps"
"""The id of the agent's own question for steps; ids of requests hold a time."""
_BACKLOG = 1024
_PACKETS_PER_TICK = 64
_ASKED_LIMIT = 1000
"""Requests whose replies are still accepted; older ones have timed out."""
_ELSEWHERE_LIMIT = 200_000
"""Maximum number of ranks of other nodes; each has a file per request."""
_FROM_BELOW_S = 0.25
"""Time per tick for replies of other nodes: the launcher has other work."""
_INT = struct.Struct("i")
_UCRED = struct.Struct("3i")


class LiveRank(NamedTuple):
    """A rank of this node that can be asked."""

    rank: int
    pid: int
    paths: RankPaths
    reported_steps: int | None = None
    """Its optimizer steps, as it last answered `ask_steps`; None before."""


@dataclass(slots=True)
class Peer:
    """A rank's connection."""

    connection: socket.socket
    pid: int
    """Its process id, from the kernel."""
    rank: int | None = None
    name: str = ""
    """`3`, `3.1` for its second attempt; empty until it has introduced itself."""
    reported_steps: int | None = None
    given: int = -1
    """A descriptor that came with its last message: its ring; -1 where none did."""


@dataclass
class Relay:
    """The agent's end of the control sockets; all work is done in the launcher's tick."""

    run: RunPaths
    host: str
    peers: list[Peer] = field(default_factory=list)
    controller: Controller | None = None
    """Sends requests to agents that do not share this run directory."""
    uplink: Uplink | None = None
    """Receives requests from the controller, where the run directory is not shared."""
    _rings: list[_HeldRing] = field(default_factory=list)
    _announced_s: float = 0.0
    _listener: socket.socket | None = None
    _requests: int = -1
    _seen: set[str] = field(default_factory=set)
    _asked: dict[str, Request] = field(default_factory=dict)
    _remote: set[str] = field(default_factory=set)
    _elsewhere: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Listens for the ranks of this node; requests from before its start are not for it."""
        self._requests = open_requests(self.run)
        pending_requests(self._requests, self._seen)
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
            self._close_requests()
            raise
        self._listener = listener

    def tick(self) -> None:
        """Accepts ranks, relays new requests, and stores replies."""
        self._accept()
        for peer in list(self.peers):
            self._read(peer)
        self._end_rings()
        for request in pending_requests(self._requests, self._seen):
            self._pass_on(request)
            if self.controller is not None:
                self.controller.broadcast(request.as_json())
        if self.uplink is not None:
            self._from_above(self.uplink)
        if self.controller is not None:
            self._from_below(self.controller)

    def _pass_on(self, request: Request) -> None:
        self._asked[request.id] = request
        if len(self._asked) > _ASKED_LIMIT:
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self._remote.discard(oldest)
        for peer in list(self.peers):  # one that is gone is dropped meanwhile
            self._ask(peer, request)

    def _from_above(self, uplink: Uplink) -> None:
        """Relays requests from the controller, and announces this node's ranks to it."""
        while uplink.requests:
            with contextlib.suppress(RunFormatError):  # not of ours
                request = parse_request(read_object(uplink.requests.popleft()), "controller")
                if request.id not in self._asked and request.expires_wall_ns > time.time_ns():
                    self._remote.add(request.id)
                    self._pass_on(request)
        if time.monotonic() - self._announced_s > TELL_S:
            self._announced_s = time.monotonic()
            for peer in self.peers:
                self._introduce(peer)

    def _introduce(self, peer: Peer) -> None:
        if self.uplink is not None and peer.name:
            member = {"name": peer.name, "rank": peer.rank, "host": self.host, "pid": peer.pid}
            self.uplink.send({"member": member})

    def _from_below(self, controller: Controller) -> None:
        """Stores messages of other nodes' agents; within a tick only for a limited time."""
        until_s = time.monotonic() + _FROM_BELOW_S
        while time.monotonic() < until_s:
            data = controller.take()
            if data is None:
                return
            with contextlib.suppress(OSError):  # full disk: the rank seems silent
                self._note_agent(read_object(data) or {})

    def _note_agent(self, message: dict[str, Any]) -> None:
        """Stores a member or a reply that conforms to the schema, and nothing else."""
        member = conform(message.get("member"), MEMBER)
        request_id, reply = message.get("id"), message.get("reply")
        if member is not None and self._has_room(member["name"]):
            post_member(self.run, member["name"], member)
        elif is_id(request_id) and request_id in self._asked and isinstance(reply, dict):
            signed = conform(reply, REMOTE_REPLY)
            if signed is not None and self._has_room(signed["name"]):
                post_reply(self.run, str(request_id), signed["name"], reply)

    def _has_room(self, name: str) -> bool:
        """Whether that rank of another node is known, or there is room for it."""
        if len(self._elsewhere) < _ELSEWHERE_LIMIT:
            self._elsewhere.add(name)
        return name in self._elsewhere

    def live_ranks(self) -> list[LiveRank]:
        """Each rank that is connected."""
        return [
            LiveRank(
                peer.rank,
                peer.pid,
                self.run.rank(peer.rank, int(peer.name.partition(".")[2] or 0)),
                peer.reported_steps,
            )
            for peer in self.peers
            if peer.rank is not None
        ]

    def ask_steps(self, pids: Collection[int]) -> None:
        """Asks some processes how many optimizer steps there were; `live_ranks` has the answers."""
        question = encode_message({"id": _STEPS_ID, "kind": "status", "arguments": {}})
        for peer in list(self.peers):
            if peer.pid in pids:
                self._send(peer, question)

    def stop(self) -> None:
        """Closes everything and takes the socket out of the run directory."""
        for line in (self.controller, self.uplink):
            if line is not None:
                line.stop()
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._accept()  # a job that ended soon after it connected has left its ring there
            for peer in list(self.peers):
                self._read(peer)  # messages before the end of the connection
        listener, self._listener = self._listener, None
        self._end_rings(job_is_over=True)
        for peer in self.peers:
            peer.connection.close()
        self.peers.clear()
        listener.close()
        self._close_requests()
        with contextlib.suppress(OSError):
            folder, path = control_socket(self.run, self.host)
            try:
                remove_file(Path(path), below=Path(path).parent)
            finally:
                os.close(folder)

    def _end_rings(self, *, job_is_over: bool = False) -> None:
        """Adds what the files of processes that have ended lack; at the end lets go of the rest."""
        for held in list(self._rings):
            is_over = not still_runs(_ROOT, held.pid, held.start_ticks) if held.pid else job_is_over
            if is_over or job_is_over:
                self._rings.remove(held)
            if is_over:
                _keep(held)
            elif job_is_over:
                os.close(held.number)

    def _close_requests(self) -> None:
        number, self._requests = self._requests, -1
        if number >= 0:
            os.close(number)

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
        if request.kind == "stacks":  # a stopped process cannot answer
            self._keep(peer, request.id, {"state": "asked", "process": process_state(peer.pid)})
        if not self._send(peer, encode_message(request.as_json())):
            self._keep(peer, request.id, {"state": "refused", "reason": "its requests pile up"})

    def _send(self, peer: Peer, packet: bytes) -> bool:
        """Sends without waiting; False where the rank has not read the last packets yet."""
        try:
            peer.connection.send(packet)
        except BlockingIOError:
            return False
        except OSError:
            self._drop(peer)
        return True

    def _read(self, peer: Peer) -> None:
        for _ in range(_PACKETS_PER_TICK):
            try:
                packet, peer.given = _receive(peer.connection)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                self._take(peer, read_object(packet) or {})
            if peer.given >= 0:
                os.close(peer.given)
                peer.given = -1
            if not packet:
                self._drop(peer)
                return

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        hello, request_id = conform(message.get("hello"), HELLO), message.get("id")
        if hello is not None and not peer.name:
            rank, attempt = hello["rank"], hello["attempt"]
            peer.rank = rank
            peer.name = f"{rank}.{attempt}" if attempt else str(rank)
            if peer.given >= 0 and _is_ring(peer.given):
                ticks = read_start_ticks(_ROOT, peer.pid) if peer.pid else None
                paths = self.run.rank(rank, attempt)
                self._rings.append(_HeldRing(peer.given, peer.pid, ticks, paths))
                peer.given = -1
            # Drops an older connection of the same process, whose descriptor the job has closed.
            for other in list(self.peers):
                if other is not peer and (other.name, other.pid) == (peer.name, peer.pid):
                    self._drop(other)
            self._introduce(peer)
        elif request_id == _STEPS_ID:
            steps = message.get("step")
            peer.reported_steps = steps if type(steps) is int else None
        elif is_id(request_id) and request_id in self._asked and peer.name:
            content = {name: value for name, value in message.items() if name != "id"}
            if conform(content, REPLY) is not None:
                self._keep(peer, str(request_id), content)

    def _keep(self, peer: Peer, request_id: str, content: dict[str, Any]) -> None:
        said = {"rank": peer.rank, "host": self.host, "pid": peer.pid, **content}
        if request_id in self._remote and self.uplink is not None:
            above = {**said, "name": peer.name, "run": str(self.run.root)}
            self.uplink.send({"id": request_id, "reply": above})
            return
        with contextlib.suppress(OSError):  # full disk: the rank seems silent
            post_reply(self.run, request_id, peer.name, said)

    def _drop(self, peer: Peer) -> None:
        peer.connection.close()
        self.peers = [other for other in self.peers if other is not peer]


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """One message, and the descriptor that came with it, or -1.

    The kernel closes what there is no room for. Python's `recv_fds` passes no flags on (3.11).
    """
    packet, extras, _, _ = connection.recvmsg(
        MESSAGE_LIMIT_BYTES, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC
    )
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    numbers = [_INT.unpack(data)[0] for *kind, data in extras if tuple(kind) == rights]
    return packet, numbers[0] if numbers else -1
