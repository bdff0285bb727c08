"""One event of a Chrome trace as msgspec decodes it: only the fields that a table has."""

from __future__ import annotations

from typing import Any, Literal, Union

import msgspec

from haiprof.trace_format.kineto.tables import (
    LINKS,
    MEMORY,
    REDUNDANT_CATEGORIES,
    TABLE_OF_CATEGORY,
    TABLES,
    TraceColumn,
)

Number = int | float | str | None
Text = str | int | float | None
Decoder = msgspec.json.Decoder[list[Any]]

NO_JSON = msgspec.Raw(b"")
"""Where an event has no such argument."""
_NO_ARGS = msgspec.Raw(b"{}")
_NO_TIME = msgspec.Raw(b"null")
_ZERO = msgspec.Raw(b"0")

CATEGORIES = (*TABLE_OF_CATEGORY, *REDUNDANT_CATEGORIES)
"""The known categories; elsewhere a category is its index here."""
OTHER_CATEGORY = len(CATEGORIES)
"""The index of all others."""


PHASES = dict.fromkeys(TABLES, "X") | {MEMORY: "iI", LINKS: "stf"}
"""How events of a table are marked, as profilers write them: a letter each."""


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
    """The same with times as text, for timestamps that a float cannot hold to 1 ns."""

    ph: str | None = ""
    cat: Text = ""
    name: Text = ""
    pid: Number = None
    tid: Number = None
    ts: msgspec.Raw = _NO_TIME
    dur: msgspec.Raw = _NO_TIME
    id: Number = None
    args: msgspec.Raw = _NO_ARGS


HEADS: Decoder = msgspec.json.Decoder(list[Head])
EXACT_HEADS: Decoder = msgspec.json.Decoder(list[ExactHead])
TEXTS: Decoder = msgspec.json.Decoder(list[msgspec.Raw])
"""Events as they are written."""


def argument_names(column: TraceColumn) -> list[str]:
    """Fields of the arguments' struct that hold a column, by the spellings of its key."""
    keys = [] if column.field.startswith(".") or not column.field else column.field.split("|")
    return [f"{column.name}_{place}" for place, _ in enumerate(keys)]


def _arguments(table: str) -> type[msgspec.Struct]:
    """The arguments of one table's events."""
    fields = []
    for column in TABLES[table]:
        kind: Any = Text if column.type == "str" else Number
        kind, default = (msgspec.Raw, NO_JSON) if column.is_json else (kind, None)
        for name, key in zip(argument_names(column), column.field.split("|"), strict=False):
            fields.append((name, kind, msgspec.field(name=key, default=default)))
    return msgspec.defstruct(f"Args_{table}", fields, gc=False, frozen=True)


_ARGUMENTS = {table: _arguments(table) for table in TABLES}
ARGUMENTS: dict[str, Decoder] = {
    table: msgspec.json.Decoder(list[kind])  # type: ignore[valid-type]
    for table, kind in _ARGUMENTS.items()
}
"""By table."""


def _whole_event(category: str, *, exact: bool) -> type[msgspec.Struct]:
    """An event of one category with its arguments, exactly as profilers write it."""
    table = TABLE_OF_CATEGORY.get(category)
    fields: list[tuple[Any, ...]] = []
    if table is not None:
        time, zero = (msgspec.Raw, _ZERO) if exact else (Number, 0)
        phases: Any = Literal[tuple(PHASES[table])]
        arguments = _ARGUMENTS[table]
        fields = [("ph", phases), ("name", str, ""), ("ts", time), ("pid", Number, None),
                  ("tid", Number, None), ("args", arguments, arguments())]  # fmt: skip
        fields += [("dur", time, zero)] if table in (MEMORY, LINKS) else [("dur", time)]
        fields += [("id", Number, None)] if table == LINKS else []
    return msgspec.defstruct("Event", fields, tag=category, tag_field="cat", gc=False, kw_only=True)


_WHOLE = [_whole_event(category, exact=False) for category in CATEGORIES]
_EXACT_WHOLE = [_whole_event(category, exact=True) for category in CATEGORIES]
# Twice as fast as decoding heads and arguments separately. A single event of unusual form or of
# another category makes the decoder fail, and the whole piece is decoded as HEADS again.
WHOLE: Decoder = msgspec.json.Decoder(list[Union[tuple(_WHOLE)]])  # type: ignore[misc] # noqa: UP007
EXACT_WHOLE: Decoder = msgspec.json.Decoder(list[Union[tuple(_EXACT_WHOLE)]])  # type: ignore[misc] # noqa: UP007
CATEGORY_OF_TYPE = {
    kind: place % OTHER_CATEGORY for place, kind in enumerate(_WHOLE + _EXACT_WHOLE)
}
"""Of an event from `WHOLE` or `EXACT_WHOLE`."""

JSON_KEYS = {
    key
    for columns in TABLES.values()
    for column in columns
    if column.is_json
    for key in column.field.split("|")
}
"""Arguments that may be any JSON value."""
