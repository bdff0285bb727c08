"""What counters say of each rank and node while the judged steps ran: averages, and few points."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.run_analysis.counters import SourceMetrics, record_files, source_metrics
from haiprof.run_analysis.run_files import RunFiles

POINT_COUNT = 240
"""Points that a series is thinned to, by medians: enough for a trend, and few at 1,024 ranks."""
_OF_RANKS = {
    "gpu": (
        "utilization_ratio", "memory_used_bytes", "throttle_power_ratio", "throttle_thermal_ratio",
        "throttle_sw_thermal_ratio", "throttle_hw_thermal_ratio", "throttle_power_brake_ratio",
    ),
    "process": (
        "cpu_main_cores", "cpu_cores", "run_queue_wait_ratio", "memory_rss_bytes",
        "read_bytes_per_s", "storage_read_bytes_per_s", "page_fault_count_per_s",
        "major_page_fault_count_per_s",
    ),
}  # fmt: skip
_OF_NODES = {
    "host": (
        "cpu_count", "cpu_utilization_ratio", "cpu_steal_ratio", "memory_total_bytes",
        "memory_available_bytes", "swap_in_bytes_per_s", "pressure_memory_some_ratio",
    ),
    "cgroup": (
        "cpu_limit_cores", "cpu_period_count_per_s", "cpu_throttled_period_count_per_s",
        "memory_limit_bytes",
    ),
}  # fmt: skip
_SERIES = ("memory_rss_bytes", "memory_used_bytes")
_SHARES = ("run_queue_wait_ratio", "utilization_ratio", "cpu_cores", "cpu_main_cores")
"""Of time, whenever that was: the mean tells how much, the median does not."""
_WANTED = frozenset(
    (s, m) for table in (_OF_RANKS, _OF_NODES) for s, ms in table.items() for m in ms
)
_SOURCES = (*_OF_RANKS, *_OF_NODES)
_METRIC = pl.Enum(_SERIES)
POINT_SCHEMA = pl.Schema(
    {"rank": pl.Int64(), "metric": _METRIC, "time_ns": pl.Int64(), "value": pl.Float64()}
)
TimeRange = tuple[int, int]
"""First and last Unix time in ns."""
_NEVER: TimeRange = (1, 0)
Means = Mapping[str | None, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterAverages:
    """Counters in the time of the judged steps."""

    of_ranks: Mapping[str, Mapping[int, float]]
    """By metric of a process or GPU: each rank's mean of shares of time, its median of others."""
    points: pl.DataFrame
    """`rank`, `metric`, `time_ns`, `value`: memory of each rank and its GPU, thinned."""
    nodes: Mapping[str, Means]
    """By host and entity (None: the node itself): mean of each metric of host and cgroup."""

    def of(self, metric: str) -> Mapping[int, float]:
        """By rank, of one metric."""
        return self.of_ranks.get(metric, {})


def count(files: RunFiles, windows: pl.DataFrame, node_windows: pl.DataFrame) -> CounterAverages:
    """Counters of a run while its judged steps ran: `rank` or `host`, `begin`, `end` of windows.

    Files are read one by one, so that memory holds one source of one node at a time.
    """
    of_ranks = {rank: (begin, end) for rank, begin, end in windows.rows()}
    of_hosts = {host: (begin, end) for host, begin, end in node_windows.rows()}
    averages: dict[str, dict[int, float]] = defaultdict(dict)
    points = [pl.DataFrame(schema=POINT_SCHEMA)]
    nodes: dict[str, Means] = {}
    for node in files.nodes:
        own: dict[str, list[pl.DataFrame]] = defaultdict(list)
        shared: dict[str, list[pl.DataFrame]] = defaultdict(list)
        for _, records in record_files(files, hosts={node.host}, sources=_SOURCES):
            if isinstance(records, str):
                continue
            found = source_metrics(files, node, records, _WANTED)
            if found.source in _OF_RANKS:
                spans = [of_ranks.get(rank, _NEVER) for rank in found.ranks]
                ranks = pl.Series(found.ranks, dtype=pl.Int64)
                _add_rows(own, found, ranks, spans)
            else:
                entities = pl.Series(found.entities, dtype=pl.String)
                spans = [of_hosts.get(node.host, _NEVER)] * len(entities)
                _add_rows(shared, found, entities, spans)
        value = pl.col("value")
        for metric, parts in own.items():
            rows = pl.concat(parts).drop_nulls("value")
            average = value.mean() if metric in _SHARES else value.median()
            averages[metric].update(rows.group_by("owner").agg(average).rows())
            if metric in _SERIES:
                points.append(_thin(metric, rows))
        means: dict[str | None, dict[str, float | None]] = defaultdict(dict)
        for metric, parts in sorted(shared.items()):
            rows = pl.concat(parts).sort("time_ns", maintain_order=True)  # sums depend on the order
            for entity, mean in rows.group_by("owner").agg(value.mean()).rows():
                means[entity][metric] = mean
        nodes[node.host] = {each: means[each] for each in sorted(means, key=lambda e: e or "")}
    return CounterAverages(
        of_ranks={metric: dict(sorted(own.items())) for metric, own in sorted(averages.items())},
        points=pl.concat(points),
        nodes=nodes,
    )


def _add_rows(
    found: dict[str, list[pl.DataFrame]],
    source: SourceMetrics,
    owners: pl.Series,
    spans: Sequence[TimeRange],
) -> None:
    """Adds to each metric its values inside the spans of the owners, and the part of the span."""
    begin, end = np.array(spans, dtype=np.int64).reshape(-1, 2)[source.owner].T
    inside = (source.time_ns >= begin) & (source.time_ns <= end)
    for metric in source.metrics:
        at = np.flatnonzero(metric.shown & inside)
        rows = {
            "owner": owners.gather(source.owner[at]),
            "time_ns": source.time_ns[at],
            "value": pl.Series(metric.values[at], dtype=pl.Float64, nan_to_null=True),
        }
        if metric.name in _SERIES:
            part_ns = np.maximum((end[at] - begin[at]) // POINT_COUNT, 1)
            rows["part"] = (source.time_ns[at] - begin[at]) // part_ns
        found[metric.name].append(pl.DataFrame(rows))


def _thin(metric: str, rows: pl.DataFrame) -> pl.DataFrame:
    """At most POINT_COUNT points of each rank, by medians."""
    points = rows.group_by("owner", "part").agg(
        pl.col("time_ns").median().cast(pl.Int64), pl.col("value").median()
    )
    names = {"rank": pl.col("owner"), "metric": pl.lit(metric, _METRIC)}
    return points.sort("owner", "time_ns").select(**names, time_ns="time_ns", value="value")
