"""Mutations that keep enough of a format's structure to get past its first check."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from random import Random

LIMIT_BYTES = 1 << 16
"""Longest input: what a parser does with more is a matter of its stated limits."""
_ROUNDS = 8  # mutations of one input at most

NUMBERS = (
    b"0", b"-0", b"-1", b"1e400", b"-1e400", b"1e-400", b"0.1", b"NaN", b"Infinity", b"-Infinity",
    b"255", b"65536", b"2147483647", b"2147483648", b"4294967295", b"9007199254740993",
    b"9223372036854775807", b"-9223372036854775808", b"9223372036854775808",
    b"18446744073709551615", b"1" + b"0" * 30, b"9" * 400, b"9" * 5000, b"007", b"1.", b".5",
    b"1_0", "²".encode(), "٣".encode(),
)  # fmt: skip
VALUES = (
    b"null", b"true", b"[]", b"{}", b'""', b'"x"', b"[[]]", b"[null]", b'{"a": {}}', b"1.5",
    b'"\\ud800"', b'"\\u0000"', b'"' + b"9" * 400 + b'"',
)  # fmt: skip
TOKENS = (
    b"\x00", b"\n", b"\r\n", b"\t", b" ", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xc3",
    b'"', b"'", b"\\", b"\\u0000", b"{", b"}", b"[", b"]", b",", b":", b"=", b"/../", b"\x1b[31m",
    "\u202e".encode(), b"[" * 2000, b'{"a":' * 2000, b"A" * 5000,
)  # fmt: skip

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_VALUE = re.compile(rb'(?<=:)\s*(?:"(?:[^"\\]|\\.)*"|-?[\d.eE+]+|true|false|null|\[\]|\{\})')
_WIDTHS = ("<B", "<H", "<I", "<Q", ">I", "<q", "<d")
_EXTREMES = (0, 1, -1, 0x7F, 0x80, 0xFFFF, 1 << 31, (1 << 31) - 1, (1 << 63) - 1, 1 << 63)

_Mutation = Callable[[Random, bytes, Sequence[bytes], Sequence[bytes]], bytes]


def mutate(random: Random, data: bytes, pool: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """An input that differs in some places."""
    for _ in range(random.choice((1, 1, 1, 2, 3, _ROUNDS))):
        data = random.choice(MUTATIONS)(random, data, pool, tokens)
    return data[:LIMIT_BYTES]


def _part(random: Random, data: bytes) -> tuple[int, int]:
    """A range, mostly a short one."""
    start = random.randrange(len(data) + 1)
    length = random.choice((1, 2, 4, 8, 64, 512, len(data)))
    return start, min(len(data), start + random.randrange(length + 1))


def _flip(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    for _round in range(random.choice((1, 1, 2, 16))):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _set(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    start, end = _part(random, data)
    return data[:start] + bytes([random.randrange(256)]) * min(end - start, 8) + data[end:]


def _cut(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    start, end = _part(random, data)
    return data[:start] if random.random() < 0.3 else data[:start] + data[end:]


def _repeat(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    start, end = _part(random, data)
    times = random.choice((2, 2, 3, 50))
    return data[:start] + (data[start:end] * times)[:LIMIT_BYTES] + data[end:]


def _swap_parts(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    a, b, c, d = sorted(random.randrange(len(data) + 1) for _round in range(4))
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _splice(random: Random, data: bytes, pool: Sequence[bytes], _: Sequence[bytes]) -> bytes:
    other = random.choice(pool) if pool else b""
    start, end = _part(random, data)
    first, last = _part(random, other)
    return data[:start] + other[first:last] + data[end:]


def _insert_token(
    random: Random, data: bytes, _: Sequence[bytes], tokens: Sequence[bytes]
) -> bytes:
    start, end = _part(random, data)
    word = random.choice(tokens if tokens and random.random() < 0.6 else TOKENS)
    return data[:start] + word + data[random.choice((start, end)) :]


def _replace(
    random: Random, data: bytes, pattern: re.Pattern[bytes], words: Sequence[bytes]
) -> bytes:
    found = list(pattern.finditer(data))
    if not found:
        return data
    match = random.choice(found)
    return data[: match.start()] + random.choice(words) + data[match.end() :]


def _number(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    return _replace(random, data, _NUMBER, NUMBERS)


def _nudge(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    """A number a little above or below, or doubled: sizes and counts that nearly fit."""
    found = list(re.finditer(rb"\d{1,18}", data))
    if not found:
        return data
    match = random.choice(found)
    value = int(match[0])
    value = random.choice((value - 1, value + 1, value * 2, value // 2, value + (1 << 32), -value))
    return data[: match.start()] + b"%d" % value + data[match.end() :]


def _value(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    return _replace(random, data, _VALUE, (*VALUES, *NUMBERS))


def _group(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    """A whole array or object gone, twice, or another value in its place."""
    opened = [at for at, byte in enumerate(data) if byte in b"[{"]
    if not opened:
        return data
    start = random.choice(opened)
    end, depth = start, 0
    for end in range(start, len(data)):
        depth += (data[end] in b"[{") - (data[end] in b"]}")
        if not depth:
            break
    group = data[start : end + 1]
    word = random.choice((b"", group + b"," + group, b"[" + group + b"]", *VALUES, *NUMBERS))
    return data[:start] + word + data[end + 1 :]


def _swap_strings(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    """Two keys or texts in each other's place."""
    found = list(_STRING.finditer(data))
    if len(found) < 2:
        return data
    first, last = sorted(random.sample(found, 2), key=lambda match: match.start())
    between = data[first.end() : last.start()]
    return data[: first.start()] + last[0] + between + first[0] + data[last.end() :]


def _move_line(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    lines = data.split(b"\n")
    line = lines.pop(random.randrange(len(lines)))
    for _round in range(random.choice((0, 1, 1, 2))):
        lines.insert(random.randrange(len(lines) + 1), line)
    return b"\n".join(lines)


def _binary(random: Random, data: bytes, *_: Sequence[bytes]) -> bytes:
    """A number of the machine's form in place of some bytes."""
    form = random.choice(_WIDTHS)
    size = struct.calcsize(form)
    if form[1] == "d":
        word = struct.pack(form, random.choice((float("nan"), float("inf"), -1e308, 5e-324)))
    else:
        word = (random.choice(_EXTREMES) % (1 << 8 * size)).to_bytes(
            size, "little" if form[0] == "<" else "big"
        )
    start = random.randrange(len(data) + 1)
    return data[:start] + word + data[start + size :]


MUTATIONS: tuple[_Mutation, ...] = (
    _flip, _set, _cut, _repeat, _swap_parts, _splice, _insert_token, _insert_token, _number, _nudge,
    _value, _value, _group, _swap_strings, _move_line, _binary,
)  # fmt: skip
