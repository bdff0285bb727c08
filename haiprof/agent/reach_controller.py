"""The controller: accepts the agents of other nodes, sends requests, collects replies."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from haiprof.agent.reach_uplink import (
    AGENT,
    CONTROLLER,
    FRAME_LIMIT_BYTES,
    HELLO_BYTES,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    SIGNATURE_BYTES,
    Budget,
    Handshake,
    Signer,
    Uplink,
    make_token,
    new_nonce,
    parse_address,
    read_token,
    seal,
)

MESSAGES_PER_S = 500
"""An agent sends no more than this: a node answers once per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """Callbacks of a connection."""

    proven: Callable[[Connection], None]
    """It has proved to hold the token."""
    received: Callable[[Connection, bytes], None]
    """It has received a message of an agent."""
    lost: Callable[[Connection], None]
    """It has ended; called once."""


class Connection(asyncio.Protocol):
    """What is read before the proof has a fixed length, so no stranger can fill the memory."""

    def __init__(self, address: str, key: bytes, events: Events) -> None:
        self.address = address
        self._key = key
        self._events = events
        self._transport: asyncio.Transport | None = None
        self._gone = False
        self._buffer = bytearray()
        self._handshake: Handshake | None = None
        self._incoming: Signer | None = None
        self._outgoing: Signer | None = None
        self._budget = Budget(MESSAGES_PER_S)

    # -- asyncio's side ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio once it is open."""
        self._transport = cast(asyncio.Transport, transport)
        if self._gone:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Takes complete messages; a peer that sends anything else is disconnected."""
        if self._gone:
            return
        self._buffer += data
        try:
            while not self._gone and self._take():
                pass
        except ValueError:
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio when it is closed."""
        self.abort()

    # -- the controller's side -----------------------------------------------------------------

    def send(self, data: bytes) -> None:
        """Sends a message without waiting; an agent that has stopped reading is disconnected."""
        if self._transport is None or self._outgoing is None:
            return
        if self._transport.get_write_buffer_size() > FRAME_LIMIT_BYTES:
            self.abort()
        else:
            self._transport.write(seal(data, self._outgoing))

    def pause(self) -> None:
        """Stops reading: what is sent stays in the kernel's buffers, and so with the agent."""
        if self._transport is not None and not self._gone:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads on."""
        if self._transport is not None and not self._gone:
            self._transport.resume_reading()

    def abort(self) -> None:
        """Closes it at once, discarding unsent data."""
        if not self._gone:
            self._gone = True
            self._buffer.clear()
            self._events.lost(self)
        if self._transport is not None:
            self._transport.abort()

    # -- what comes in -------------------------------------------------------------------------

    def _take(self) -> bool:
        """Takes one piece of the buffer; False if it is not whole yet."""
        if self._incoming is not None:
            return self._take_message(self._incoming)
        if self._handshake is not None:
            return self._take_proof(self._handshake)
        return self._take_hello()

    def _take_hello(self) -> bool:
        hello = bytes(self._buffer)
        # An agent sends nothing more before it has the answer, so anything more is refused.
        if len(hello) > HELLO_BYTES or hello[: len(MAGIC)] != MAGIC[: len(hello)]:
            raise ValueError("not an agent of this version")
        if len(hello) < HELLO_BYTES:
            return False
        self._buffer.clear()
        handshake = Handshake(
            key=self._key, agent_nonce=hello[-NONCE_BYTES:], controller_nonce=new_nonce()
        )
        self._handshake = handshake
        if self._transport is not None:
            self._transport.write(handshake.controller_nonce + handshake.proof(CONTROLLER))
        return False

    def _take_proof(self, handshake: Handshake) -> bool:
        if len(self._buffer) < PROOF_BYTES:
            return False
        if not handshake.is_proof(AGENT, bytes(self._buffer[:PROOF_BYTES])):
            raise ValueError("the tokens differ")
        del self._buffer[:PROOF_BYTES]
        self._incoming, self._outgoing = handshake.signer(AGENT), handshake.signer(CONTROLLER)
        self._events.proven(self)
        return True

    def _take_message(self, incoming: Signer) -> bool:
        if len(self._buffer) < LENGTH.size:
            return False
        (length,) = LENGTH.unpack_from(self._buffer)
        if length > FRAME_LIMIT_BYTES:
            raise ValueError("a message that is too long")
        end = LENGTH.size + length
        if len(self._buffer) < end + SIGNATURE_BYTES:
            return False
        framed = bytes(self._buffer[:end])
        if not incoming.is_next(framed, bytes(self._buffer[end : end + SIGNATURE_BYTES])):
            raise ValueError("a message that was changed on its way, or is not the next one")
        if not self._budget.spend(asyncio.get_running_loop().time()):
            raise ValueError("too many messages")
        del self._buffer[: end + SIGNATURE_BYTES]
        self._events.received(self, framed[LENGTH.size :])
        return True


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
_ACCEPTED_AT_ONCE = 32
_REST_S = 0.05
_STOP_S = 10.0
_REPLY_OVERHEAD_BYTES = 64


class Controller:
    """A TCP star in a thread of its own; the launcher's tick sends and receives without waiting.

    Unauthenticated connections are few, short, and read a fixed length. Where there are too many,
    the oldest one of the busiest address is closed: an agent proves itself within a round trip.
    """

    def __init__(self, host: str, port: int, key: bytes) -> None:
        self.address: tuple[str, int] = (host, port)
        self._key = key
        self._listener: socket.socket | None = None
        self._events = Events(proven=self._admit, received=self._keep, lost=self._drop)
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}  # the oldest one first
        self._agents: set[Connection] = set()
        self._paused: list[Connection] = []
        self._adopting: set[asyncio.Task[None]] = set()
        self._budget = Budget(CONNECTIONS_PER_S)
        self._replies: deque[bytes] = deque()
        # Each is changed by one thread: what came in by the loop's, what was taken by the other.
        self._received_bytes = 0
        self._taken_bytes = 0
        self._loop = asyncio.new_event_loop()
        # asyncio's own handler would print tracebacks to the job's stderr.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._thread = threading.Thread(target=self._run, name="haiprof-controller", daemon=True)

    def start(self) -> None:
        """Listens."""
        host, port = self.address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError:
            self._loop.close()
            raise
        self._listener.setblocking(False)
        self.address = self._listener.getsockname()[:2]
        self._loop.call_soon(self._listen)
        self._thread.start()

    def stop(self) -> None:
        """Closes all connections."""
        self._call(self._close)
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

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
        self._call(lambda: self._send(data))

    def take(self) -> bytes | None:
        """Takes the oldest message of an agent; None if there is none."""
        data = self._replies.popleft() if self._replies else None
        if data is not None:
            self._taken_bytes += len(data) + _REPLY_OVERHEAD_BYTES
        if self._paused and self.queued_bytes <= KEPT_BYTES // 2:
            self._call(self._resume)
        return data

    def _call(self, action: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._settle())
        finally:
            self._loop.close()

    async def _settle(self) -> None:
        """Waits for connections that are still being accepted."""
        await asyncio.gather(*self._adopting, return_exceptions=True)

    def _close(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in [*self._strangers, *self._agents]:
            connection.abort()
        self._loop.call_soon(self._loop.stop)  # after the transports have closed

    def _send(self, data: bytes) -> None:
        for connection in list(self._agents):
            connection.send(data)

    # -- who comes in --------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _rest(self, listener: socket.socket) -> None:
        """Pauses accepting: new connections wait in the kernel's queue."""
        self._loop.remove_reader(listener)
        self._loop.call_later(_REST_S, self._listen)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._is_crowded() or not self._budget.spend(self._loop.time()):
                self._rest(listener)
                return
            try:
                accepted, where = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor or no memory left
                self._rest(listener)
                return
            self._let_in(accepted, str(where[0]))

    def _is_crowded(self) -> bool:
        """Whether all places are taken by strangers that have only just connected."""
        if not self._strangers or len(self._strangers) < self._stranger_limit():
            return False
        oldest_s = next(iter(self._strangers.values())).when() - HELLO_S
        return self._loop.time() - oldest_s < GRACE_S

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
        connection = Connection(address, self._key, self._events)
        self._strangers[connection] = self._loop.call_later(HELLO_S, connection.abort)
        task = self._loop.create_task(self._adopt(accepted, connection))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    def _make_room(self, address: str) -> None:
        """Closes connections of strangers until there is room for one more from the address."""
        count = Counter(stranger.address for stranger in self._strangers)
        if count[address] < MAX_STRANGERS_PER_ADDRESS:
            if len(self._strangers) < self._stranger_limit():
                return
            address = count.most_common(1)[0][0]
        next(each for each in self._strangers if each.address == address).abort()

    async def _adopt(self, accepted: socket.socket, connection: Connection) -> None:
        try:
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            await self._loop.connect_accepted_socket(lambda: connection, accepted)
        except OSError:  # it has gone meanwhile
            accepted.close()
            connection.abort()

    def _admit(self, connection: Connection) -> None:
        self._strangers.pop(connection).cancel()
        self._agents.add(connection)

    def _keep(self, connection: Connection, data: bytes) -> None:
        self._received_bytes += len(data) + _REPLY_OVERHEAD_BYTES
        self._replies.append(data)
        if self.queued_bytes > KEPT_BYTES:
            connection.pause()
            self._paused.append(connection)

    def _resume(self) -> None:
        paused, self._paused = self._paused, []
        for connection in paused:
            connection.resume()

    def _drop(self, connection: Connection) -> None:
        self._agents.discard(connection)
        deadline = self._strangers.pop(connection, None)
        if deadline is not None:
            deadline.cancel()


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
