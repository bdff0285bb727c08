"""A trace's text once more, with an argument added to some of its events."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.events import TEXTS
from haiprof.trace_format.kineto.text import TraceText

_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARGS: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | None
)


def add_marks(
    text: TraceText, events: npt.NDArray[np.int64], mark: str, *, only_marked: bool = False
) -> Iterator[bytes]:
    """Yields the text of all events as written, some of them with one more argument."""
    first = 0
    for piece in event_texts(text):
        texts = TEXTS.decode(b"[" + piece + b"]")
        chosen = events[slice(*np.searchsorted(events, [first, first + len(texts)]))] - first
        first += len(texts)
        if not len(chosen) and not only_marked:
            yield piece
            continue
        whole = [bytes(one) for one in texts]
        marked = chosen.tolist()
        for place in marked:
            whole[place] = _mark_event(whole[place], mark)
        if only_marked:
            kept = set(marked)
            whole = [one for at, one in enumerate(whole) if at in kept or _is_metadata(one)]
        if whole:
            yield b",\n".join(whole)


def _is_metadata(event: bytes) -> bool:
    return bool(_FIELDS.decode(event).get("ph") == msgspec.Raw(b'"M"'))


def _mark_event(event: bytes, mark: str) -> bytes:
    fields = _FIELDS.decode(event)
    try:
        args = _ARGS.decode(fields.get("args", msgspec.Raw(b"{}"))) or {}
    except msgspec.ValidationError:
        return event  # its arguments are no object: there is nowhere to put a mark
    args[mark] = msgspec.Raw(b"1")
    fields["args"] = msgspec.Raw(msgspec.json.encode(args))
    return msgspec.json.encode(fields)
