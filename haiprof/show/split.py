"""What every view counts: the steps that the verdict judges, their time, and their split."""

from __future__ import annotations

import polars as pl

from haiprof.diagnosis.rule_inputs import judged_steps, usual_split
from haiprof.run_analysis.training_time import (
    host_windows,
    select_training_samples,
    training_spans,
)
from haiprof.show.series import TimeRange, time_range


def settled_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of one attempt of one rank that count, as in the verdict: warm and not traced."""
    return judged_steps(steps.sort("step"))


def select_judged_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of all ranks and attempts that count: warm and not traced."""
    frames = steps.partition_by("rank", "attempt", maintain_order=True)
    return pl.concat([steps.clear(), *map(settled_steps, frames)])


def select_judged_samples(
    counters: pl.DataFrame, judged: pl.DataFrame, ranks: pl.DataFrame
) -> pl.DataFrame:
    """Samples of counters while the steps that count ran: not of start-up, nor of a process's end.

    All of them where there is none: a start-up of minutes must not dilute an average, but a short
    run must not lose all samples.
    """
    spans = training_spans(judged.partition_by("rank", "attempt", maintain_order=True))
    inside = select_training_samples(counters, host_windows(spans, ranks))
    return counters if inside.is_empty() else inside


def find_judged_time(judged: pl.DataFrame, whole: TimeRange | None) -> TimeRange | None:
    """From the begin of the first step that counts to the end of the last one."""
    return time_range(judged, pl.DataFrame(schema={"time_ns": pl.Int64})) or whole


def phase_split(steps: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """Time per phase of the usual step (`usual_split`), of the settled steps.

    None for a phase without a value on that clock.
    """
    return usual_split(settled_steps(steps), clock=clock)
