"""Counters of a run, averaged over the training window, by rank, GPU or host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

PROCESS, HOST, GPU = "process", "host", "gpu"
_KEYS = ["source", "host", "rank", "gpu", "metric"]

Owner = tuple[str, str | None, int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricStat:
    """One metric of one owner, over the samples of the training window."""

    mean: float
    min: float
    max: float


Metrics = Mapping[Owner, Mapping[str, MetricStat]]


def metric_stats(counters: pl.DataFrame) -> Metrics:
    """Mean, lowest and highest value of each metric."""
    valid = counters.filter(pl.col("value").is_finite())
    rows = valid.group_by(_KEYS).agg(
        pl.col("value").mean().alias("mean"),
        pl.col("value").min().alias("min"),
        pl.col("value").max().alias("max"),
    )
    found: dict[Owner, dict[str, MetricStat]] = {}
    for source, host, rank, gpu, metric, mean, low, high in rows.iter_rows():
        stat = MetricStat(mean=mean, min=low, max=high)
        found.setdefault((source, host, rank, gpu), {})[metric] = stat
    return found


def metrics_of_rank(metrics: Metrics, source: str, *, rank: int | None) -> dict[str, MetricStat]:
    """Metrics of one rank's process or GPU; of the last one if it has several GPUs."""
    merged: dict[str, MetricStat] = {}
    for (of_source, _, of_rank, _), stats in metrics.items():
        if of_source == source and of_rank == rank:
            merged.update(stats)
    return merged


def mean_of(stats: Mapping[str, MetricStat], metric: str) -> float | None:
    """Its mean; None where it was not measured."""
    return stats[metric].mean if metric in stats else None


def max_of(stats: Mapping[str, MetricStat], metric: str) -> float | None:
    """Its highest value; None where it was not measured."""
    return stats[metric].max if metric in stats else None
