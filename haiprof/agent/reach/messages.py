"""Messages after both proofs: signed JSON objects, with a rate limit."""

from __future__ import annotations

import struct

from haiprof.agent.reach.proof import Signer
from haiprof.run_format.control import MESSAGE_LIMIT_BYTES

LENGTH = struct.Struct("!I")
SIGNATURE_BYTES = 32
FRAME_LIMIT_BYTES = 2 * MESSAGE_LIMIT_BYTES
"""Longest message: a rank's reply and its sender. A longer one is not read."""


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


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[V6]:PORT`, or `PORT` on the loopback interface; else ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdigit() or not 0 < int(port) < 65_536 or any(c.isspace() for c in host):
        raise ValueError("expected HOST:PORT")
    return host, int(port)
