"""A trace's text once more, with an argument added to some of its events."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from haiprof.traces.decode import event_texts
from haiprof.traces.events import TEXTS
from haiprof.traces.text import TraceText

_FIELDS: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ARGS: msgspec.json.Decoder[dict[str, msgspec.Raw] | None] = msgspec.json.Decoder(
    dict[str, msgspec.Raw] | None
)


def marked_texts(text: TraceText, events: npt.NDArray[np.int64], mark: str) -> Iterator[bytes]:
    """The text of all events in pieces, as they are written, some with one more argument.

    Args:
        text: Of a trace, from its beginning.
        events: Places of the events to mark, from 0, each once, in order.
        mark: The argument; its value is 1.

    Returns:
        Events separated by commas; no piece is empty. Numbers keep all their digits.
    """
    first = 0
    for piece in event_texts(text):
        texts = TEXTS.decode(b"[" + piece + b"]")
        chosen = events[slice(*np.searchsorted(events, [first, first + len(texts)]))] - first
        first += len(texts)
        if not len(chosen):
            yield piece
            continue
        whole = [bytes(one) for one in texts]
        for place in chosen.tolist():
            whole[place] = _marked(whole[place], mark)
        yield b",\n".join(whole)


def _marked(event: bytes, mark: str) -> bytes:
    fields = _FIELDS.decode(event)
    args = _ARGS.decode(fields.get("args", msgspec.Raw(b"{}"))) or {}
    args[mark] = msgspec.Raw(b"1")
    fields["args"] = msgspec.Raw(msgspec.json.encode(args))
    return msgspec.json.encode(fields)
