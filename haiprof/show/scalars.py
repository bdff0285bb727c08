"""Scalars of a growing run for TensorBoard: which points are new since the last look."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from haiprof.show.figures.style import PHASES

MAX_STEPS_PER_S = 50

# (source, metric) -> (scalar, base units per shown unit)
COUNTER_SCALARS = {
    ("process", "cpu_cores"): ("cpu_cores", 1.0),
    ("process", "memory_rss_bytes"): ("rss_gib", float(BYTES_PER_GIB)),
    ("gpu", "utilization_ratio"): ("gpu_utilization", 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Scalars of one rank at one time."""

    rank: int
    wall_ns: int
    """Unix time: a step's start, or when a counter was sampled."""
    step: int
    """Steps of the rank so far, through restarts."""
    values: Mapping[str, float]
    """Value by scalar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the points of each rank have been taken, so that none is taken twice."""

    step_count: Mapping[int, int] = field(default_factory=dict)
    """Steps looked at, by rank."""
    drawn_ns: Mapping[int, int] = field(default_factory=dict)
    """Start of the last step taken, by rank."""
    sample_ns: Mapping[tuple[int, str], int] = field(default_factory=dict)
    """Time of the last sample taken, by rank and scalar."""


def new_points(
    steps: pl.DataFrame, counters: pl.DataFrame, progress: Progress, *, complete: bool
) -> tuple[list[Point], Progress]:
    """Points that are new since the last look, in order of time.

    Steps closer than 1/50 s to the one taken before are left out: TensorBoard shows a thousand
    points of a series, and a job of 2000 steps per second would write megabytes per minute.
    """
    points: list[Point] = []
    step_count, drawn_ns = dict(progress.step_count), dict(progress.drawn_ns)
    sample_ns = dict(progress.sample_ns)
    by_rank = {rank: frame for (rank,), frame in steps.partition_by("rank", as_dict=True).items()}
    for rank, frame in sorted(by_rank.items()):
        own = frame.sort("attempt", "step")
        end = own.height if complete else own.height - 1
        first = step_count.get(rank, 0)
        fresh = own.with_row_index("place").slice(first, max(0, end - first))
        kept = _apart(fresh["start_ns"].to_list(), drawn_ns.get(rank))
        taken = [_step_point(row) for row in fresh[kept].iter_rows(named=True)]
        points += taken
        step_count[rank] = max(first, end)
        if taken:
            drawn_ns[rank] = taken[-1].wall_ns
    for (rank, scalar), frame in _samples(counters):
        starts = by_rank.get(rank, steps.clear())["start_ns"].sort().to_numpy()
        after_ns = sample_ns.get((rank, scalar), 0)
        taken = list(_sample_points(frame, starts, rank, scalar=scalar, after_ns=after_ns))
        points += taken
        if taken:
            sample_ns[rank, scalar] = taken[-1].wall_ns
    points.sort(key=lambda point: point.wall_ns)
    return points, Progress(step_count=step_count, drawn_ns=drawn_ns, sample_ns=sample_ns)


def _apart(starts_ns: Sequence[int], drawn_ns: int | None) -> list[int]:
    """Places of the steps that begin long enough after the one taken before them."""
    least_ns = NS_PER_S // MAX_STEPS_PER_S
    kept = []
    for place, start_ns in enumerate(starts_ns):
        if drawn_ns is None or not 0 <= start_ns - drawn_ns < least_ns:
            kept.append(place)
            drawn_ns = start_ns
    return kept


def _step_point(row: Mapping[str, Any]) -> Point:
    times = {"step_ms": row["step_ns"]}
    times |= {f"{phase}_ms": row[f"{phase}_host_ns"] for phase in PHASES}
    return Point(
        rank=row["rank"],
        wall_ns=row["start_ns"],
        step=row["place"],
        values={name: ns / NS_PER_MS for name, ns in times.items() if ns is not None},
    )


def _samples(counters: pl.DataFrame) -> Iterator[tuple[tuple[int, str], pl.DataFrame]]:
    """Counters that become scalars, by rank and scalar, in shown units."""
    for (source, metric), (scalar, scale) in COUNTER_SCALARS.items():
        mine = counters.filter(
            (pl.col("source") == source)
            & (pl.col("metric") == metric)
            & pl.col("rank").is_not_null()
            & pl.col("value").is_finite()
        )
        scaled = mine.sort("time_ns").with_columns(value=pl.col("value") / scale)
        for rank in sorted(scaled["rank"].unique()):
            yield (rank, scalar), scaled.filter(pl.col("rank") == rank)


def _sample_points(
    samples: pl.DataFrame,
    starts_ns: npt.NDArray[np.int64],
    rank: int,
    *,
    scalar: str,
    after_ns: int,
) -> Iterator[Point]:
    fresh = samples.filter(pl.col("time_ns") > after_ns)
    for time_ns, value in fresh.select("time_ns", "value").iter_rows():
        step = max(0, int(np.searchsorted(starts_ns, time_ns, side="right")) - 1)
        yield Point(rank=rank, wall_ns=time_ns, step=step, values={scalar: value})
