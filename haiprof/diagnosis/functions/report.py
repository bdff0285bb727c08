"""One report: its tables, what they mean, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from haiprof.diagnosis.thresholds import FAR_MIN_RANKS

RANKS, FUNCTIONS, ABNORMAL = "ranks", "functions", "abnormal"


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionReport:
    """What is known of one kind of function."""

    kind: str
    """One of `priority.PRIORITY`."""
    title: str
    tables: Mapping[str, pl.DataFrame]
    """By name: `abnormal` first where there is something, then `functions`, and `ranks`."""
    facts: Mapping[str, Any]
    """Single numbers, for scripts."""
    meaning: tuple[str, ...]
    """What it says, in words, the abnormal first."""
    missing: tuple[str, ...]
    """What could not be said, and what would record it."""

    def as_json(self) -> dict[str, Any]:
        """Plain data with stable keys; a table is a list of rows."""
        return {
            "kind": self.kind,
            **self.facts,
            **{name: table.to_dicts() for name, table in self.tables.items()},
            "meaning": list(self.meaning),
            "missing": list(self.missing),
        }


def too_few_ranks(count: int) -> tuple[str, ...]:
    """Why no rank is called abnormal; nothing where there are enough."""
    if count >= FAR_MIN_RANKS:
        return ()
    ranks = "one rank" if count == 1 else f"{count} ranks"
    return (
        f"{ranks}: which rank differs from the others can be said from {FAR_MIN_RANKS} ranks on",
    )


def over_ranks(name: str, ranks: int) -> pl.Expr:
    """Mean of a share over all ranks that have a trace; one without the function counts as 0."""
    return pl.col(name).sum() / max(ranks, 1)


def spread_of(values: pl.Series) -> dict[str, float | None]:
    """`min`, `median`, `max`; None where nothing is known."""
    known = values.drop_nulls()
    found = (known.min(), known.median(), known.max())
    keys = ("min", "median", "max")
    return {
        key: float(value) if isinstance(value, (int, float)) else None
        for key, value in zip(keys, found, strict=True)
    }
