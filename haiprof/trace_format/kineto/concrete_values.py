"""Arguments of operators that are no tensors, read from the trace's text where they are needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.events import TEXTS
from haiprof.trace_format.kineto.text import TraceText


class _Args(msgspec.Struct):
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"[]"))


class _Event(msgspec.Struct):
    name: str = ""
    args: _Args = msgspec.field(default_factory=_Args)


_EVENT = msgspec.json.Decoder(_Event)


def concrete_values(path: Path, operators: pl.DataFrame) -> pl.DataFrame:
    """`Concrete Inputs` of some operators: no table has them, since few questions need them.

    `event` and `values`, a JSON text; no row for an operator without them, as before torch
    2.1 and in damaged parts of a file.
    """
    wanted = operators.sort("event")
    events: Ints = wanted["event"].to_numpy()
    names = wanted["name"].cast(pl.String).to_list()
    found: list[tuple[int, str]] = []
    first = 0
    for piece in event_texts(TraceText(path)) if len(events) else ():
        texts = TEXTS.decode(b"[" + piece + b"]")
        low, high = np.searchsorted(events, [first, first + len(texts)]).tolist()
        found += _of_piece(texts, events[low:high] - first, names[low:high], first)
        first += len(texts)
        if high == len(events):
            break
    schema = {"event": pl.Int64, "values": pl.String}
    return pl.DataFrame(found, schema=schema, orient="row")


def _of_piece(
    texts: list[msgspec.Raw], places: Ints, names: list[str], first: int
) -> list[tuple[int, str]]:
    found = []
    for place, name in zip(places.tolist(), names, strict=True):
        try:
            event = _EVENT.decode(texts[place])
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if event.name == name:
            found.append((first + place, bytes(event.args.values).decode("utf-8", "replace")))
    return found
