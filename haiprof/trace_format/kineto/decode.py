"""Decodes a piece of text into events; adds and replaces fields in the text of events."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from haiprof.base.errors import HaiprofError, convert_os_errors
from haiprof.base.safe_files import whole_file
from haiprof.trace_format.kineto.events import ARGUMENTS, HEADS, JSON_KEYS, TEXTS, Decoder
from haiprof.trace_format.kineto.text import BOUNDARY, Element, Found, TraceText, element, scrub

# A text of this length without the end of an event, in which further events seem to begin, has
# lost a bracket or a quote.
_UNFINISHED_LIMIT_BYTES = 8 << 20
_WASTE_LIMIT, _WINDOW_BYTES = 16, 4096
_SHOWN_BYTES, _EXAMPLES = 80, 3
_GZIP_LEVEL = 1

_DecodeError = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


@dataclass(slots=True)
class Damage:
    """Counts of what could not be read as written."""

    repaired_count: int = 0
    """Pieces of text with invalid JSON values (NaN, stray bytes), read without those values."""
    lost_count: int = 0  # events that could not be read at all
    odd_arguments_count: int = 0
    """Events some of whose arguments are of a wrong type: those are missing."""
    examples: list[str] = field(default_factory=list)  # the beginning of the first few lost events

    def lose(self, event: bytes) -> None:
        """Counts an event that cannot be read."""
        self.lost_count += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(event[:_SHOWN_BYTES].decode("utf-8", "replace"))


def decode(piece: bytes, text: TraceText, damage: Damage, decoder: Decoder) -> list[Any]:
    """Decodes the events of a piece."""
    if not text.is_last:
        found = _decode_events(piece, decoder)
        if found is not None:
            return found
    last = element(piece, 0)  # that is incomplete
    while last.found is Found.WHOLE:
        last = element(piece, last.end)
    if not _seems_broken(piece, last, text):
        whole = piece[: last.start].rstrip(b", \t\r\n")
        found = _decode_events(whole, decoder)
        if found is None and (clean := scrub(whole)) != whole:
            found = _decode_events(clean, decoder)
            damage.repaired_count += found is not None
        if found is not None:
            _end_with(piece, last, text)
            return found
    clean = scrub(piece)
    damage.repaired_count += clean != piece
    return list(_one_by_one(clean, decoder, text, damage))


def event_texts(text: TraceText) -> Iterator[tuple[int, list[bytes]]]:
    """Yields how many events came before, and the next ones as written; not what is not JSON."""
    damage, count = Damage(), 0
    for piece in text.pieces():
        events = list(map(bytes, decode(piece, text, damage, TEXTS)))
        if _decode_events(b",".join(events), HEADS) is None:  # some are JSON, but no events
            events = [each for each in events if _decode_events(each, HEADS) is not None]
        if events:
            yield count, [each if each.isascii() else scrub(each) for each in events]
            count += len(events)


def arguments(table: str, raws: Sequence[msgspec.Raw], damage: Damage) -> list[Any]:
    """Decodes the arguments of events of one table."""
    decoder = ARGUMENTS[table]
    found = _decode_events(b",".join(raws), decoder)
    return [_mend(bytes(raw), decoder, damage) for raw in raws] if found is None else found


def _mend(raw: bytes, decoder: Decoder, damage: Damage) -> object:
    """One event's arguments without those that are of a wrong type."""
    for candidate in (raw, scrub(raw)):
        found = _decode_events(candidate, decoder)
        if found is not None:
            return found[0]
    try:
        values = msgspec.json.decode(scrub(raw))
    except _DecodeError:
        values = {}
    fields = values.items() if isinstance(values, dict) else ()
    kept = {k: v for k, v in fields if k in JSON_KEYS or type(v) in (int, float, str)}
    if values is not None:
        damage.odd_arguments_count += 1
    return decoder.decode(b"[" + msgspec.json.encode(kept) + b"]")[0]


def _decode_events(events: bytes, decoder: Decoder) -> list[Any] | None:
    try:
        return decoder.decode(b"[" + events + b"]")
    except _DecodeError:
        return None


def _end_with(piece: bytes, last: Element, text: TraceText) -> None:
    """Hands an incomplete end of the piece back to the text."""
    if last.found is Found.ARRAY_END:
        text.events_ended(piece[last.end :])
    elif text.is_last:
        text.truncated_bytes = len(piece) - last.start
    else:
        text.unread(piece[last.start :])


def _seems_broken(piece: bytes, last: Element, text: TraceText) -> bool:
    """Whether brackets do not match, or an unfinished event contains the beginnings of others.

    A truncated file is not broken, even where its last event seems to contain events: at the end
    of a file only an unmatched quote counts, and only where the file closes properly.
    """
    if last.found in (Found.BROKEN, Found.ARRAY_END):
        return last.found is Found.BROKEN
    if text.is_last:
        swallowed = last.found is Found.IN_STRING and piece.rstrip().endswith((b"}", b"]"))
    else:
        swallowed = len(piece) - last.start > _UNFINISHED_LIMIT_BYTES
    return swallowed and BOUNDARY.search(piece, last.start) is not None


def _one_by_one(piece: bytes, decoder: Decoder, text: TraceText, damage: Damage) -> Iterator[Any]:
    """Decodes each event alone; a damaged one ends where the next seems to begin."""
    at, wasted_bytes = 0, 0
    while True:
        # Bounds the search: else heavy damage would cost a scan of the whole piece per event.
        window = _WINDOW_BYTES if wasted_bytes > _WASTE_LIMIT * len(piece) else len(piece)
        found = element(piece, at, min(at + window, len(piece)))
        if found.found is Found.WHOLE:
            event = piece[found.start : found.end]
            decoded = _decode_events(event, decoder)
            if decoded is not None:
                yield from decoded
                at = found.end
                continue
            following = None if _is_json(event) else BOUNDARY.search(event)
            at = found.start + following.start() + 1 if following else found.end
        else:
            ended_early = found.end < len(piece) and found.found is not Found.ARRAY_END
            if not (ended_early or _seems_broken(piece, found, text)):
                break
            following = BOUNDARY.search(piece, found.start)
            if following is None:
                break
            at = following.start() + 1
        wasted_bytes += found.end - found.start
        damage.lose(piece[found.start : at])
    if found.found is Found.BROKEN and text.is_last:
        damage.lose(piece[found.start :])
    else:
        _end_with(piece, found, text)


def _is_json(event: bytes) -> bool:
    try:
        msgspec.json.decode(event)
    except _DecodeError:
        return False
    return True


_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_number(event: bytes, field: str, number: int) -> bytes:
    """An event with a whole number in one field."""
    fields = _FIELDS.decode(event)
    fields[field] = msgspec.Raw(b"%d" % number)
    return msgspec.json.encode(fields)


_ARGS: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | None
)


def write_copy(target: Path, text: TraceText, pieces: Iterable[bytes], *, mark: str = "{") -> None:
    """Writes a trace anew, whole or not at all: pieces of events, then its metadata."""
    separator = f'{mark}"traceEvents": [\n'.encode()
    with (
        convert_os_errors(HaiprofError, str(target), hint="name a folder that can be written"),
        whole_file(target, below=target.parent) as packed,
        gzip.GzipFile("", "wb", _GZIP_LEVEL, packed) as file,
    ):
        for piece in pieces:
            file.write(separator)
            file.write(piece)
            separator = b",\n"
        file.write(b"" if separator == b",\n" else separator)
        rest = json.dumps(text.metadata)[1:].encode()
        file.write(b"\n]" + (b", " if text.metadata else b"") + rest)


def add_marks(
    text: TraceText, events: npt.NDArray[np.int64], mark: str, *, only_marked: bool = False
) -> Iterator[bytes]:
    """Yields the text of all events as written, some of them with one more argument."""
    for first, texts in event_texts(text):
        low, high = np.searchsorted(events, [first, first + len(texts)])
        marked = set((events[low:high] - first).tolist())
        for place in marked:
            texts[place] = _mark_event(texts[place], mark)
        kept = [
            one for at, one in enumerate(texts) if not only_marked or at in marked
            or _FIELDS.decode(one).get("ph") == msgspec.Raw(b'"M"')
        ]  # fmt: skip
        if kept:
            yield b",\n".join(kept)


def _mark_event(event: bytes, mark: str) -> bytes:
    fields = _FIELDS.decode(event)
    try:
        args = _ARGS.decode(fields.get("args", msgspec.Raw(b"{}"))) or {}
    except msgspec.ValidationError:
        return event  # its arguments are no object: there is nowhere to put a mark
    args[mark] = msgspec.Raw(b"1")
    fields["args"] = msgspec.Raw(msgspec.json.encode(args))
    return msgspec.json.encode(fields)
