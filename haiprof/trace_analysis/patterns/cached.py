"""Patterns of traces in the user's cache: a second verdict on a run computes none of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.trace_analysis.patterns.evidence import Evidence, Operators
from haiprof.trace_analysis.patterns.worker import WorkerPattern
from haiprof.trace_analysis.report_cache import (
    UNFIT,
    Answer,
    CacheEntry,
    cache_entry,
    read_answers,
    store_answers,
)

_FRAMES = ("functions", "totals", "collectives")
_SIGNS = ("short", "waits", "pageable", "matrix")
_NUMBERS = "numbers"


def cached_patterns(
    paths: Sequence[Path],
    options: Mapping[str, Any],
    compute: Callable[[Sequence[Path]], Sequence[WorkerPattern]],
) -> list[WorkerPattern]:
    """The pattern of each trace, computed where it is not cached."""
    entries = {path: cache_entry(path, "patterns", options) for path in paths}
    patterns: dict[Path, WorkerPattern] = {}
    for path, entry in entries.items():
        pattern = None if entry is None else _read(entry)
        if pattern is not None:
            patterns[path] = pattern
    left = [path for path in paths if path not in patterns]
    for path, pattern in zip(left, compute(left) if left else (), strict=True):
        patterns[path] = pattern
        entry = entries[path]
        if entry is not None:
            store_answers(entry, as_answers(pattern))
    return [patterns[path] for path in paths]


def as_answers(pattern: WorkerPattern) -> dict[str, Answer]:
    """A pattern as frames by name, the last of them with all single numbers as JSON."""
    signs = pattern.signs
    assert signs is not None  # of a trace; `worker_pattern` collects them
    frames: dict[str, Answer] = {name: getattr(pattern, name) for name in _FRAMES}
    frames |= {name: getattr(signs, name) for name in _SIGNS}
    names = [name for name in Evidence.__dataclass_fields__ if name not in (*_SIGNS, "operators")]
    numbers = {name: getattr(signs, name) for name in names}
    content = {**numbers, "operators": asdict(signs.operators)}
    text = json.dumps(content, default=np.generic.item)  # numpy's integers
    return {**frames, _NUMBERS: pl.DataFrame({_NUMBERS: [text]})}


def from_answers(answers: Mapping[str, Answer]) -> WorkerPattern:
    """The pattern that `as_answers` was given."""
    frames = {name: _frame(answers[name]) for name in (*_FRAMES, *_SIGNS, _NUMBERS)}
    numbers: dict[str, Any] = json.loads(frames[_NUMBERS].item())
    capability = numbers.pop("compute_capability")
    numbers |= {name: frames[name] for name in _SIGNS}
    numbers["operators"] = Operators(**numbers["operators"])
    numbers["compute_capability"] = None if capability is None else tuple(capability)
    signs = Evidence(**numbers)
    return WorkerPattern(**{name: frames[name] for name in _FRAMES}, signs=signs)


def _read(entry: CacheEntry) -> WorkerPattern | None:
    answers = read_answers(entry)
    try:
        return None if answers is None else from_answers(answers)
    except UNFIT:
        return None


def _frame(answer: Answer) -> pl.DataFrame:
    if not isinstance(answer, pl.DataFrame):
        raise TypeError("no frame")
    return answer
