"""What --keep-slow watched for slow steps, of each rank, and what that took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from haiprof.base.errors import RunFormatError, RunNotFoundError
from haiprof.run_analysis.run_files import integer, text
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest
from haiprof.run_format.reader import read_lines

WATCHED_SCHEMA = {
    "rank": pl.Int64,
    "attempt": pl.Int64,
    "step_count": pl.Int64,
    "watched_count": pl.Int64,
    "slow_count": pl.Int64,
    "kept_count": pl.Int64,
    "kept_limit": pl.Int64,
    "usual_ns": pl.Int64,
    "cost_ratio": pl.Float64,
    "budget_ratio": pl.Float64,
    "cost_ns": pl.Int64,
    "memory_bytes": pl.Int64,
    "kept_bytes": pl.Int64,
    "refused": pl.String,
}
_FIELDS = {
    "step_count": "steps", "watched_count": "watched", "slow_count": "slow_seen",
    "kept_count": "slow_kept",
}  # fmt: skip
_INTEGERS = ("kept_limit", "usual_ns", "cost_ns", "memory_bytes", "kept_bytes")


def watched_frame(run: RunPaths) -> pl.DataFrame:
    """What each rank said last of its rolling windows; without rows where there were none."""
    rows = list(_rows(run)) if _is_asked(run) else []
    return pl.DataFrame(rows, schema=WATCHED_SCHEMA).sort("rank", "attempt")


def _is_asked(run: RunPaths) -> bool:
    try:
        return bool(read_manifest(run).options.get("keep_slow"))
    except (RunFormatError, RunNotFoundError):
        return True  # who knows


def _rows(run: RunPaths) -> Iterator[dict[str, object]]:
    for rank, attempt, paths in run.rank_folders():
        with contextlib.suppress(RunFormatError):  # said where the rank is read
            lines = [one for one in read_lines(paths.events)[0] if one.get("type") == "keep_slow"]
            if lines:
                yield _row(rank, attempt, lines[-1])


def _row(rank: int, attempt: int, line: Mapping[str, Any]) -> dict[str, object]:
    return {
        "rank": rank,
        "attempt": attempt,
        **{name: integer(line.get(field)) for name, field in _FIELDS.items()},
        **{name: integer(line.get(name)) for name in _INTEGERS},
        **{name: _ratio(line.get(name)) for name in ("cost_ratio", "budget_ratio")},
        "refused": text(line.get("refused")),
    }


def _ratio(value: object) -> float | None:
    return float(value) if type(value) in (int, float) and 0 <= value < 1e9 else None  # type: ignore[operator, arg-type]
