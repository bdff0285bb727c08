"""Protobuf's wire format, as far as Chakra's messages need it."""

from __future__ import annotations

from collections.abc import Iterable

_VARINT, _BYTES = 0, 2
_WRAP = 1 << 64


def varint(number: int) -> bytes:
    """A number in groups of seven bits; a negative one as 64 bits in two's complement."""
    number %= _WRAP
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


def number_field(field: int, number: int) -> bytes:
    """A field of a number, a truth value or an enumeration."""
    return varint(field << 3 | _VARINT) + varint(number)


def bytes_field(field: int, value: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return varint(field << 3 | _BYTES) + varint(len(value)) + value


def text_field(field: int, text: str) -> bytes:
    """A field of text; half of a surrogate pair becomes a question mark."""
    return bytes_field(field, text.encode("utf-8", "replace"))


def packed_field(field: int, numbers: Iterable[int]) -> bytes:
    """A repeated field of numbers; nothing where there are none."""
    packed = b"".join(map(varint, numbers))
    return bytes_field(field, packed) if packed else b""


def delimit(message: bytes) -> bytes:
    """A message with its length before it, as Chakra puts them one after the other."""
    return varint(len(message)) + message
