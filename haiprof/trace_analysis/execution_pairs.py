"""Execution traces paired with timelines: by name of the window, rank, or process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.run_format.layout import (
    ET_RAW_SUFFIX,
    ET_SUFFIX,
    PLAIN_TRACE_SUFFIX,
    RAW_SUFFIX,
    TRACE_SUFFIX,
)
from haiprof.trace_format.execution import ExecutionTrace, load_execution_trace
from haiprof.trace_format.find import TRACE_ENDINGS, rank_in_name, window_files
from haiprof.trace_format.kineto.rank_trace import Trace

_LAST_NUMBER = re.compile(r"(\d{1,6})(?=\D*$)")
_ENDINGS = (ET_SUFFIX, ET_RAW_SUFFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One rank's timeline and its execution trace."""

    rank: int
    trace: Trace
    execution: ExecutionTrace


def pairs(
    source: Path,
    execution: Path | None = None,
    *,
    window: int | None = None,
    rank: int | None = None,
) -> tuple[list[Pair], list[str]]:
    """Timelines with their execution traces, by rank, and what has no partner, for people."""
    traces = [Trace(path) for path in window_files(source, window)]
    found = execution_files(execution or source)
    if not found:
        raise MissingDataError(
            f"{execution or source}: no execution trace in it",
            hint="record one with haiprof --execution-trace, or name it: --et FILE_OR_DIR",
        )
    alone_both = len(traces) == 1 and len(found) == 1
    matched = {0: found[0]} if alone_both else _match(traces, found)
    ranks = {at: at if (said := traces[at].rank) is None else said for at in matched}
    made = [
        Pair(rank=ranks[at], trace=traces[at], execution=load_execution_trace(path))
        for at, path in matched.items()
        if rank in (None, ranks[at])
    ]
    alone = [f"{trace.path}: no execution trace of its rank" for at, trace in enumerate(traces)
             if at not in matched]  # fmt: skip
    if not made:
        raise MissingDataError(
            f"{source}: no execution trace of rank {rank}; "
            f"there are those of {', '.join(map(str, sorted(ranks.values())))}"
        )
    return sorted(made, key=lambda pair: pair.rank), alone


def execution_files(source: Path) -> list[Path]:
    """The execution traces that a path means: of a folder those that end so, else all JSON."""
    if source.is_file() and not source.name.endswith(_ENDINGS):
        scripts = [source.with_name(_stem(source.name) + ending) for ending in _ENDINGS]
        there = [path for path in scripts if path.is_file()]
        return there[:1] or ([source] if _has_nodes(source) else [])
    if source.is_file():
        return [source]
    folder = source / "traces" if (source / "traces").is_dir() else source
    if not folder.is_dir():
        raise TraceFormatError(f"{source}: no such file or folder")
    paths = sorted(Path(entry.path) for entry in os.scandir(folder) if entry.is_file())
    named = [path for path in paths if path.name.endswith(_ENDINGS)]
    return named or [path for path in paths
                     if path.name.endswith(TRACE_ENDINGS) and _has_nodes(path)]  # fmt: skip


def _has_nodes(path: Path) -> bool:
    """Whether a file is an execution trace, by its content."""
    try:
        load_execution_trace(path)
    except TraceFormatError:
        return False
    return True


def _stem(name: str) -> str:
    """Name of a window's files without what says which of them it is."""
    for ending in (*_ENDINGS, TRACE_SUFFIX, PLAIN_TRACE_SUFFIX, RAW_SUFFIX, *TRACE_ENDINGS):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return name


_Sign = tuple[Callable[[Trace], object], Callable[[Path], object]]


def _match(traces: Sequence[Trace], found: Sequence[Path]) -> dict[int, Path]:
    """Execution traces by index of their timeline: matched by the first key that is unique."""
    signs: tuple[_Sign, ...] = (
        (lambda trace: _stem(trace.path.name), lambda path: _stem(path.name)),
        (lambda trace: trace.rank, lambda path: rank_in_name(path.name)),
        (lambda trace: next(iter(trace.ops["pid"].drop_nulls()), None),
         lambda path: load_execution_trace(path).pid),
        (lambda trace: trace.rank, lambda path: _last_number(path.name)),
    )  # fmt: skip
    for of_trace, of_path in signs:
        places = _unique((of_trace(trace), at) for at, trace in enumerate(traces))
        paths = _unique((of_path(path), path) for path in found)
        both = sorted(places.keys() & paths.keys(), key=str)
        if both:
            return {places[sign]: paths[sign] for sign in both}
    raise TraceFormatError(
        f"{found[0]} and {len(found) - 1} more: nothing says whose they are",
        hint="name them with their rank, such as rank3.et.json.gz, or link one pair at a time",
    )


def _unique(signed: Iterable[tuple[object, int | Path]]) -> dict[object, Any]:
    """Items by key; empty where a key is missing or ambiguous."""
    found: dict[object, Any] = {}
    for sign, value in signed:
        if sign is None or sign in found:
            return {}
        found[sign] = value
    return found


def _last_number(name: str) -> int | None:
    number = _LAST_NUMBER.search(_stem(name))
    return int(number[1]) if number else None
