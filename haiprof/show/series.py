"""A series over the run's time axis in equal buckets, empty without a sample; points, thinned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.intervals import Floats, Ints

BUCKET_COUNT = 120
# A bucket this many times the usual distance of two samples holds one even when samples jitter.
_BUCKET_PER_INTERVAL = 1.5
_LONE_SAMPLE_BUCKETS = 10
_FOLD_ABOVE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeRange:
    """Unix times in ns that a time axis spans."""

    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        """Its length, at least 1."""
        return max(1, self.end_ns - self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a time picture."""

    title: str  # What is shown, such as `step time`
    label: str  # The series' label, such as `rank 0`
    unit: str  # Base unit of the values
    mean: float | None  # Of all samples, not of buckets
    max: float | None  # Of all samples
    values: tuple[float | None, ...]  # Mean per bucket; None where no sample fell


def time_range(steps: pl.DataFrame, sampled: tuple[int, int] | None) -> TimeRange | None:
    """From the first to the last step or sample; None where there is neither."""
    first, last = steps["start_ns"].min(), (steps["start_ns"] + steps["step_ns"]).max()
    ends = list(sampled or ())
    if isinstance(first, int) and isinstance(last, int):
        ends += [first, last]
    return TimeRange(start_ns=min(ends), end_ns=max(ends)) if ends else None


def bucket_means(
    frame: pl.DataFrame, *, span: TimeRange, bucket_count: int = BUCKET_COUNT
) -> tuple[float | None, ...]:
    """Mean of the values in equal buckets of the time axis; None for a bucket without one."""
    valid = frame.filter(pl.col("value").is_finite())
    if valid.is_empty():
        return ()
    times = valid["time_ns"].to_numpy()
    lasting = "end_ns" in valid.columns
    count = bucket_count if lasting else _usable_count(times, span, bucket_count)
    first = _bucket_of(times, span, count)
    last = _bucket_of(valid["end_ns"].to_numpy() - 1, span, count) if lasting else first
    sums = _running(first, last, valid["value"].to_numpy(), count)
    touched = np.round(_running(first, last, np.ones(len(first)), count))
    return tuple(float(s / n) if n else None for s, n in zip(sums, touched, strict=True))


def _bucket_of(times: Ints, span: TimeRange, count: int) -> Ints:
    index = (times - span.start_ns) / span.duration_ns * count
    return np.clip(index.astype(np.int64), 0, count - 1)


def _running(first: Ints, last: Ints, values: Floats, count: int) -> Floats:
    """Sum of the values over each bucket, where a value lies on its first to last one."""
    rises = np.bincount(first, weights=values, minlength=count + 1)
    falls = np.bincount(np.maximum(first, last) + 1, weights=values, minlength=count + 1)
    running: Floats = np.cumsum(rises - falls)
    return running[:count]


def _usable_count(times: Ints, span: TimeRange, limit: int) -> int:
    if len(times) < 2:
        return min(limit, _LONE_SAMPLE_BUCKETS)
    interval = float(np.median(np.diff(times))) * _BUCKET_PER_INTERVAL
    return limit if interval <= 0 else max(1, min(limit, int(span.duration_ns / interval)))


def make_series(
    frame: pl.DataFrame, *, title: str, label: str, unit: str, span: TimeRange
) -> Iterator[Series]:
    """The series of a frame's `time_ns`, `value` and `end_ns`, where it has a value."""
    values = frame["value"].cast(pl.Float64).drop_nulls().drop_nans()
    if not values.is_empty():
        of_all = {"mean": values.mean(), "max": values.max()}
        known = {name: each if isinstance(each, float) else None for name, each in of_all.items()}
        buckets = bucket_means(frame, span=span)
        yield Series(title=title, label=label, unit=unit, values=buckets, **known)


def fold_series(series: Sequence[Series]) -> list[Series]:
    """Folds many lines of one picture into two: the median, and the one with the highest mean."""
    if len(series) <= _FOLD_ABOVE:
        return list(series)
    highest = max(series, key=lambda s: s.mean or 0.0)
    means = [s.mean for s in series if s.mean is not None]
    tops = [s.max for s in series if s.max is not None]
    median = replace(
        highest, label=f"median of {len(series)}", values=_median_values(series),
        mean=float(np.median(means)) if means else None,
        max=float(np.median(tops)) if tops else None,
    )  # fmt: skip
    return [median, replace(highest, label=f"{highest.label}, highest")]


def _median_values(series: Sequence[Series]) -> tuple[float | None, ...]:
    known = [each.values for each in series if each.values]
    count = min(map(len, known), default=0)
    cells = ([own[at * len(own) // count] for own in known] for at in range(count))
    present = ([value for value in row if value is not None] for row in cells)
    return tuple(float(np.median(row)) if row else None for row in present)


def thin_points(values: Floats, *, limit: int) -> npt.NDArray[np.intp]:
    """Which points to draw: all of a short series, else the extremes of equal stretches."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, limit // 2 - 1) + 1).astype(np.intp)
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept.update((int(start + stretch.argmin()), int(start + stretch.argmax())))
    return np.array(sorted(kept), dtype=np.intp)


def points_per_series(
    series_count: int, whole: int = 200_000, least: int = 200, most: int = 5000
) -> int:
    """Points for each of many series, so that a figure of a thousand ranks still opens."""
    return max(least, min(most, whole // max(1, series_count)))
