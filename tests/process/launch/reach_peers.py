"""Both ends of `--reach` with plain sockets, for tests: they send whatever they are told to."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from haiprof.agent.reach import (
    AGENT,
    ANSWER_BYTES,
    CONTROLLER,
    HELLO_BYTES,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Handshake,
    Signer,
    seal,
)


@dataclass
class Peer:
    """A connection after the handshake."""

    connection: socket.socket
    outgoing: Signer
    incoming: Signer

    def seal(self, message: object) -> bytes:
        """What sends it, if it is sent next."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        return seal(data, self.outgoing)

    def send(self, message: object) -> None:
        """Sends JSON, or bytes as they are."""
        self.connection.sendall(self.seal(message))


def read(connection: socket.socket, count: int) -> bytes:
    """So many bytes, or what came before the end."""
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            break
        data += piece
    return data


def connect(address: tuple[str, int], **options: Any) -> socket.socket:
    """A connection that does not wait for ever."""
    connection = socket.create_connection(address, **options)
    connection.settimeout(30)
    return connection


def agent(address: tuple[str, int], key: bytes) -> Peer:
    """Joins a controller as an agent does."""
    connection = connect(address)
    nonce = os.urandom(NONCE_BYTES)
    connection.sendall(MAGIC + nonce)
    answer = read(connection, ANSWER_BYTES)
    handshake = Handshake(key=key, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES])
    assert handshake.is_proof(CONTROLLER, answer[NONCE_BYTES:])
    connection.sendall(handshake.proof(AGENT))
    return Peer(connection, handshake.signer(AGENT), handshake.signer(CONTROLLER))


def take_agent(listener: socket.socket, key: bytes) -> Peer:
    """Takes an agent in as a controller does."""
    connection, _ = listener.accept()
    connection.settimeout(30)
    nonce = os.urandom(NONCE_BYTES)
    hello = read(connection, HELLO_BYTES)
    handshake = Handshake(key=key, agent_nonce=hello[len(MAGIC) :], controller_nonce=nonce)
    connection.sendall(nonce + handshake.proof(CONTROLLER))
    assert handshake.is_proof(AGENT, read(connection, PROOF_BYTES))
    return Peer(connection, handshake.signer(CONTROLLER), handshake.signer(AGENT))
