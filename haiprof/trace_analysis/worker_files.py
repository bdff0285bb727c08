"""The rank of each file of a window, from the first kilobytes of the file alone."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.run_format.raw_traces import parse_stem
from haiprof.trace_format.file_ranks import rank_of
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.run_windows import one_window


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank's trace of one window."""

    path: Path
    rank: int
    """As the file says; else the lowest number that no file of the window says."""
    host: str | None
    world_size: int | None
    is_packed: bool
    """Whether the file is gzip, by its content."""


def files_by_window(source: str | Path) -> list[list[Worker]]:
    """The traces of a file, a folder or a run, by window."""
    files = trace_files(source)
    found: list[list[Worker]] = []
    error = TraceFormatError(f"{source}: no trace in it")
    for number in itertools.count():
        try:
            members = one_window(files, number)
        except MissingDataError:
            break
        heads = [_head(path) for path in members]
        readable = [head for head in heads if isinstance(head, _Head)]
        error = next((head for head in heads if isinstance(head, TraceFormatError)), error)
        if readable:
            found.append(_workers(readable))
    if not found:
        raise error
    return found


@dataclass(frozen=True, slots=True)
class _Head:
    path: Path
    rank: int | None
    host: str | None
    metadata: Mapping[str, Any]


def _head(path: Path) -> _Head | TraceFormatError:
    """The metadata before a trace's events; or why it is not a trace."""
    text = TraceText(path)
    try:
        next(text.pieces(), None)
        rank = rank_of(path, text.metadata)
    except TraceFormatError as error:
        return error
    stem = parse_stem(path.name)
    return _Head(path, stem.rank if stem else rank, stem.host if stem else None, text.metadata)


def _workers(heads: Sequence[_Head]) -> list[Worker]:
    known = {head.rank for head in heads}
    free = (number for number in itertools.count() if number not in known)
    found = [
        Worker(
            path=head.path,
            rank=next(free) if head.rank is None else head.rank,
            host=head.host,
            world_size=_world_size(head.metadata),
            is_packed=_is_packed(head.path),
        )
        for head in heads
    ]
    return sorted(found, key=lambda one: (one.rank, one.path.name))


def _world_size(metadata: Mapping[str, Any]) -> int | None:
    for key in ("haiprof", "distributedInfo"):
        said = metadata.get(key)
        size = said.get("world_size") if isinstance(said, dict) else None
        if type(size) is int and size > 0:
            return size
    return None


def _is_packed(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"
