"""Both ends prove that they hold the token, without sending it, and sign all that follows.

    agent -> controller     MAGIC, the agent's nonce
    controller -> agent     the controller's nonce, the controller's proof
    agent -> controller     the agent's proof

A proof is an HMAC-SHA256 under the token's key over MAGIC, the role of the proving end and both
nonces. So a proof of another connection, or one's own sent back, is not valid; and the controller
proves itself first, so an agent reveals nothing to another process on that port. Each direction
then has a key of its own, made in the same way, under which every message is signed together with
its number: nobody in between can change, add, repeat or reorder messages. What is sent can be read
on its way: it is authentic, not secret.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import dataclass

MAGIC = b"haiprof-reach-1\n"
"""Names this protocol; another version would have another one."""
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
AGENT, CONTROLLER = b"agent", b"controller"
_NUMBER = struct.Struct("!Q")


class Signer:
    """Signs the messages of one direction of one connection, or checks them, in their order."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

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

    key: bytes
    """Of the token."""
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


def new_nonce() -> bytes:
    """A random number that no other connection uses."""
    return secrets.token_bytes(NONCE_BYTES)
