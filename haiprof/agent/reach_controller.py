"""The controller: accepts the agents of other nodes, sends requests, collects replies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.agent.reach_uplink import (
    AGENT,
    CONTROLLER,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Budget,
    Handshake,
    Line,
    LoopThread,
    Uplink,
    make_token,
    new_nonce,
    parse_address,
    read_message,
    read_token,
)

MESSAGES_PER_S = 500
"""An agent sends no more than this: a node answers once per rank."""
HELLO_S = 5.0
"""Time for a peer to prove that it holds the token."""
GRACE_S = 1.0
"""Minimum time before a stranger is disconnected for lack of room: many agents may come at once."""
MAX_AGENTS = 20_000
MAX_STRANGERS = 512
MAX_STRANGERS_PER_ADDRESS = 128
CONNECTIONS_PER_S = 500
"""Accepted per second; more wait in the kernel's queue, so that a flood takes no core, and an agent
at the address of a flood still has a quarter of a second for its proof."""
KEPT_BYTES = 1 << 26
"""Bytes of replies that the launcher has not taken; beyond, agents are not read."""
BACKLOG = 4096
_OWN_DESCRIPTORS = 256
_REST_S = 0.05
_REPLY_OVERHEAD_BYTES = 64


async def prove(
    reader: asyncio.StreamReader, write: Callable[[bytes], None], key: bytes
) -> Handshake:
    """Proves this end to a peer, and has the peer prove that it is an agent with the token.

    What is read before that has a fixed length, so no stranger can fill the memory.
    """
    if await reader.readexactly(len(MAGIC)) != MAGIC:
        raise ValueError("not an agent of this version")
    nonce = await reader.readexactly(NONCE_BYTES)
    handshake = Handshake(key=key, agent_nonce=nonce, controller_nonce=new_nonce())
    write(handshake.controller_nonce + handshake.proof(CONTROLLER))
    if not handshake.is_proof(AGENT, await reader.readexactly(PROOF_BYTES)):
        raise ValueError("the tokens differ")
    return handshake


@dataclass(frozen=True, slots=True)
class _Stranger:
    """A peer that has not proven itself yet."""

    address: str
    since_s: float


class Controller(LoopThread):
    """A TCP star in a thread of its own; the launcher's tick sends and receives without waiting.

    Unauthenticated connections are few, short, and read a fixed length. Where there are too many,
    the oldest one of the busiest address is closed: an agent proves itself within a round trip.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        super().__init__("haiprof-controller")
        self.address: tuple[str, int] = (host, port)
        self._key = key
        self._strangers: dict[asyncio.Task[None], _Stranger] = {}  # the oldest one first
        self._agents: dict[asyncio.Task[None], Line] = {}
        self._budget = Budget(CONNECTIONS_PER_S)
        self._replies: deque[bytes] = deque()
        # Each is changed by one thread: what came in by the loop's, what was taken by the other.
        self._received_bytes = 0
        self._taken_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def start(self) -> None:
        """Listens."""
        host, port = self.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError:
            self._loop.close()
            raise
        listener.setblocking(False)
        self.address = listener.getsockname()[:2]
        self.begin(self._accept(listener))

    @property
    def agent_count(self) -> int:
        """Agents that are connected."""
        return len(self._agents)

    @property
    def queued_bytes(self) -> int:
        """Size of the replies that wait to be taken."""
        return self._received_bytes - self._taken_bytes

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Sends a message to every agent; from any thread, without waiting."""
        data = json.dumps(message).encode()

        def send() -> None:
            for line in list(self._agents.values()):
                line.send(data)

        self.call(send)

    def take(self) -> bytes | None:
        """Takes the oldest message of an agent; None if there is none."""
        data = self._replies.popleft() if self._replies else None
        if data is not None:
            self._taken_bytes += len(data) + _REPLY_OVERHEAD_BYTES
        if not self._has_room.is_set() and self.queued_bytes <= KEPT_BYTES // 2:
            self.call(self._has_room.set)
        return data

    def _end(self, task: asyncio.Task[None]) -> None:
        """Closes a connection at once, discarding unsent data."""
        self._strangers.pop(task, None)
        self._agents.pop(task, None)
        task.cancel()

    # -- who comes in --------------------------------------------------------------------------

    async def _accept(self, listener: socket.socket) -> None:
        """Accepts connections until it is cancelled, and then closes all of them."""
        try:
            while True:
                while self._is_crowded() or not self._budget.spend(self._loop.time()):
                    await asyncio.sleep(_REST_S)
                try:
                    accepted, where = await self._loop.sock_accept(listener)
                except OSError:  # it has gone meanwhile, or no descriptor or no memory is left
                    await asyncio.sleep(_REST_S)
                else:
                    self._let_in(accepted, str(where[0]))
                    await asyncio.sleep(0)  # those who are in have their turn
        finally:
            listener.close()
            tasks = [*self._strangers, *self._agents]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_crowded(self) -> bool:
        """Whether all places are taken by strangers that have only just connected."""
        if not self._strangers or len(self._strangers) < self._stranger_limit():
            return False
        oldest = next(iter(self._strangers.values()))
        return self._loop.time() - oldest.since_s < GRACE_S

    def _stranger_limit(self) -> int:
        """Maximum number of strangers; 0 where agents have all connections.

        Some descriptors are left for the launcher's own work.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(MAX_AGENTS, max(soft - _OWN_DESCRIPTORS, soft // 2))
        return min(MAX_STRANGERS, max(most - len(self._agents), 0))

    def _let_in(self, accepted: socket.socket, address: str) -> None:
        if not self._stranger_limit():
            accepted.close()
            return
        self._make_room(address)
        accepted.setblocking(False)
        task = self._loop.create_task(self._talk(accepted))
        self._strangers[task] = _Stranger(address, self._loop.time())
        task.add_done_callback(self._end)
        task.add_done_callback(lambda _: accepted.close())  # it may end before it begins

    def _make_room(self, address: str) -> None:
        """Closes connections of strangers until there is room for one more from the address."""
        count = Counter(stranger.address for stranger in self._strangers.values())
        if count[address] < MAX_STRANGERS_PER_ADDRESS:
            if len(self._strangers) < self._stranger_limit():
                return
            address = count.most_common(1)[0][0]
        self._end(next(t for t, each in self._strangers.items() if each.address == address))

    async def _talk(self, accepted: socket.socket) -> None:
        """A connection until it breaks, or the peer sends what it may not."""
        task = asyncio.current_task()
        assert task is not None, "every connection has a task of its own"
        with contextlib.suppress(OSError, EOFError, ValueError):
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            reader, writer = await asyncio.open_connection(sock=accepted)
            try:
                deadline = self._loop.call_later(HELLO_S, task.cancel)
                handshake = await prove(reader, writer.write, self._key)
                deadline.cancel()
                self._strangers.pop(task, None)
                self._agents[task] = Line(writer, handshake.signer(CONTROLLER))
                incoming, budget = handshake.signer(AGENT), Budget(MESSAGES_PER_S)
                while True:
                    data = await read_message(reader, incoming)
                    if not budget.spend(self._loop.time()):
                        return
                    self._keep(data)
                    # What is not read stays in the kernel's buffers, and so with the agent.
                    await self._has_room.wait()
            finally:
                writer.transport.abort()

    def _keep(self, data: bytes) -> None:
        self._received_bytes += len(data) + _REPLY_OVERHEAD_BYTES
        self._replies.append(data)
        if self.queued_bytes > KEPT_BYTES:
            self._has_room.clear()


_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def join(address: str, token_file: Path) -> Controller | Uplink:
    """Listens at the address, or connects to the launcher that does.

    The command line is the same on every node: the one with that address listens.
    """
    where = parse_address(address)
    if _is_ours(*where):
        controller = Controller(*where, make_token(token_file))
        controller.start()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = min(hard, MAX_AGENTS + MAX_STRANGERS + _OWN_DESCRIPTORS)
        if soft < wanted:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return controller
    uplink = Uplink(where, read_token(token_file))
    uplink.start()
    return uplink


def _is_ours(host: str, port: int) -> bool:
    """Whether this launcher can listen there: another node's address, or one in use, it cannot."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in _NOT_OURS:
                return False
            raise
    return True
