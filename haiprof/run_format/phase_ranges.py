"""Forward and backward passes of a trace window, as the window's sidecar holds them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

KEY = "phase_ranges"
NAMES = ("forward", "backward")
"""As the phases are named everywhere."""
LIMIT = 20_000
"""Ranges of one window: half a megabyte of the sidecar, which is read up to a megabyte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRange:
    """One forward or backward pass of the training thread."""

    name: str
    start_wall_ns: int
    duration_ns: int


def pack_ranges(ranges: Iterable[PhaseRange], *, since_ns: int) -> str:
    """The ranges as one text, which no indentation makes longer."""
    rows = [
        (NAMES.index(each.name), each.start_wall_ns - since_ns, each.duration_ns)
        for each, _ in zip(ranges, range(LIMIT), strict=False)
    ]
    return json.dumps(rows, separators=(",", ":"))


def parse_ranges(packed: object, *, since_ns: object) -> list[PhaseRange]:
    """The ranges of a sidecar; none where it has none, or something else in their place."""
    if not isinstance(packed, str) or type(since_ns) is not int:
        return []
    try:
        rows = json.loads(packed)
        return [
            PhaseRange(
                name=NAMES[int(place)],
                start_wall_ns=since_ns + int(start),
                duration_ns=max(int(duration), 0),
            )
            for place, start, duration in rows[:LIMIT]
        ]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return []
