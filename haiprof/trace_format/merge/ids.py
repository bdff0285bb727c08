"""Ids of arrows and asynchronous events, made unique per rank."""

from __future__ import annotations

import hashlib

ID_STRIDE = 10_000_000_000
"""Rank 3's arrow 4711 is 30000004711: both can be read off. Kineto's ids are of 32 bits."""
_EXACT_LIMIT = 1 << 53  # a browser's numbers are exact below


def ranked_id(rank: int, written: bytes) -> bytes:
    """Makes an id unique to its rank."""
    digits = written.strip(b'"')
    if (
        digits.isdigit()
        and len(digits) < len(str(ID_STRIDE))
        and (digits[:1] != b"0" or digits == b"0")
    ):
        ranked = rank * ID_STRIDE + int(digits)
        if ranked < _EXACT_LIMIT:
            return b"%d" % ranked
    found = hashlib.blake2b(b"%d " % rank + digits, digest_size=8)
    return b'"0x' + found.hexdigest().encode() + b'"'
