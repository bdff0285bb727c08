"""The split of the usual step by phase: parts that add up, the same as in the verdict."""

from __future__ import annotations

import polars as pl

from haiprof.diagnosis.rule_inputs import judged_steps, usual_split


def settled(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of one attempt of one rank that count, as in the verdict: warm and not traced."""
    return judged_steps(steps.sort("step"))


def phase_split(steps: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """Time per phase of the usual step (`usual_split`), of the settled steps.

    Args:
        steps: `Analyzer.steps()` of one attempt of one rank.
        clock: `host` or `device`.

    Returns:
        Time in ns by phase; None for a phase without a value on that clock.
    """
    return usual_split(settled(steps), clock=clock)
