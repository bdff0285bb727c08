"""The split of a middle step by phase: parts that add up, the same as in the verdict."""

from __future__ import annotations

import polars as pl

from haiprof.diagnosis.facts import judged_steps, middle_split
from haiprof.plots.style import PHASES


def settled(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of one attempt of one rank that count, as in the verdict: warm and not traced."""
    return judged_steps(steps.sort("step"))


def phase_split(steps: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """Mean time per phase over the middle half of the settled steps, ordered by their length.

    Medians of phases do not add up to the median step; means over the steps around the median do,
    and a single slow step does not move them.

    Args:
        steps: `Analyzer.steps()` of one attempt of one rank.
        clock: `host` or `device`.

    Returns:
        Time in ns by phase; None for a phase without a value on that clock.
    """
    chosen = settled(steps)
    if clock == "host":
        return middle_split(chosen)
    renamed = {f"{phase}_{clock}_ns": f"{phase}_host_ns" for phase in PHASES}
    return middle_split(chosen.select("step_ns", *renamed).rename(renamed))
