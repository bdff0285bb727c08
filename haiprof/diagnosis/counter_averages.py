"""What counters say of each rank and node while the judged steps ran: averages, and few points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, Ints
from haiprof.run_analysis.counters import SourceMetrics, record_files, source_metrics
from haiprof.run_analysis.run_files import RunFiles, mean, median

POINT_COUNT = 240
"""Points that a series is thinned to, by medians: enough for a trend, and few at 1,024 ranks."""
_OF_RANKS = {
    "gpu": (
        "utilization_ratio",
        "memory_used_bytes",
        "throttle_power_ratio",
        "throttle_thermal_ratio",
        "throttle_sw_thermal_ratio",
        "throttle_hw_thermal_ratio",
        "throttle_power_brake_ratio",
    ),
    "process": (
        "cpu_main_cores",
        "cpu_cores",
        "run_queue_wait_ratio",
        "memory_rss_bytes",
        "read_bytes_per_s",
        "storage_read_bytes_per_s",
        "page_fault_count_per_s",
        "major_page_fault_count_per_s",
    ),
}
_OF_NODES = {
    "host": (
        "cpu_count",
        "cpu_utilization_ratio",
        "cpu_steal_ratio",
        "memory_total_bytes",
        "memory_available_bytes",
        "swap_in_bytes_per_s",
        "pressure_memory_some_ratio",
    ),
    "cgroup": (
        "cpu_limit_cores",
        "cpu_period_count_per_s",
        "cpu_throttled_period_count_per_s",
        "memory_limit_bytes",
    ),
}
_SERIES = ("memory_rss_bytes", "memory_used_bytes")
_LOST = "run_queue_wait_ratio"
"""A share of time that is lost, whenever that was: the mean tells how much, the median does not."""
_WANTED = frozenset(
    (s, m) for table in (_OF_RANKS, _OF_NODES) for s, ms in table.items() for m in ms
)
_SOURCES = (*_OF_RANKS, *_OF_NODES)
_MEAN_SCHEMA = {
    "time_ns": pl.Int64, "entity": pl.String, "metric": pl.String, "value": pl.Float64
}  # fmt: skip
POINT_SCHEMA = {"rank": pl.Int64, "metric": pl.String, "time_ns": pl.Int64, "value": pl.Float64}
TimeRange = tuple[int, int]
"""First and last Unix time in ns."""
Means = Mapping[str | None, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterAverages:
    """Counters in the time of the judged steps."""

    medians: Mapping[str, Mapping[int, float]]
    """By metric of a process or GPU: each rank's median, where known."""
    core_waits: Mapping[int, float]
    """Each rank's mean share of time in which its main thread could run and got no core."""
    points: pl.DataFrame
    """`rank`, `metric`, `time_ns`, `value`: memory of each rank and its GPU, thinned."""
    nodes: Mapping[str, Means]
    """By host and entity (None: the node itself): mean of each metric of host and cgroup."""

    def of(self, metric: str) -> Mapping[int, float]:
        """Median by rank of one metric."""
        return self.medians.get(metric, {})


def count(files: RunFiles, windows: pl.DataFrame, node_windows: pl.DataFrame) -> CounterAverages:
    """Counters of a run while its judged steps ran: `rank` or `host`, `begin`, `end` of windows.

    Files are read one by one, so that memory holds one source of one node at a time.
    """
    of_ranks = {rank: (begin, end) for rank, begin, end in windows.rows()}
    of_hosts = {host: (begin, end) for host, begin, end in node_windows.rows()}
    medians: dict[str, dict[int, float]] = {}
    waits: dict[int, float] = {}
    points = [pl.DataFrame(schema=POINT_SCHEMA)]
    nodes: dict[str, Means] = {}
    for node in files.nodes:
        series: list[_Series] = []
        shared: list[SourceMetrics] = []
        for _, records in record_files(files, hosts={node.host}, sources=_SOURCES):
            if isinstance(records, str):
                continue
            found = source_metrics(files, node, records, _WANTED)
            if found.source in _OF_RANKS:
                series += _of_ranks(found, of_ranks)
            else:
                shared.append(found)
        for metric, rank, values in _by_rank(series):
            if (middle := median(values)) is not None:
                medians.setdefault(metric, {})[rank] = middle
            if metric == _LOST and (share := mean(values)) is not None:
                waits[rank] = share
        points.append(_thin([each for each in series if each.metric in _SERIES]))
        nodes[node.host] = _means(shared, of_hosts.get(node.host))
    return CounterAverages(
        medians={metric: dict(sorted(ranks.items())) for metric, ranks in sorted(medians.items())},
        core_waits=dict(sorted(waits.items())),
        points=pl.concat(points),
        nodes=nodes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Series:
    """One metric of one rank while its judged steps ran."""

    metric: str
    rank: int
    begin: int
    end: int
    time_ns: Ints
    values: Floats


def _of_ranks(found: SourceMetrics, windows: Mapping[int, TimeRange]) -> Iterator[_Series]:
    """Every metric of every rank that has steps."""
    shown = [metric.shown for metric in found.metrics]
    for rank in sorted({rank for rank in found.ranks if rank is not None and rank in windows}):
        begin, end = windows[rank]
        own = np.array([owner == rank for owner in found.ranks], dtype=np.bool_)[found.owner]
        rows = np.flatnonzero(own & (found.time_ns >= begin) & (found.time_ns <= end))
        for metric, there in zip(found.metrics, shown, strict=True):
            at = rows[there[rows]]
            yield _Series(
                metric=metric.name, rank=rank, begin=begin, end=end,
                time_ns=found.time_ns[at], values=metric.values[at],
            )  # fmt: skip


def _by_rank(series: Iterable[_Series]) -> Iterator[tuple[str, int, pl.Series]]:
    """All values of each metric of each rank."""
    parts: dict[tuple[str, int], list[Floats]] = {}
    for each in series:
        parts.setdefault((each.metric, each.rank), []).append(each.values)
    for (metric, rank), values in parts.items():
        yield metric, rank, pl.Series(np.concatenate(values), nan_to_null=True)


def _thin(series: Sequence[_Series]) -> pl.DataFrame:
    """At most POINT_COUNT points of each series."""
    if not series:
        return pl.DataFrame(schema=POINT_SCHEMA)
    lengths = [len(each.values) for each in series]
    parts = [
        (each.time_ns - each.begin) // max((each.end - each.begin) // POINT_COUNT, 1)
        for each in series
    ]
    rows = pl.LazyFrame(
        {
            "rank": np.repeat([each.rank for each in series], lengths),
            "metric": pl.Series([each.metric for each in series], dtype=pl.String).gather(
                np.repeat(np.arange(len(series)), lengths)
            ),
            "part": np.concatenate(parts),
            "time_ns": np.concatenate([each.time_ns for each in series]),
            "value": pl.Series(np.concatenate([each.values for each in series]), nan_to_null=True),
        }
    )
    return (
        rows.group_by("rank", "metric", "part")
        .agg(pl.col("time_ns").median().cast(pl.Int64), pl.col("value").median())
        .sort("rank", "metric", "time_ns")
        .select(pl.col(name).cast(kind) for name, kind in POINT_SCHEMA.items())
        .collect()
    )


def _means(shared: Sequence[SourceMetrics], window: TimeRange | None) -> Means:
    """By entity and metric, of the samples in the window, in order of time."""
    if window is None:
        return {}
    frames = [pl.DataFrame(schema=_MEAN_SCHEMA)]
    for found in shared:
        inside = (found.time_ns >= window[0]) & (found.time_ns <= window[1])
        entities = pl.Series(found.entities, dtype=pl.String)
        for metric in found.metrics:
            at = np.flatnonzero(metric.shown & inside)
            columns = {
                "time_ns": found.time_ns[at],
                "entity": entities.gather(found.owner[at]),
                "metric": pl.Series([metric.name]).new_from_index(0, len(at)),
                "value": pl.Series(metric.values[at], nan_to_null=True),
            }
            frames.append(pl.DataFrame(columns, schema=_MEAN_SCHEMA))
    rows = pl.concat(frames).sort("time_ns", maintain_order=True)  # sums depend on the order
    means = rows.group_by("entity", "metric").agg(pl.col("value").mean())
    found_means: dict[str | None, dict[str, float | None]] = {}
    for entity, name, value in means.sort("entity", "metric", nulls_last=False).rows():
        found_means.setdefault(entity, {})[name] = value
    return found_means
