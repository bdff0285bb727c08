"""Finds where events begin and end in text that does not decode, and repairs such text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

# A string, and its closing quote as group 1: empty where the text ends before it. The pattern
# matches wherever it is tried, so that no text can make it backtrack.
_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*("?)'
_TOKEN = re.compile(_STRING + rb"|[{}\[\]]", re.DOTALL)
_NOT_NUMBER = rb"[-+]?(?:Infinity|inf|NaN|nan)(?:\(ind\))?(?![0-9A-Za-z_])"
_MENDED = re.compile(_STRING + rb"|(?<![0-9A-Za-z_])" + _NOT_NUMBER + rb"|[\x00-\x1f]", re.DOTALL)
_IN_STRING = re.compile(
    rb'\\(?:["\\/bfnrt]|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    rb"|u(?![dD][89a-fA-F])[0-9a-fA-F]{4})"  # what JSON allows
    rb"|\\u[dD][0-9a-fA-F]{3}|\\|[\x00-\x1f]"  # half a surrogate pair, a lone \, a control byte
)
_SUSPECT = re.compile(rb"[\\\x00-\x1f]")
_KEYS = rb'"(?:ph|name|cat|pid|tid|ts|dur|id|s|bp|args)"'
BOUNDARY = re.compile(rb"\}(\s*,\s*)\{\s*" + _KEYS)
_BETWEEN = re.compile(rb"[\s,]*")
_CLOSER = {ord("{"): ord("}"), ord("["): ord("]")}
_END_OF_ARRAY = ord("]")


class Found(Enum):
    """What `element` found."""

    WHOLE = auto()
    """An element of the array, from `start` to `end`."""
    ARRAY_END = auto()
    """The array's bracket, from `start` to `end`."""
    UNFINISHED = auto()
    """The text ends within the element that begins at `start`, or between elements."""
    IN_STRING = auto()
    """The same, and within a string."""
    BROKEN = auto()
    """From `start` the brackets do not fit together."""


@dataclass(frozen=True, slots=True)
class Element:
    """A part of the text of an array."""

    found: Found
    start: int
    end: int


def element(text: bytes, at: int, limit: int | None = None) -> Element:
    """The next element of an array, by its brackets and quotes alone."""
    limit = len(text) if limit is None else limit
    at = _after_separator(text, at)
    open_brackets: list[int] = []
    for token in _TOKEN.finditer(text, at, limit):
        if token[1] is not None:
            if not token[1]:
                return Element(Found.IN_STRING, at, limit)
            continue
        kind = text[token.start()]
        if kind in _CLOSER:
            open_brackets.append(_CLOSER[kind])
        elif not open_brackets:
            if kind == _END_OF_ARRAY and token.start() == at:
                return Element(Found.ARRAY_END, at, token.end())
            return Element(Found.BROKEN, at, token.end())
        elif open_brackets.pop() != kind:
            return Element(Found.BROKEN, at, token.end())
        if not open_brackets:
            return Element(Found.WHOLE, at, token.end())
    return Element(Found.UNFINISHED, at, limit)


def depth(text: bytes, start: int, end: int) -> int | None:
    """How many brackets a part of a text leaves open; None where it ends within a string."""
    found = 0
    for token in _TOKEN.finditer(text, start, end):
        if token[1] is None:
            found += 1 if text[token.start()] in _CLOSER else -1
        elif not token[1]:
            return None
    return found


def _after_separator(text: bytes, at: int) -> int:
    between = _BETWEEN.match(text, at)
    return between.end() if between else at


def scrub(text: bytes) -> bytes:
    """Removes from a text what JSON does not allow but real traces contain.

    NaN and infinities become null; invalid UTF-8 and unpaired surrogates become U+FFFD; control
    characters become spaces; backslashes that begin no escape are escaped.
    """
    if not is_utf8(text):
        text = text.decode("utf-8", "replace").encode()
    return _MENDED.sub(_mend_token, text)


def is_utf8(text: bytes) -> bool:
    """Whether a text is valid UTF-8."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _mend_token(token: re.Match[bytes]) -> bytes:
    found = token[0]
    if token[1] is not None:
        return _IN_STRING.sub(_mend_string, found) if _SUSPECT.search(found) else found
    if len(found) == 1:
        return found if found in b"\t\n\r" else b" "
    return b"null"


def _mend_string(token: re.Match[bytes]) -> bytes:
    found = token[0]
    if not found.startswith(b"\\"):
        return b" "
    if found == b"\\":
        return b"\\\\"
    return b"\\ufffd" if _is_half_pair(found) else found


def _is_half_pair(escape: bytes) -> bool:
    return len(escape) == 6 and escape[:3].lower() == b"\\ud" and escape[3:4].lower() > b"7"
