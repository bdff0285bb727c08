"""Processes of all ranks in one timeline: their numbers, their names, their order."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

Fields = dict[str, msgspec.Raw]
"""One event; values as they are written."""

STRIDE = 1000
"""Rank 3's processes are 4000 to 4999; those below 1000 belong to no rank (nodes' counters)."""
PHASES_PLACE, COUNTERS_PLACE, _FIRST_PLACE = 0, 1, 2
_OVERFLOW = 2_000_000_000  # a rank with more processes than fit its thousand goes on here
_CPU_SORT, _DEVICE_SORT, _OTHER_SORT = 10, 100, 900

_NAME, _LABELS, _SORT = "process_name", "process_labels", "process_sort_index"
_HELD = {json.dumps(name).encode(): name for name in (_NAME, _LABELS, _SORT)}
_KEY_OF = {_NAME: "name", _LABELS: "labels", _SORT: "sort_index"}
_DEVICE = re.compile(r"(?!CPU)[A-Z]+ (\d{1,3})")
_ARGS: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])


@dataclass(slots=True)
class _Process:
    """One process of one rank."""

    pid: int
    written: str
    """Its pid in the rank's own file."""
    labels: dict[str, str] = field(default_factory=dict)
    """Its name and label there."""


class Lanes:
    """The processes of one rank, numbered in order of appearance."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pids: dict[bytes, bytes] = {}
        """New one by the old one's JSON text; several texts may mean one process."""
        self._processes: dict[str, _Process] = {}
        self._held: list[tuple[str, _Process, Fields]] = []

    def pid(self, written: bytes) -> bytes:
        """The process's number in the merged trace."""
        found = self._pids.get(written)
        if found is None:
            found = self._pids[written] = b"%d" % self._process(written).pid
        return found

    def defer(self, event: Fields) -> bool:
        """Defers an event that names, labels or sorts a process; False for any other."""
        kind = _HELD.get(bytes(event.get("name", b"")))
        if kind is None:
            return False
        process = self._process(bytes(event.get("pid", b"")))
        value = _args(event).get(_KEY_OF[kind])
        if isinstance(value, str):
            process.labels[kind] = value
        self._held.append((kind, process, event))
        return True

    def deferred_events(self) -> Iterator[bytes]:
        """The deferred events, with the rank in names and sort indices."""
        for kind, process, event in self._held:
            event["pid"] = msgspec.Raw(b"%d" % process.pid)
            if kind != _LABELS:
                new = self._name(process) if kind == _NAME else self._sort_index(process)
                args = {**_args(event), _KEY_OF[kind]: new}
                event["args"] = msgspec.Raw(msgspec.json.encode(args))
            yield msgspec.json.encode(event)

    def added_events(self) -> Iterator[bytes]:
        """Names and sort indices for processes without any in the rank's file."""
        have = {(kind, process.pid) for kind, process, _ in self._held}
        for process in self._processes.values():
            named, placed = ((kind, process.pid) in have for kind in (_NAME, _SORT))
            yield from process_events(
                process.pid,
                None if named else self._name(process),
                None if placed else self._sort_index(process),
            )

    def _process(self, written: bytes) -> _Process:
        name = _pid_text(written)
        found = self._processes.get(name)
        if found is None:
            place = _FIRST_PLACE + len(self._processes)
            # Far above every thousand, and a rank's own: no two ranks meet there.
            pid = rank_pid(self._rank, place) if place < STRIDE else self._overflow_pid(place)
            found = self._processes[name] = _Process(pid, name)
        return found

    def _overflow_pid(self, place: int) -> int:
        return _OVERFLOW + self._rank * 10**7 + place

    def _name(self, process: _Process) -> str:
        label, name = process.labels.get(_LABELS, ""), process.labels.get(_NAME, "")
        if _DEVICE.fullmatch(label):
            shown = label
        elif label and process.written.isdigit():
            shown = f"{label} ({name} {process.written})" if name else f"{label} {process.written}"
        elif process.written.isdigit():
            shown = f"{name or 'process'} {process.written}"
        else:
            shown = label or process.written or "no process"
        return f"rank {self._rank}: {shown}"

    def _sort_index(self, process: _Process) -> int:
        label = process.labels.get(_LABELS, "")
        device = _DEVICE.fullmatch(label)
        place = _DEVICE_SORT + int(device[1]) if device else _OTHER_SORT
        return sort_index(self._rank, _CPU_SORT if label == "CPU" else min(place, STRIDE - 1))


def rank_pid(rank: int, place: int) -> int:
    """The number of a rank's process in the merged trace."""
    return (rank + 1) * STRIDE + place


def sort_index(rank: int, place: int) -> int:
    """The sort index of a rank's process: by rank, then by its own order."""
    return rank * STRIDE + place


def process_events(pid: int, name: str | None, index: int | None) -> Iterator[bytes]:
    """Events that name a process and set its sort index."""
    if name is not None:
        yield _process_event(_NAME, pid, "name", name)
    if index is not None:
        yield _process_event(_SORT, pid, "sort_index", index)


def thread_event(pid: int, tid: int, name: str) -> bytes:
    """An event that names a thread."""
    event = {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    return msgspec.json.encode(event)


def _process_event(kind: str, pid: int, key: str, value: str | int) -> bytes:
    return msgspec.json.encode(
        {"ph": "M", "name": kind, "pid": pid, "tid": 0, "args": {key: value}}
    )


def _args(event: Fields) -> dict[str, Any]:
    try:
        return _ARGS.decode(event.get("args", msgspec.Raw(b"{}")))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}


def _pid_text(written: bytes) -> str:
    """A pid as text: to a viewer 7 and "7" are one process."""
    try:
        value = json.loads(written) if written else ""
    except (ValueError, RecursionError):
        return written.decode("utf-8", "replace")
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)
