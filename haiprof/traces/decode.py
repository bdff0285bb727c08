"""From a piece of text to events; what is damaged is repaired or left out, and counted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from haiprof.traces.events import EVENTS, EXACT_EVENTS
from haiprof.traces.text import BOUNDARY, TraceText

_JOINED_LIMIT = 64  # pieces of one event that a boundary inside it had cut
_NOT_NUMBERS = re.compile(rb"(?<=[\s:\[,])(?:-?Infinity|-?inf|NaN|nan)(?=[\s,\]}])")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_LONE_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrtu])')
_END = re.compile(rb"\}\s*\]")
_SHOWN_CHARS = 80

TEXTS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[msgspec.Raw])
"""Events as they are written."""

_DecodeError = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@dataclass(slots=True)
class Damage:
    """What could not be read as it stood."""

    repaired_count: int = 0
    """Pieces of text with values that are no JSON (NaN, stray bytes), read without those values."""
    lost_count: int = 0
    """Events that could not be read at all."""
    examples: list[str] = field(default_factory=list)
    """The beginning of the first few lost events."""


def decode(piece: bytes, text: TraceText, damage: Damage, *, exact: bool) -> list[Any]:
    """The events of a piece.

    Args:
        piece: Events separated by commas.
        text: Where it is from; it is told when the array of events ends inside the piece.
        damage: Grows by what was wrong.
        exact: Decode times as they are written.
    """
    return _events(piece, EXACT_EVENTS if exact else EVENTS, text, damage)


def event_texts(text: TraceText) -> Iterator[bytes]:
    """The text of all events, as they are written but for what is no JSON, in pieces.

    Args:
        text: Of a trace, from its beginning.

    Returns:
        Events separated by commas; no piece is empty.
    """
    damage = Damage()
    for piece in text.pieces():
        if _is_utf8(piece) and _decoded(piece, TEXTS) is not None:
            whole = piece
        else:
            events = _events(scrubbed(piece), TEXTS, text, damage)
            whole = b",\n".join(bytes(event) for event in events)
        if whole.strip():
            yield whole


def _events(
    piece: bytes, decoder: msgspec.json.Decoder[list[Any]], text: TraceText, damage: Damage
) -> list[Any]:
    try:
        return decoder.decode(b"[" + piece + b"]")
    except _DecodeError:
        pass
    clean = scrubbed(piece)
    if clean != piece:
        try:
            found = decoder.decode(b"[" + clean + b"]")
        except _DecodeError:
            pass
        else:
            damage.repaired_count += 1
            return found
    return list(_one_by_one(clean, decoder, text, damage))


def scrubbed(piece: bytes) -> bytes:
    """The text without what JSON does not allow but traces have been seen with."""
    piece = piece.decode("utf-8", "replace").encode() if not _is_utf8(piece) else piece
    piece = _NOT_NUMBERS.sub(b"null", piece)
    return _LONE_BACKSLASH.sub(rb"\\\\", _CONTROL.sub(b" ", piece))


def _is_utf8(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def _one_by_one(
    piece: bytes, decoder: msgspec.json.Decoder[list[Any]], text: TraceText, damage: Damage
) -> Iterator[Any]:
    """Each event alone; a boundary that was inside an event is undone."""
    cuts = [match.start() + 1 for match in BOUNDARY.finditer(piece)]
    starts = [0, *(piece.index(b"{", cut) for cut in cuts)]
    ends = [*cuts, len(piece)]
    at = 0
    while at < len(starts):
        for last in range(at, min(at + _JOINED_LIMIT, len(ends))):
            found = _decoded(piece[starts[at] : ends[last]], decoder)
            if found is not None:
                yield from found
                at = last + 1
                break
        else:
            closed = _closed(piece[starts[at] :], decoder)
            if closed is not None:
                found, rest = closed
                yield from found
                text.events_ended(rest)
                return
            damage.lost_count += 1
            if len(damage.examples) < 3:
                damage.examples.append(repr(piece[starts[at] : starts[at] + _SHOWN_CHARS]))
            at += 1


def _decoded(event: bytes, decoder: msgspec.json.Decoder[list[Any]]) -> list[Any] | None:
    try:
        return decoder.decode(b"[" + event + b"]")
    except _DecodeError:
        return None


def _closed(
    piece: bytes, decoder: msgspec.json.Decoder[list[Any]]
) -> tuple[list[Any], bytes] | None:
    """The last events of the array and what follows it, where it closes in this piece."""
    for end in _END.finditer(piece):
        found = _decoded(piece[: end.start() + 1], decoder)
        if found is not None:
            return found, piece[end.end() :]
    return None
