"""Events written as two halves, a begin (B) and an end (E), put together as one with a duration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from haiprof.trace_format.kineto.events import ExactHead

HALVES = frozenset("BE")
_OPEN_LIMIT = 1 << 16
"""Begins of one thread that wait for their end: nobody nests deeper."""


@dataclass(frozen=True, slots=True)
class Half:
    """A begin or an end."""

    event: int
    """Its place in the file."""
    category: int
    """Place in `events.CATEGORIES`, or beyond them."""
    head: Any


class OpenHalves:
    """Begins whose end has not come yet, by process and thread."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, Any], list[Half]] = {}

    def join(self, halves: list[Half]) -> tuple[list[Half], list[Half]]:
        """Takes halves in the file's order."""
        whole, alone = [], []
        for half in halves:
            stack = self._open.setdefault((half.head.pid, half.head.tid), [])
            if half.head.ph == "B" and len(stack) < _OPEN_LIMIT:
                stack.append(half)
            elif half.head.ph == "E" and stack:
                begin = stack.pop()
                whole.append(Half(begin.event, begin.category, _join(begin.head, half.head)))
            else:
                alone.append(half)
        return whole, alone

    def take_unfinished(self) -> Iterator[Half]:
        """Begins that had no end in the file."""
        for stack in self._open.values():
            yield from stack


def _join(begin: Any, end: Any) -> ExactHead:  # noqa: ANN401 - a Head or an ExactHead
    """One event with a duration; it has no usable time where one of the two has none."""
    start, stop = _decimal(begin.ts), _decimal(end.ts)
    known = start is not None and stop is not None
    return ExactHead(
        ph="X",
        cat=begin.cat,
        name="" if begin.name is None else begin.name,
        pid=begin.pid,
        tid=begin.tid,
        ts=msgspec.Raw(f"{start:f}".encode() if known else b"null"),
        dur=msgspec.Raw(f"{stop - start:f}".encode() if known else b"null"),  # type: ignore[operator]
        id=begin.id,
        args=begin.args,
    )


def _decimal(value: object) -> Decimal | None:
    text = (
        bytes(value).decode("ascii", "replace") if isinstance(value, msgspec.Raw) else repr(value)
    )
    try:
        found = Decimal(text.strip("\"' "))
    except (InvalidOperation, ValueError):
        return None
    return found if found.is_finite() and abs(found.adjusted()) < 40 else None
