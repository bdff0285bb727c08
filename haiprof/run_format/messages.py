"""The schema of messages to and from running ranks: what each field may hold, checked first.

Requests, replies and introductions come from files, local sockets and TCP connections. Every
receiver calls `read_object` for JSON that is safe to handle, and `conform` for the fields that it
uses; no other code looks at a message that has not passed both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[object], bool]
Schema = Mapping[str, Check]
"""What each field must hold; a field that the message lacks is None."""

DEPTH_LIMIT = 32
"""Deeper JSON than this is refused: writing it again could exceed Python's recursion limit."""
TEXT_LIMIT = 4096
_ARGUMENT_LIMIT = 64
_RANK_LIMIT = 10_000_000
_INTEGER_LIMIT = 1 << 63

# Sets, as compiling patterns would take longer than the rest of this module when a job starts.
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_WORD = _LETTERS | frozenset("_-")
_ID = _LETTERS | _DIGITS | frozenset("-")


def read_object(data: bytes) -> dict[str, Any] | None:
    """Parses the JSON object of a message or line; None if it is not one, or nested too deep."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) and _is_shallow(message) else None


def conform(content: object, schema: Schema) -> dict[str, Any] | None:
    """Takes the fields of a schema from any JSON value; None if one does not fit."""
    if not isinstance(content, dict):
        return None
    fields = {name: content.get(name) for name in schema}
    return fields if all(check(fields[name]) for name, check in schema.items()) else None


def is_id(value: object) -> bool:
    """The id of a request, which is also the name of a file."""
    return _is_of(_ID, value, limit=64)


def is_word(value: object) -> bool:
    """A kind of request, or the state of a reply."""
    return _is_of(_WORD, value, limit=32)


def is_name(value: object) -> bool:
    """A rank as it signs its replies (`3`, `3.1` for its second attempt); also a file's name."""
    rank, dot, attempt = value.partition(".") if isinstance(value, str) else ("", "", "")
    return _is_of(_DIGITS, rank, limit=7) and (not dot or _is_of(_DIGITS, attempt, limit=4))


def is_string(value: object) -> bool:
    """Text as long as a message may be."""
    return isinstance(value, str)


def is_text(value: object) -> bool:
    """Text of a bounded length."""
    return isinstance(value, str) and len(value) <= TEXT_LIMIT


def is_count(value: object) -> bool:
    """A whole number from 0 on that fits 64 bits; True and False are not numbers."""
    return type(value) is int and 0 <= value < _INTEGER_LIMIT


def is_rank(value: object) -> bool:
    """The number of a rank."""
    return type(value) is int and 0 <= value < _RANK_LIMIT


def is_none_or(check: Check) -> Check:
    """A field that may be left out."""
    return lambda value: value is None or check(value)


def is_ranks(value: object) -> bool:
    """A list of ranks."""
    return isinstance(value, list) and all(map(is_rank, value))


def is_arguments(value: object) -> bool:
    """Options of a request by name; each of them is one plain value."""
    return (
        isinstance(value, dict)
        and len(value) <= _ARGUMENT_LIMIT
        and all(is_text(name) and _is_plain(argument) for name, argument in value.items())
    )


REQUEST: Schema = {
    "id": is_id,
    "kind": is_word,
    "arguments": is_arguments,
    "expires_wall_ns": is_count,
    "ranks": is_none_or(is_ranks),
}
"""Asks ranks for something."""
QUESTION: Schema = {name: REQUEST[name] for name in ("id", "kind", "arguments")}
"""What a rank reads of a request; the agent has checked the rest."""
HELLO: Schema = {"rank": is_rank, "attempt": is_count}
"""A rank says to the agent of its node who it is."""
MEMBER: Schema = {
    "name": is_name,
    "rank": is_rank,
    "host": is_none_or(is_text),
    "pid": is_none_or(is_count),
}
"""An agent says to the controller which rank it has."""
REPLY: Schema = {"state": is_word, "reason": is_none_or(is_string)}
"""What every reply has. The rest depends on the request; whoever sent that reads it."""
REMOTE_REPLY: Schema = {**REPLY, "name": is_name}
"""A reply of a rank, as the agent of another node hands it to the controller."""


def _is_of(characters: frozenset[str], value: object, *, limit: int) -> bool:
    """Text of these characters alone, one at least."""
    return isinstance(value, str) and 0 < len(value) <= limit and characters.issuperset(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):  # True and False too
        return abs(value) < _INTEGER_LIMIT
    return value is None or is_text(value)


def _is_shallow(message: dict[str, Any]) -> bool:
    level: list[Any] = [message]
    for _ in range(DEPTH_LIMIT):
        level = [
            value
            for holder in level
            for value in (holder.values() if type(holder) is dict else holder)
            if type(value) is dict or type(value) is list
        ]
        if not level:
            return True
    return False
