"""The patterns of all ranks in one frame, cached, and hardware samples joined to functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, Intervals, covered_lengths, union
from haiprof.trace_analysis.arrivals import (
    arrival_lateness,
    collective_waits,
    collectives,
    who_is_late,
)
from haiprof.trace_analysis.collectives import clock_base_ns
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.function_patterns import RankFunctions, function_events, pattern_window
from haiprof.trace_analysis.kernel_names import COMMUNICATION, transfer_type
from haiprof.trace_analysis.matching import (
    clock_offsets,
    host_offsets,
    match_collectives,
    on_one_clock,
)
from haiprof.trace_analysis.report_cache import cached_answers
from haiprof.trace_format.kineto.rank_trace import Trace

_RATE, _SPREAD = "bandwidth_bytes_per_s", "bandwidth_std_bytes_per_s"
_KEYS = ("rank", "type", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """What every rank's functions did."""

    functions: pl.DataFrame
    """`rank`, `worker.FUNCTIONS_SCHEMA`, and of communication `wait_ns`, `transfer_ns` and
    `missing`, the reason why these and its bandwidth are null."""
    totals: pl.DataFrame
    """One row per rank: columns of `WorkerPattern.totals`."""
    lateness: pl.DataFrame
    """From `arrival_lateness`: who begins collectives later than the others."""
    who_is_late: str
    """The same in words, or why it is not known."""
    moved_clocks: tuple[int, ...]
    """Ranks whose clock was corrected although the trace names no host: a link that is slow in
    every collective would look the same."""

    left_out: tuple[str, ...] = ()
    """What files of the ranks' functions have left out, in words; empty from traces."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a trace."""
        return tuple(self.totals["rank"].to_list())


def gather_patterns(workers: Mapping[int, RankFunctions]) -> Patterns:
    """Puts the patterns of all ranks together.

    The functions of all ranks. A communication function's `bandwidth_bytes_per_s` is its bus
    bandwidth as nccl-tests defines it, over the transfer alone: from the arrival of the last
    rank to the rank's own end. Where the same collective is not found on all ranks of its
    group the transfer is not known, and `missing` says why.

    Source: nccl-tests doc/PERFORMANCE.md; `haiprof.trace_analysis.arrivals` for the transfer.
    """
    kernels = match_collectives(_with_rank({r: w.collectives for r, w in workers.items()}))
    totals = _with_rank({r: w.totals for r, w in workers.items()})
    hosts = totals.select("rank", "host")
    offsets = host_offsets(clock_offsets(kernels), hosts)
    waits = collective_waits(on_one_clock(kernels, offsets))
    lateness = arrival_lateness(waits, offsets)
    functions = _with_rank({r: w.functions for r, w in workers.items()})
    moved = functions.join(_throughput(waits), on=list(_KEYS), how="left", maintain_order="left")
    talks = pl.col("kind") == COMMUNICATION
    alone = pl.lit("no other rank's trace has the same collective")
    lacks = talks & pl.col("own_rate").is_null()
    return Patterns(
        functions=moved.with_columns(
            pl.when(talks).then("own_rate").otherwise(_RATE).alias(_RATE),
            pl.when(talks).then("own_spread").otherwise(_SPREAD).alias(_SPREAD),
            missing=pl.when(lacks).then(pl.coalesce("missing", alone)),
        ).drop("own_rate", "own_spread"),
        totals=totals,
        moved_clocks=()
        if not hosts["host"].null_count()
        else tuple(offsets.filter("corrected")["rank"].to_list()),
        lateness=lateness,
        who_is_late=who_is_late(lateness, waits),
    )


def _with_rank(frames: Mapping[int, pl.DataFrame]) -> pl.DataFrame:
    return pl.concat(
        frame.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())
        for rank, frame in frames.items()
    )


def _throughput(waits: pl.DataFrame) -> pl.DataFrame:
    """Per rank and function: `wait_ns`, `transfer_ns`, bus bandwidth and its deviation."""
    bus, whole = pl.col("bus_bandwidth_bytes_per_s"), pl.col("transfer_ns")
    work = collectives(waits).select("collective", work=bus * whole)
    pairs = waits.select("kind", "name").unique()
    types = pairs.with_columns(
        type=pl.Series([transfer_type(*row) for row in pairs.rows()], dtype=pl.String)
    )
    rows = waits.join(work, on="collective", how="left").join(types, on=["kind", "name"])
    time = pl.col("transfer_ns")
    timed = time.is_not_null() & pl.col("work").is_not_null() & (time > 0)
    rate = pl.col("work") / time
    weighted = rows.with_columns(
        rate=pl.when(timed).then(rate),
        weight=pl.when(timed).then(time),
        missing=pl.coalesce(
            "missing", pl.when(pl.col("work").is_null()).then(pl.lit("sizes were not recorded"))
        ),
    )
    weight, value = pl.col("weight"), pl.col("rate")
    mean = (value * weight).sum() / weight.sum()
    square = (value * value * weight).sum() / weight.sum() - mean * mean
    known = weight.sum() > 0
    return weighted.group_by(_KEYS).agg(
        wait_ns=_sum("wait_ns"),
        transfer_ns=_sum("transfer_ns"),
        own_rate=pl.when(known).then(mean),
        own_spread=pl.when(known).then(square.clip(0).sqrt()),
        missing=pl.col("missing").drop_nulls().first(),
    )


def _sum(name: str) -> pl.Expr:
    """The sum; null where nothing is known."""
    return pl.when(pl.col(name).count() > 0).then(pl.col(name).sum())


_FRAMES = ("functions", "totals", "collectives")


def cached_patterns(
    paths: Sequence[Path],
    options: Mapping[str, Any],
    compute: Callable[[Sequence[Path]], Sequence[RankFunctions]],
) -> list[RankFunctions]:
    """The pattern of each trace, computed where it is not cached."""
    found = cached_answers(
        paths, "patterns", options, _FRAMES,
        lambda left: [{name: getattr(each, name) for name in _FRAMES} for each in compute(left)],
    )  # fmt: skip
    return [RankFunctions(**each) for each in found]  # type: ignore[arg-type] # all are frames


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
            intervals = np.diff(times)
            weights: Floats = np.where(ran >= MAJORITY_RATIO * intervals, ran, 0).astype(np.float64)
            known = pl.DataFrame({"time_ns": times[1:], "weight": weights})
            value, weight = pl.col("value"), pl.col("weight")
            mean = (value * weight).sum() / weight.sum()
            square = (value * value * weight).sum() / weight.sum() - mean * mean
            rows = series.join(known.filter(weight > 0), on="time_ns")
            found = rows.group_by(*_SERIES, "metric", "unit", maintain_order=True).agg(
                mean=mean,
                std=square.clip(0).sqrt(),
                min=value.min(),
                max=value.max(),
                sample_count=pl.len().cast(pl.Int64),
                interval_ns=pl.lit(int(np.median(intervals)), pl.Int64),
            )
            yield found.select(
                pl.lit(kind).alias("kind"), pl.lit(type_, pl.String).alias("type"),
                pl.lit(name, pl.String).alias("name"), *list(COUNTERS_SCHEMA)[3:],
            )  # fmt: skip


def _union(events: pl.DataFrame) -> Intervals:
    starts = events["ts_ns"].to_numpy()
    return union(starts, starts + events["dur_ns"].to_numpy())
