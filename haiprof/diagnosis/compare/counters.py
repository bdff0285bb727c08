"""Counters of two runs against each other, while their judged steps ran."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.base.statistics import Uncertain, adjust_p_values, resample
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.diagnosis.thresholds import (
    COMPARE_COUNTER_RATIO,
    COMPARE_MIN_EFFECTIVE,
    COMPARE_P_VALUE,
)
from haiprof.run_analysis.training_time import (
    host_windows,
    select_training_samples,
    training_spans,
)

_REPLICATES = 200
_LEAST_SAMPLES = 8
_MOST_SAMPLES = 240  # longer ones are averaged by time: a second more or less tells nothing
_KEY = ("source", "metric", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterChange:
    """One metric of one source: the mean over its entities, then the median over time."""

    source: str
    metric: str
    unit: str
    before: float
    after: float
    low: float
    """Of the difference, as `high`."""
    high: float
    p_value: float
    adjusted_p_value: float | None = None

    @property
    def size(self) -> float:
        """Difference by the larger of both, in [-1, 1]."""
        return (self.after - self.before) / max(abs(self.before), abs(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy others kept the cores of the ranks' nodes."""

    other_cores: float | None
    """Cores used by processes that are not the job's, or by other machines (steal): all nodes'."""
    core_count: float | None
    wait_ratio: float | None
    """Share of time in which a rank's main thread could run and got no core; mean over ranks."""
    main_cores: float | None
    """Cores that a rank's own process used; mean over ranks."""

    @property
    def other_ratio(self) -> float | None:
        """Of all cores."""
        known = self.other_cores is not None and self.core_count
        return self.other_cores / self.core_count if known else None  # type: ignore[operator]


def counter_changes(before: ComparedRun, after: ComparedRun) -> tuple[CounterChange, ...]:
    """Metrics that differ beyond chance (all asked together) and by enough, the largest first.

    Needs eight samples of each run. Intervals as those of the step time, by
    `base.statistics`.
    """
    old, new = _series(before), _series(after)
    found = [
        change
        for key in sorted(old.keys() & new.keys())
        for change in _change(key, old[key], new[key])
    ]
    together = adjust_p_values([change.p_value for change in found])
    sure = [
        replace(change, adjusted_p_value=p)
        for change, p in zip(found, together, strict=True)
        if p is not None and p <= COMPARE_P_VALUE and abs(change.size) >= COMPARE_COUNTER_RATIO
    ]
    return tuple(sorted(sure, key=lambda c: (-abs(c.size), c.source, c.metric)))


def _inside(side: ComparedRun) -> pl.DataFrame:
    """Samples taken while judged steps ran."""
    spans = training_spans(side.steps.partition_by("rank", "attempt", maintain_order=True))
    windows = host_windows(spans, side.analyzer.ranks())
    valid = side.analyzer.counters().drop_nulls("value")
    return select_training_samples(valid, windows)


def _series(side: ComparedRun) -> dict[tuple[str, str, str], Floats]:
    inside = _inside(side)
    if not inside.height:
        return {}
    times = inside["time_ns"].to_numpy()
    width = max(int(times.max() - times.min()) // _MOST_SAMPLES, 1)
    entity_means = inside.group_by(*_KEY, "time_ns").agg(pl.col("value").mean())
    binned = entity_means.group_by(*_KEY, (pl.col("time_ns") // width).alias("bin")).agg(
        pl.col("value").mean()
    )
    whole = binned.sort("bin").group_by(_KEY, maintain_order=True).agg("value").rows()
    return {(source, metric, unit): np.array(values) for source, metric, unit, values in whole}


def _change(key: tuple[str, str, str], old: Floats, new: Floats) -> Iterator[CounterChange]:
    if min(len(old), len(new)) < _LEAST_SAMPLES or not np.isfinite([*old, *new]).all():
        return
    drawn = [resample(own, own[:, None], replicates=_REPLICATES) for own in (old, new)]
    if min(own.effective_count for own in drawn) < min(COMPARE_MIN_EFFECTIVE, len(old) / 2):
        return
    difference = drawn[1].median - drawn[0].median
    if difference == 0:
        return
    error = Uncertain(parts=tuple((own.median_sd**2, own.freedom) for own in drawn))
    yield CounterChange(
        source=key[0], metric=key[1], unit=key[2],
        before=drawn[0].median, after=drawn[1].median,
        low=difference - error.half_width(), high=difference + error.half_width(),
        p_value=error.p_value(difference),
    )  # fmt: skip


def load_of(side: ComparedRun) -> Load:
    """What others used of the nodes' cores, and how the ranks waited for one."""
    inside = _inside(side)
    host = inside.filter((pl.col("source") == "host") & pl.col("entity").is_null())
    nodes = {
        metric: dict(host.filter(pl.col("metric") == metric).group_by("host").agg(
            pl.col("value").mean()).rows())
        for metric in ("cpu_count", "cpu_utilization_ratio", "cpu_steal_ratio")
    }  # fmt: skip
    processes = inside.filter(pl.col("source") == "process")
    own = processes.filter(pl.col("metric") == "cpu_cores")
    used = dict(own.group_by("host", "rank").agg(pl.col("value").mean()).group_by("host").agg(
        pl.col("value").sum()).rows())  # fmt: skip
    known = sorted(nodes["cpu_count"].keys() & nodes["cpu_utilization_ratio"].keys() & used.keys())
    cores = sum(nodes["cpu_count"][name] for name in known)
    taken = {n: nodes["cpu_steal_ratio"].get(n, 0.0) + nodes["cpu_utilization_ratio"][n]
             for n in known}  # fmt: skip
    busy = sum(nodes["cpu_count"][name] * taken[name] for name in known)
    return Load(
        other_cores=max(busy - sum(used[name] for name in known), 0.0) if known else None,
        core_count=cores if known else None,
        wait_ratio=_mean(processes, "run_queue_wait_ratio"),
        main_cores=_mean(processes, "cpu_main_cores"),
    )


def _mean(samples: pl.DataFrame, metric: str) -> float | None:
    value = samples.filter(pl.col("metric") == metric)["value"].mean()
    return float(value) if isinstance(value, (int, float)) else None
