"""Counters of two runs against each other, while their judged steps ran."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.base.statistics import adjust_p_values, block_mean
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.diagnosis.compare.step_change import difference
from haiprof.diagnosis.thresholds import COMPARE_P_VALUE
from haiprof.run_analysis.counters import (
    host_windows,
    select_training_samples,
    training_spans,
)
from haiprof.run_analysis.run_files import number

COMPARE_COUNTER_RATIO = 0.10
"""A counter that changed by less is not shown: memory in use, say, is never twice the same. Own
choice."""

_LEAST_SAMPLES = 8
_MOST_SAMPLES = 240  # longer ones are averaged by time: a second more or less tells nothing
_KEY = ("source", "metric", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterChange:
    """One metric of one source: the mean over its entities and over time."""

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
    """Share of time in which a rank's main thread waited for a core; mean over ranks."""
    main_cores: float | None
    """Cores that a rank's own process used; mean over ranks."""

    @property
    def other_ratio(self) -> float | None:
        """Of all cores."""
        known = self.other_cores is not None and self.core_count
        return self.other_cores / self.core_count if known else None  # type: ignore[operator]


def counter_changes(before: ComparedRun, after: ComparedRun) -> tuple[CounterChange, ...]:
    """Metrics that differ beyond chance (all asked together) and by enough, the largest first.

    Needs eight samples of each run. Intervals as those of the mean step, by `block_mean`.
    """
    old, new = _series(before), _series(after)
    found = []
    for key in sorted(old.keys() & new.keys()):
        series = old[key], new[key]
        if min(map(len, series)) < _LEAST_SAMPLES or not np.isfinite(np.concatenate(series)).all():
            continue
        means = difference(*(block_mean(own, run_ratio=0.0) for own in series))
        values = {name.removesuffix("_ns"): value for name, value in means.items()}
        found.append(CounterChange(source=key[0], metric=key[1], unit=key[2], **values))
    together = adjust_p_values([change.p_value for change in found])
    sure = [
        replace(change, adjusted_p_value=p)
        for change, p in zip(found, together, strict=True)
        if p is not None and p <= COMPARE_P_VALUE and abs(change.size) >= COMPARE_COUNTER_RATIO
    ]
    return tuple(sorted(sure, key=lambda c: (-abs(c.size), c.source, c.metric)))


def _inside(side: ComparedRun) -> pl.DataFrame:
    """Samples taken while judged steps ran."""
    spans = training_spans(side.inputs.by_rank.values())
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


def load_of(side: ComparedRun) -> Load:
    """What other processes used of the nodes' cores, and how the ranks waited for one."""

    def mean(metric: str) -> pl.Expr:
        return pl.col("value").filter(pl.col("metric") == metric).mean().alias(metric)

    inside = _inside(side)
    nodes = inside.filter((pl.col("source") == "host") & pl.col("entity").is_null())
    ranks = inside.filter(pl.col("source") == "process").group_by("host", "rank").agg(
        mean("cpu_cores"), mean("run_queue_wait_ratio"), mean("cpu_main_cores")
    )  # fmt: skip
    used = ranks.drop_nulls("cpu_cores").group_by("host").agg(pl.col("cpu_cores").sum())
    known = nodes.group_by("host").agg(
        mean("cpu_count"),
        mean("cpu_utilization_ratio"),
        mean("cpu_steal_ratio").fill_null(0),
    )
    known = known.join(used, on="host").drop_nulls()
    busy = known["cpu_count"] * (known["cpu_utilization_ratio"] + known["cpu_steal_ratio"])
    others = float((busy - known["cpu_cores"]).sum())
    return Load(
        other_cores=max(others, 0.0) if known.height else None,
        core_count=float(known["cpu_count"].sum()) if known.height else None,
        wait_ratio=number(ranks["run_queue_wait_ratio"].mean()),
        main_cores=number(ranks["cpu_main_cores"].mean()),
    )
