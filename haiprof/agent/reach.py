"""Requests without a shared file system: proof of the token, an agent's end, the controller's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import json
import os
import re
import resource
import secrets
import socket
import stat
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.base.safe_files import create_file
from haiprof.run_format.control import MESSAGE_LIMIT_BYTES

MAGIC = b"haiprof-reach-1\n"  # names this protocol; another version would have another one
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
AGENT, CONTROLLER = b"agent", b"controller"
_NUMBER = struct.Struct("!Q")


class Signer:
    """Signs the messages of one direction of one connection, or checks them, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sign(self, data: bytes) -> bytes:
        """The signature of the next message."""
        self._count += 1
        return hmac.digest(self._key, _NUMBER.pack(self._count) + data, "sha256")

    def is_next(self, data: bytes, signature: bytes) -> bool:
        """Whether it is the next message of the holder of the key."""
        return hmac.compare_digest(self.sign(data), signature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Handshake:
    """The shared state of a connection once the nonces are exchanged."""

    key: bytes  # of the token
    agent_nonce: bytes
    controller_nonce: bytes

    def proof(self, role: bytes) -> bytes:
        """The proof that the end in that role holds the token."""
        return self._digest(role + b" proof ")

    def is_proof(self, role: bytes, shown: bytes) -> bool:
        """Checks the proof of a role in constant time."""
        return hmac.compare_digest(self.proof(role), shown)

    def signer(self, role: bytes) -> Signer:
        """The signer for everything that the end in that role sends afterwards."""
        return Signer(self._digest(role + b" messages "))

    def _digest(self, label: bytes) -> bytes:
        nonces = self.agent_nonce + self.controller_nonce
        return hmac.digest(self.key, MAGIC + label + nonces, "sha256")


LENGTH = struct.Struct("!I")
SIGNATURE_BYTES = 32
_STOP_S = 10.0
FRAME_LIMIT_BYTES = 2 * MESSAGE_LIMIT_BYTES  # a rank's reply and its sender; no longer one is read


class Budget:
    """A token bucket: so many per second, and as many at once after a quiet second."""

    def __init__(self, per_s: int) -> None:
        self._per_s = per_s
        self._left = float(per_s)
        self._since_s: float | None = None

    def spend(self, now_s: float) -> bool:
        """Takes one, at a time of a monotonic clock; False where there are none left."""
        since_s = now_s if self._since_s is None else self._since_s
        self._since_s = now_s
        self._left = min(self._per_s, self._left + (now_s - since_s) * self._per_s)
        if self._left < 1:
            return False
        self._left -= 1
        return True


def seal(data: bytes, signer: Signer) -> bytes:
    """A message as it is sent: its length, itself, and the signature of both."""
    framed = LENGTH.pack(len(data)) + data
    return framed + signer.sign(framed)


async def read_message(reader: asyncio.StreamReader, incoming: Signer) -> bytes:
    """The next message of the other end."""
    head = await reader.readexactly(LENGTH.size)
    (length,) = LENGTH.unpack(head)
    if length > FRAME_LIMIT_BYTES:
        raise ValueError("a message that is too long")
    data = await reader.readexactly(length)
    if not incoming.is_next(head + data, await reader.readexactly(SIGNATURE_BYTES)):
        raise ValueError("a message that was changed on its way, or is not the next one")
    return data


@dataclass(frozen=True, slots=True)
class Line:
    """What is sent on an authenticated connection."""

    writer: asyncio.StreamWriter
    outgoing: Signer

    def send(self, data: bytes) -> None:
        """Sends a message without waiting; an end that has stopped reading is disconnected."""
        if self.writer.transport.get_write_buffer_size() > FRAME_LIMIT_BYTES:
            self.writer.transport.abort()
        else:
            self.writer.write(seal(data, self.outgoing))


class LoopThread:
    """A coroutine in a thread of its own, which the launcher's tick never waits for."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        # asyncio's own handler would print tracebacks to the job's stderr.
        self._loop.set_exception_handler(lambda _loop, _context: None)
        self._work: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def stop(self) -> None:
        """Closes all connections."""
        if self._work is not None:
            self.call(self._work.cancel)
            self._thread.join(_STOP_S)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts the thread."""
        self._work = self._loop.create_task(work)
        self._thread.start()

    def call(self, action: Callable[[], object]) -> None:
        """Has the thread do something; from any other, without waiting."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(action)

    def _run(self) -> None:
        assert self._work is not None, "begin() comes first"
        asyncio.set_event_loop(self._loop)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._work)
        finally:
            self._loop.close()


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[V6]:PORT`, or `PORT` on the loopback interface; else ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdigit() or not 0 < int(port) < 65_536 or any(c.isspace() for c in host):
        raise ValueError("expected HOST:PORT")
    return host, int(port)


KEY_BYTES = 32
PREFIX = "haiprof-reach-1:"
_TOKEN = re.compile(rf"{PREFIX}([0-9a-f]{{{2 * KEY_BYTES}}})\s*\Z", re.ASCII)
_LIMIT_BYTES = 256
# Not blocking: a pipe in the file's place must not block the launcher.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_token(path: Path) -> bytes:
    """The key in a token file; the file is written where there is none."""
    try:
        descriptor = create_file(path, below=path.parent, mode=0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the token: {error.strerror}") from None
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{PREFIX}{key.hex()}\n")
    return key


def read_token(path: Path) -> bytes:
    """The key in a token file of this user's (or root's) that nobody else may read or write."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{path}: cannot read the token: {reason}") from None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode):
            raise UsageError(f"{path}: cannot read the token: not a regular file")
        if state.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"{path}: this token belongs to another user (uid {state.st_uid})",
                hint="name a file of your own: --reach-token FILE",
            )
        if state.st_mode & 0o077:
            raise UsageError(
                f"{path}: others may read or write this token", hint=f"chmod 600 {path}"
            )
        text = os.read(descriptor, _LIMIT_BYTES + 1).decode("ascii", "replace")
    finally:
        os.close(descriptor)
    token = _TOKEN.match(text)
    if token is None or len(text) > _LIMIT_BYTES:
        raise UsageError(
            f"{path}: holds no token of haiprof's ({PREFIX} and {2 * KEY_BYTES} hex digits)",
            hint="remove it or name another file: the node that listens writes a new one",
        )
    return bytes.fromhex(token[1])


FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
CONNECT_S = 5.0
PROOF_S = 20.0  # a controller may take some seconds when thousands of agents connect at once
REQUESTS_PER_S = 50  # a controller sends no more requests per second than this: people make them
KEPT_REQUESTS = 200


class NotProvenError(OSError):
    """The peer at the controller's address does not hold the token."""


class Uplink(LoopThread):
    """Connects, and reconnects when the controller comes back."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        super().__init__("haiprof-uplink")
        self.requests: deque[bytes] = deque(maxlen=KEPT_REQUESTS)
        """Requests of the controller that were not taken yet, oldest first."""
        self.error: str | None = "not connected yet"  # why there is no connection, if there is none
        self._address, self._key = address, key
        self._line: Line | None = None

    def start(self) -> None:
        """Starts the thread."""
        self.begin(self._connect())

    def send(self, message: Mapping[str, Any]) -> bool:
        """Sends a reply; False without a connection, or where the controller does not read."""
        if (line := self._line) is not None:
            data = json.dumps(message).encode()
            self.call(lambda: line.send(data))
        return line is not None

    async def _connect(self) -> None:
        pause_s, warned = FIRST_PAUSE_S, False
        while True:
            try:
                if await self._talk():
                    pause_s = FIRST_PAUSE_S
                self.error = "the controller has closed the connection"
            except asyncio.TimeoutError:
                self.error = "timed out"
            except (OSError, EOFError, ValueError) as error:  # ValueError: no host has that name
                self.error = str(error)
                # Warns once: it may be another user's process, or the token of another job.
                if isinstance(error, NotProvenError) and not warned:
                    warned = True
                    host, port = self._address
                    print_message(
                        f"--reach: {self.error} ({host}, port {port}); nothing was told to it; "
                        "trying again: until then requests do not reach this node"
                    )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _talk(self) -> bool:
        """A connection until it ends; whether there were requests."""
        heard, budget = False, Budget(REQUESTS_PER_S)
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*self._address), CONNECT_S)
        try:
            nonce = secrets.token_bytes(NONCE_BYTES)
            writer.write(MAGIC + nonce)
            answer = await asyncio.wait_for(reader.readexactly(ANSWER_BYTES), PROOF_S)
            handshake = Handshake(
                key=self._key, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES]
            )
            if not handshake.is_proof(CONTROLLER, answer[NONCE_BYTES:]):
                raise NotProvenError("what listens there does not have the same token")
            writer.write(handshake.proof(AGENT))
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._line, self.error = Line(writer, handshake.signer(AGENT)), None
            incoming = handshake.signer(CONTROLLER)
            with contextlib.suppress(EOFError, ValueError):
                while budget.spend(time.monotonic()):
                    self.requests.append(await read_message(reader, incoming))
                    heard = True
            return heard
        finally:
            self._line = None
            writer.transport.abort()


MESSAGES_PER_S = 500  # an agent sends no more than this: a node answers once per rank
HELLO_S = 5.0  # time for a peer to prove that it holds the token
GRACE_S = 1.0  # least time until a stranger has to go for want of room: many may come at once
MAX_AGENTS = 20_000
MAX_STRANGERS = 512
MAX_STRANGERS_PER_ADDRESS = 128
CONNECTIONS_PER_S = 500
"""Accepted per second; more wait in the kernel's queue, so that a flood takes no core, and an agent
at the address of a flood still has a quarter of a second for its proof."""
KEPT_BYTES = 1 << 26  # bytes of replies that the launcher has not taken; beyond, no agent is read
BACKLOG = 4096
_OWN_DESCRIPTORS = 256
_REST_S = 0.05
_REPLY_OVERHEAD_BYTES = 64


async def prove(
    reader: asyncio.StreamReader, write: Callable[[bytes], None], key: bytes
) -> Handshake:
    """Proves this end to a peer, and has the peer prove that it is an agent with the token."""
    # What is read before that has a fixed length, so no stranger can fill the memory.
    if await reader.readexactly(len(MAGIC)) != MAGIC:
        raise ValueError("not an agent of this version")
    nonce = await reader.readexactly(NONCE_BYTES)
    own = secrets.token_bytes(NONCE_BYTES)
    handshake = Handshake(key=key, agent_nonce=nonce, controller_nonce=own)
    write(own + handshake.proof(CONTROLLER))
    if not handshake.is_proof(AGENT, await reader.readexactly(PROOF_BYTES)):
        raise ValueError("the tokens differ")
    return handshake


class Controller(LoopThread):
    """A TCP star in a thread of its own; the launcher's tick sends and receives without waiting."""

    def __init__(self, listener: socket.socket, key: bytes) -> None:
        super().__init__("haiprof-controller")
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._listener, self._key = listener, key
        self._strangers: dict[asyncio.Task[None], tuple[str, float]] = {}
        """Address of each peer that has not proven itself, and since when; the oldest one first."""
        self.agents: dict[asyncio.Task[None], Line] = {}  # those that are connected
        self._budget = Budget(CONNECTIONS_PER_S)
        self._replies: deque[bytes] = deque()
        # Each is changed by one thread: what came in by the loop's, what was taken by the other.
        self._received_bytes = self._taken_bytes = 0
        self._has_room = asyncio.Event()
        self._has_room.set()

    def start(self) -> None:
        """Lets agents in."""
        self.begin(self._accept(self._listener))

    @property
    def queued_bytes(self) -> int:
        """Size of the replies that wait to be taken."""
        return self._received_bytes - self._taken_bytes

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Sends a message to every agent; from any thread, without waiting."""
        data = json.dumps(message).encode()

        def send() -> None:
            for line in list(self.agents.values()):
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
        self._strangers.pop(task, None)
        self.agents.pop(task, None)
        task.cancel()

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
            tasks = [*self._strangers, *self.agents]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _is_crowded(self) -> bool:
        """Whether all places are taken by strangers that have only just connected."""
        if not self._strangers or len(self._strangers) < self._stranger_limit():
            return False
        _, since_s = next(iter(self._strangers.values()))
        return self._loop.time() - since_s < GRACE_S

    def _stranger_limit(self) -> int:
        """Maximum number of strangers; 0 where agents have all connections."""
        # Some descriptors are left for the launcher's own work.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(MAX_AGENTS, max(soft - _OWN_DESCRIPTORS, soft // 2))
        return min(MAX_STRANGERS, max(most - len(self.agents), 0))

    def _let_in(self, accepted: socket.socket, address: str) -> None:
        if not self._stranger_limit():
            accepted.close()
            return
        self._make_room(address)
        accepted.setblocking(False)
        task = self._loop.create_task(self._talk(accepted))
        self._strangers[task] = address, self._loop.time()
        task.add_done_callback(self._end)
        task.add_done_callback(lambda _: accepted.close())  # it may end before it begins

    def _make_room(self, address: str) -> None:
        """Closes connections of strangers until there is room for one more from the address."""
        # Unauthenticated connections are few, short, and read a fixed length. Where there are too
        # many, the oldest one of the busiest address is closed: an agent proves itself within a
        # round trip.
        count = Counter(of for of, _ in self._strangers.values())
        if count[address] < MAX_STRANGERS_PER_ADDRESS:
            if len(self._strangers) < self._stranger_limit():
                return
            address = count.most_common(1)[0][0]
        self._end(next(task for task, (of, _) in self._strangers.items() if of == address))

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
                self.agents[task] = Line(writer, handshake.signer(CONTROLLER))
                incoming, budget = handshake.signer(AGENT), Budget(MESSAGES_PER_S)
                while True:
                    data = await read_message(reader, incoming)
                    if not budget.spend(self._loop.time()):
                        return
                    self._received_bytes += len(data) + _REPLY_OVERHEAD_BYTES
                    self._replies.append(data)
                    if self.queued_bytes > KEPT_BYTES:
                        self._has_room.clear()
                    # What is not read stays in the kernel's buffers, and so with the agent.
                    await self._has_room.wait()
            finally:
                writer.transport.abort()


_NOT_OURS = (errno.EADDRNOTAVAIL, errno.EADDRINUSE)


def join(address: str, token_file: Path) -> Controller | Uplink:
    """Listens at the address, or connects to the launcher that does."""
    # The command line is the same on every node: the one with that address listens.
    where = parse_address(address)
    try:
        listener = listen(*where)
    except OSError as error:
        if error.errno not in _NOT_OURS:
            raise
        uplink = Uplink(where, read_token(token_file))
        uplink.start()
        return uplink
    try:
        controller = Controller(listener, make_token(token_file))
    except (UsageError, OSError):
        listener.close()
        raise
    controller.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MAX_AGENTS + MAX_STRANGERS + _OWN_DESCRIPTORS)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return controller


def listen(host: str, port: int) -> socket.socket:
    """Takes the address for a `Controller`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    listener.setblocking(False)
    return listener
