"""The controller: takes in the agents of other nodes, sends requests, collects replies."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from haiprof.launch.reach.wire import (
    FRAME_LIMIT_BYTES,
    HELLO_LIMIT_BYTES,
    LENGTH,
    content,
    frame,
    same_token,
)

HELLO_S = 10.0
"""Who has not shown the token by then is sent away."""
MESSAGES_PER_S = 500
"""More than that from one agent is no agent of ours: a node answers once per rank."""
MAX_AGENTS = 20_000
MAX_STRANGERS = 4_096
BACKLOG = 4096
_START_S = 10.0


class Controller:
    """A TCP star in a thread of its own; the launcher's tick talks to it through two queues.

    Args:
        host: Interface to listen on.
        port: Port; 0 takes any.
        token: What agents must show.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self.replies: deque[dict[str, Any]] = deque(maxlen=200_000)
        """What agents sent, oldest first."""
        self.address: tuple[str, int] = (host, port)
        self._token = token
        self._agents: dict[int, asyncio.StreamWriter] = {}
        self._strangers = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._error: OSError | None = None
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="haiprof-controller", daemon=True)

    def start(self) -> None:
        """Listens.

        Raises:
            OSError: The address cannot be had.
        """
        self._thread.start()
        self._ready.wait(_START_S)
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Sends all agents away."""
        stopping = self._stopping
        if stopping is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(stopping.set)
        if self._thread.is_alive():
            self._thread.join(_START_S)

    @property
    def agent_count(self) -> int:
        """Agents that are connected."""
        return len(self._agents)

    def broadcast(self, message: Mapping[str, Any]) -> None:
        """Sends a message to every agent; from any thread, without waiting."""
        data = frame(message)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._send, data)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except OSError as error:
            self._error = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        host, port = self.address
        server = await asyncio.start_server(
            self._take_in, host, port, backlog=BACKLOG, limit=FRAME_LIMIT_BYTES
        )
        self.address = server.sockets[0].getsockname()[:2]
        self._ready.set()
        await self._stopping.wait()
        server.close()
        for writer in list(self._agents.values()):
            writer.close()
        await asyncio.sleep(0)

    def _send(self, data: bytes) -> None:
        for writer in list(self._agents.values()):
            if writer.transport.get_write_buffer_size() > FRAME_LIMIT_BYTES:
                writer.transport.abort()  # it has stopped reading
                continue
            writer.write(data)

    async def _take_in(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key = id(writer)
        try:
            if self._strangers < MAX_STRANGERS and len(self._agents) < MAX_AGENTS:
                self._strangers += 1
                try:
                    known = await asyncio.wait_for(self._knows(reader), HELLO_S)
                finally:
                    self._strangers -= 1
                if known:
                    self._agents[key] = writer
                    await self._listen(reader)
        except (OSError, EOFError, ValueError, asyncio.TimeoutError):
            pass  # gone, or not one of ours: either way it is sent away
        finally:
            self._agents.pop(key, None)
            writer.close()

    async def _knows(self, reader: asyncio.StreamReader) -> bool:
        hello = content(await _read(reader, HELLO_LIMIT_BYTES)) or {}
        return same_token(hello.get("token"), self._token)

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        """Takes messages until the agent goes, or sends more than any agent would."""
        budget, since = float(MESSAGES_PER_S), self._loop.time()
        while True:
            message = content(await _read(reader, FRAME_LIMIT_BYTES))
            now = self._loop.time()
            budget = min(MESSAGES_PER_S, budget + (now - since) * MESSAGES_PER_S) - 1
            since = now
            if message is None or budget < 0:
                return
            self.replies.append(message)


async def _read(reader: asyncio.StreamReader, limit: int) -> bytes:
    """One message.

    Raises:
        ValueError: It is longer than allowed.
        EOFError: The other end has gone (IncompleteReadError).
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    if length > limit:
        raise ValueError("a message that is too long")
    return await reader.readexactly(length)
