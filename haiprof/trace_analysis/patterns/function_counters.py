"""Hardware samples joined to functions: what a counter was while a function ran."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats, Ints
from haiprof.base.intervals import Intervals, covered_lengths, union
from haiprof.trace_analysis.collectives import clock_base_ns
from haiprof.trace_analysis.patterns.priority import pattern_window
from haiprof.trace_analysis.patterns.worker import function_events
from haiprof.trace_analysis.temporal import Steps
from haiprof.trace_format.kineto.rank_trace import Trace

MAJORITY_RATIO = 0.5
"""A sample is a function's where it ran for at least this part of what the sample is of: below it
the sample says more about something else. Own choice."""

_SERIES = ("source", "entity")
COUNTERS_SCHEMA: dict[str, type[pl.DataType]] = {
    "kind": pl.String,
    "type": pl.String,
    "name": pl.String,
    "source": pl.String,
    "entity": pl.String,
    "metric": pl.String,
    "unit": pl.String,
    "mean": pl.Float64,
    "std": pl.Float64,
    "min": pl.Float64,
    "max": pl.Float64,
    "sample_count": pl.Int64,
    "interval_ns": pl.Int64,
}


def function_counters(
    trace: Trace, samples: pl.DataFrame, *, steps: Steps = None, geometry: bool = False
) -> pl.DataFrame:
    """What the counters of a rank's GPU and host were while its functions ran.

    Source: PerfTracker (seed 001), which joins samples of 100 us to functions.
    """
    window = pattern_window(trace, steps)
    base = clock_base_ns(trace)
    inside = pl.col("time_ns").is_between(window.start + base, window.end + base)
    known = samples.filter(inside).drop_nulls("value").with_columns(pl.col("time_ns") - base)
    rows: list[pl.DataFrame] = [pl.DataFrame(schema=COUNTERS_SCHEMA)]
    if not known.is_empty():
        events, _ = function_events(trace, window, geometry=geometry)
        for kind, frame in events.items():
            rows += _of_kind(kind, frame, known)
    return pl.concat(rows)


def _of_kind(kind: str, events: pl.DataFrame, samples: pl.DataFrame) -> Iterator[pl.DataFrame]:
    functions: list[tuple[str | None, str | None, Intervals]] = [(None, None, _union(events))]
    texts = events.with_columns(pl.col("type", "name").cast(pl.String))
    for (type_, name), own in texts.group_by("type", "name", maintain_order=True):
        functions.append((str(type_), str(name), _union(own)))
    for series in samples.partition_by(_SERIES):
        times = np.unique(series["time_ns"].to_numpy())
        if len(times) < 2 or events.is_empty():
            continue
        for type_, name, spans in functions:
            ran = covered_lengths(spans, times[:-1], times[1:])
            if not (ran >= MAJORITY_RATIO * np.diff(times)).any():
                continue
            found = _statistics(series, times, ran)
            yield found.select(
                pl.lit(kind).alias("kind"), pl.lit(type_, pl.String).alias("type"),
                pl.lit(name, pl.String).alias("name"), *list(COUNTERS_SCHEMA)[3:],
            )  # fmt: skip


def _union(events: pl.DataFrame) -> Intervals:
    starts = events["ts_ns"].to_numpy()
    return union(starts, starts + events["dur_ns"].to_numpy())


def _statistics(series: pl.DataFrame, times: Ints, ran: Ints) -> pl.DataFrame:
    intervals = np.diff(times)
    weights: Floats = np.where(ran >= MAJORITY_RATIO * intervals, ran, 0).astype(np.float64)
    known = pl.DataFrame({"time_ns": times[1:], "weight": weights})
    value, weight = pl.col("value"), pl.col("weight")
    mean = (value * weight).sum() / weight.sum()
    square = (value * value * weight).sum() / weight.sum() - mean * mean
    rows = series.join(known.filter(weight > 0), on="time_ns")
    return rows.group_by(*_SERIES, "metric", "unit", maintain_order=True).agg(
        mean=mean,
        std=square.clip(0).sqrt(),
        min=value.min(),
        max=value.max(),
        sample_count=pl.len().cast(pl.Int64),
        interval_ns=pl.lit(int(np.median(intervals)), pl.Int64),
    )
