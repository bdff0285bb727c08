"""Ranges of forward, backward and steps: in a window's sidecar, and added to its trace."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any

KEY = "phase_ranges"
NAMES = ("forward", "backward")  # as the phases are named everywhere
LIMIT = 20_000  # of one window: half a megabyte of the sidecar, which is read up to a megabyte


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseRange:
    """One forward or backward pass of the training thread, or a step."""

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
            PhaseRange(name=NAMES[int(place)], start_wall_ns=since_ns + int(start),
                       duration_ns=max(int(duration), 0))
            for place, start, duration in rows[:LIMIT]
        ]  # fmt: skip
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return []


HEAD_BYTES = 4 << 20  # devices and metadata stand before the events
CHUNK_BYTES = 1 << 20
ARGUMENT = "haiprof"  # key among the arguments of an added range
PHASES = frozenset(json.dumps(name).encode() for name in NAMES)
"""Names of forward and backward ranges, as they are written."""
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_BASE_KEY = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')


def events_start(head: bytes) -> int | None:
    """Where the events begin in the beginning of a trace; None where that is not in it."""
    found = _EVENTS_KEY.search(head)
    return None if found is None else found.end()


def _texts(ranges: Iterable[PhaseRange], *, base_ns: int, pid: int, tid: int) -> Iterator[bytes]:
    """Each as a complete event of category user_annotation, with a comma behind it."""
    for each in ranges:
        kind = "phase" if each.name in NAMES else "step"
        about = f"a {kind} as haiprof recorded it beside the trace"
        times = (each.start_wall_ns - base_ns, each.duration_ns)
        ts, dur = (f"{ns // 1000}.{ns % 1000:03d}" for ns in times)
        yield (
            f'\n  {{"ph": "X", "cat": "user_annotation", "name": {json.dumps(each.name)}, '
            f'"pid": {pid}, "tid": {tid}, "ts": {ts}, "dur": {dur}, '
            f'"args": {json.dumps({ARGUMENT: about})}}},'
        ).encode()


def add_phases(
    source: IO[bytes], ranges: Iterable[PhaseRange], *, pid: int, tid: int
) -> Iterator[bytes]:
    """The text of a trace with some ranges before its first event.

    A text that is not in Kineto's form comes as it is.
    """
    head = source.read(HEAD_BYTES)
    place = events_start(head)
    if place is not None and head[place:].lstrip()[:1] == b"{":
        base = _BASE_KEY.search(head, 0, place)
        base_ns = int(base[1]) if base else 0
        yield head[:place]
        yield b"".join(_texts(ranges, base_ns=base_ns, pid=pid, tid=tid))
        head = head[place:]
    yield head
    yield from iter(lambda: source.read(CHUNK_BYTES), b"")


def is_phase(event: Mapping[str, Any]) -> bool:
    """Whether an event, a mapping of raw JSON texts, is a forward or backward range of ours."""
    return (
        bytes(event.get("name", b"")) in PHASES
        and f'"{ARGUMENT}"'.encode() in bytes(event.get("args", b""))
    )  # fmt: skip
