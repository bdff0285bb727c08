"""One connection of the controller: unauthenticated until its proof, an agent's afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from haiprof.agent.reach.messages import FRAME_LIMIT_BYTES, LENGTH, SIGNATURE_BYTES, Budget, seal
from haiprof.agent.reach.proof import (
    AGENT,
    CONTROLLER,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    Signer,
    new_nonce,
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
