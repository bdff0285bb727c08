"""The split of a middle step by phase: parts that add up to one number."""

from __future__ import annotations

import polars as pl

from haiprof.plots.style import PHASES


def phase_split(steps: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """Mean time per phase over the middle half of the steps, ordered by their length.

    Medians of phases do not add up to the median step; means over the steps around the median do,
    and a single slow step does not move them.

    Args:
        steps: `Analyzer.steps()` of any ranks.
        clock: `host` or `device`.

    Returns:
        Time in ns by phase; None for a phase without a value on that clock.
    """
    low, high = steps["step_ns"].quantile(0.25, "lower"), steps["step_ns"].quantile(0.75, "higher")
    middle = steps.filter(pl.col("step_ns").is_between(pl.lit(low), pl.lit(high)))
    means = {phase: middle[f"{phase}_{clock}_ns"].mean() for phase in PHASES}
    return {p: float(v) if isinstance(v, (int, float)) else None for p, v in means.items()}
