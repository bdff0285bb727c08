"""One event of a Chrome trace as msgspec decodes it: only the fields that a table has."""

from __future__ import annotations

from typing import Any

import msgspec

from haiprof.traces.tables import TABLES, TraceColumn

Number = int | float | str | None
Text = str | int | float | None

NO_JSON = msgspec.Raw(b"")
"""Where an event has no such argument."""
_NO_ARGS = msgspec.Raw(b"{}")
_NO_TIME = msgspec.Raw(b"null")


class Head(msgspec.Struct, gc=False):
    """An event but for its arguments, which wait until it is known what to take from them.

    `ts` and `dur` in us; what is missing is None.
    """

    ph: str | None = ""
    cat: Text = ""
    name: Text = ""
    pid: Number = None
    tid: Number = None
    ts: Number = None
    dur: Number = None
    id: Number = None
    args: msgspec.Raw = _NO_ARGS


class ExactHead(msgspec.Struct, gc=False):
    """The same with times as they are written, for stamps that a float cannot hold to 1 ns."""

    ph: str | None = ""
    cat: Text = ""
    name: Text = ""
    pid: Number = None
    tid: Number = None
    ts: msgspec.Raw = _NO_TIME
    dur: msgspec.Raw = _NO_TIME
    id: Number = None
    args: msgspec.Raw = _NO_ARGS


HEADS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[Head])
EXACT_HEADS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[ExactHead])
TEXTS: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[msgspec.Raw])
"""Events as they are written."""


def argument_names(column: TraceColumn) -> list[str]:
    """Fields of the arguments' struct that hold a column, by the spellings of its key."""
    keys = [] if column.field.startswith(".") or not column.field else column.field.split("|")
    return [f"{column.name}_{place}" for place, _ in enumerate(keys)]


def _arguments(table: str) -> msgspec.json.Decoder[list[Any]]:
    """A decoder for the arguments of one table's events: a struct with that table's fields."""
    fields = []
    for column in TABLES[table]:
        kind: Any = Text if column.type == "str" else Number
        kind, default = (msgspec.Raw, NO_JSON) if column.is_json else (kind, None)
        for name, key in zip(argument_names(column), column.field.split("|"), strict=False):
            fields.append((name, kind, msgspec.field(name=key, default=default)))
    struct = msgspec.defstruct(f"Args_{table}", fields, gc=False)
    return msgspec.json.Decoder(list[struct])  # type: ignore[valid-type]


ARGUMENTS = {table: _arguments(table) for table in TABLES}
"""By table."""
JSON_KEYS = {
    key
    for columns in TABLES.values()
    for column in columns
    if column.is_json
    for key in column.field.split("|")
}
"""Arguments that may be any JSON value."""
