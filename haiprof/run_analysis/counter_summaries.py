"""Counters of a run in short: what there is, means and few points while it trained, NFS mounts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, Ints
from haiprof.run_analysis.counters import (
    ALWAYS,
    OwnerSeries,
    SeriesReader,
    SourceSamples,
    read_sources,
    sort_series,
)
from haiprof.run_analysis.run_files import RunFiles


def training_spans(parts: Iterable[pl.DataFrame]) -> pl.DataFrame:
    """From the first step's begin to the last one's end in Unix time; of each that had steps."""
    rows = [(s["rank"][0], s["attempt"][0], s["start_ns"].min(),
             (s["start_ns"] + s["step_ns"]).max()) for s in parts if s.height]  # fmt: skip
    columns = dict.fromkeys(("rank", "attempt", "begin", "end"), pl.Int64)
    return pl.DataFrame(rows, schema=columns, orient="row")


def host_windows(spans: pl.DataFrame, ranks: pl.DataFrame) -> pl.DataFrame:
    """The same per host: from its ranks' first begin to their last end."""
    known = spans.join(ranks.select("rank", "attempt", "host").drop_nulls(), on=["rank", "attempt"])
    return known.group_by("host").agg(pl.col("begin").min(), pl.col("end").max()).sort("host")


def select_training_samples(counters: pl.DataFrame, windows: pl.DataFrame) -> pl.DataFrame:
    """Samples of each host from when its ranks trained; of a host without ranks, any rank."""
    if windows.is_empty():
        return counters.clear()
    of_host = counters.join(windows, on="host", how="left").with_columns(
        pl.col("begin").fill_null(windows["begin"].min()),
        pl.col("end").fill_null(windows["end"].max()),
    )
    inside = of_host.filter(pl.col("time_ns").is_between(pl.col("begin"), pl.col("end")))
    return inside.select(counters.columns)


MetricOwner = tuple[str, str | None, int | None, int | None]  # source, host, rank and GPU
_SUMMED = frozenset({"process", "host", "gpu"})  # of which the means are wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricStat:
    """One metric of one owner."""

    mean: float
    min: float
    max: float


Metrics = Mapping[MetricOwner, Mapping[str, MetricStat]]
_Stats = dict[MetricOwner, dict[str, MetricStat]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterDigest:
    """Counters in short; of a thousand ranks the rows themselves do not fit in memory."""

    span: tuple[int, int] | None  # Unix times of the first and the last sample
    present: Collection[tuple[str, str]]  # source and metric of all that has a sample
    stats: Metrics  # of the samples inside the windows; of all samples where none is inside
    windows: Mapping[str, tuple[int, int]] | None
    """Begin and end by host of what counts; None where all samples do."""

    def count_series(self, read: SeriesReader) -> SeriesReader:
        """The series of the samples that count: a host without ranks counts while any trains."""
        if (windows := self.windows) is None:
            return read
        others = _whole(windows)
        return lambda source, metric: sort_series(
            each.cut(*windows.get(each.owner[0] or "", others)) for each in read(source, metric)
        )


def read_digest(
    run: RunFiles, windows: pl.DataFrame, *, between: tuple[int, int] | None = None
) -> CounterDigest:
    """Reads one file after another; `windows` say when each `host` trained (`begin`, `end`)."""
    by_host = {host: (begin, end) for host, begin, end in windows.iter_rows()}
    first, last = between or ALWAYS
    present, ends, is_any_inside = set[tuple[str, str]](), list[int](), False
    inside, whole = _Stats(), _Stats()
    for found in read_sources(run, coarse=True):
        wanted = (found.time_ns >= first) & (found.time_ns <= last)
        shown = {metric.name: metric.shown & wanted for metric in found.metrics}
        present |= {(found.source, name) for name, here in shown.items() if here.any()}
        sampled = found.time_ns[np.any([wanted & False, *shown.values()], axis=0)]
        if not len(sampled):
            continue
        ends += [int(sampled.min()), int(sampled.max())]
        if by_host:
            begin, end = by_host.get(found.host, _whole(by_host))
            is_any_inside = is_any_inside or bool(((sampled >= begin) & (sampled <= end)).any())
            _add_stats(inside, found, (max(begin, first), min(end, last)))
        if not is_any_inside:
            _add_stats(whole, found, (first, last))
    return CounterDigest(
        span=(min(ends), max(ends)) if ends else None, present=present,
        stats=inside if is_any_inside else whole, windows=by_host if is_any_inside else None,
    )  # fmt: skip


def _whole(windows: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    return min(begin for begin, _ in windows.values()), max(end for _, end in windows.values())


def _add_stats(stats: _Stats, found: SourceSamples, window: tuple[int, int]) -> None:
    """Adds a file, whose owners are in no other one."""
    if found.source not in _SUMMED:
        return
    owners = [(found.source, found.host, *own) for own in zip(found.ranks, found.gpus, strict=True)]
    first: dict[MetricOwner, int] = {}
    place = np.array([first.setdefault(owner, len(first)) for owner in owners], dtype=np.int64)
    inside = (found.time_ns >= window[0]) & (found.time_ns <= window[1])
    for metric in found.metrics:
        rows = np.flatnonzero(inside & np.isfinite(metric.values))
        if not len(rows):
            continue
        own = place[found.owner[rows]]
        order = np.argsort(own, kind="stable")
        values, own = metric.values[rows[order]], own[order]
        heads = np.flatnonzero(np.diff(own, prepend=-1))
        counts = np.diff(np.append(heads, len(own)))
        columns = [np.add.reduceat(values, heads) / counts, np.minimum.reduceat(values, heads),
                   np.maximum.reduceat(values, heads)]  # fmt: skip
        known = list(first)
        for at, (mean, low, high) in zip(
            own[heads].tolist(), np.stack(columns, 1).tolist(), strict=True
        ):
            stats.setdefault(known[at], {})[metric.name] = MetricStat(mean=mean, min=low, max=high)


POINT_COUNT = 240  # that a series is thinned to, by medians: enough for a trend, few at 1,024 ranks
_OF_RANKS = {
    "gpu": (
        "utilization_ratio", "memory_used_bytes", "throttle_power_ratio", "throttle_thermal_ratio",
        "throttle_sw_thermal_ratio", "throttle_hw_thermal_ratio", "throttle_power_brake_ratio",
    ),
    "process": (
        "cpu_main_cores", "cpu_main_system_cores", "cpu_cores", "run_queue_wait_ratio",
        "memory_rss_bytes", "read_bytes_per_s", "storage_read_bytes_per_s",
        "page_fault_count_per_s", "major_page_fault_count_per_s",
    ),
}  # fmt: skip
_OF_NODES = {
    "host": (
        "cpu_count", "cpu_utilization_ratio", "cpu_steal_ratio", "memory_total_bytes",
        "memory_available_bytes", "swap_in_bytes_per_s", "pressure_memory_some_ratio",
        "tcp_transmit_segment_count_per_s", "tcp_retransmit_segment_count_per_s",
    ),
    "cgroup": (
        "cpu_limit_cores", "cpu_period_count_per_s", "cpu_throttled_period_count_per_s",
        "memory_limit_bytes",
    ),
}  # fmt: skip
_SERIES = ("memory_rss_bytes", "memory_used_bytes")
_SHARES = (
    "run_queue_wait_ratio", "utilization_ratio", "cpu_cores", "cpu_main_cores",
    "cpu_main_system_cores",
)  # fmt: skip
"""Of time, whenever that was: the mean tells how much, the median does not."""
_WANTED = frozenset((s, m) for t in (_OF_RANKS, _OF_NODES) for s, ms in t.items() for m in ms)
_METRIC = pl.Enum(_SERIES)
POINT_SCHEMA = pl.Schema(
    {"rank": pl.Int64(), "metric": _METRIC, "time_ns": pl.Int64(), "value": pl.Float64()}
)
TimeRange = tuple[int, int]  # first and last Unix time in ns
Means = Mapping[str | None, Mapping[str, float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterAverages:
    """Counters in the time of the judged steps."""

    of_ranks: Mapping[str, Mapping[int, float]]
    """By metric of a process or GPU: each rank's mean of shares of time, its median of others."""
    points: pl.DataFrame  # `rank`, `metric`, `time_ns`, `value`: memory of ranks and GPUs, thinned
    nodes: Mapping[str, Means]
    """By host and entity (None: the node itself): mean of each metric of host and cgroup."""

    def of(self, metric: str) -> Mapping[int, float]:
        """By rank, of one metric."""
        return self.of_ranks.get(metric, {})


def average_counters(
    files: RunFiles, windows: pl.DataFrame, node_windows: pl.DataFrame
) -> CounterAverages:
    """Counters of a run while its judged steps ran: `rank` or `host`, `begin`, `end` of windows."""
    # Files are read one by one, so that memory holds the samples of one source at a time.
    of_rank, of_host = ({key: (begin, end) for key, begin, end in each.rows()}
                        for each in (windows, node_windows))  # fmt: skip
    averages: dict[str, dict[int, float]] = defaultdict(dict)
    nodes: dict[str, dict[str | None, dict[str, float | None]]] = {}
    points = [(0, _SERIES[0], np.zeros(0, dtype=np.int64), np.zeros(0))]
    for found in read_sources(files, _WANTED, coarse=True):
        of_node, is_of_ranks = nodes.setdefault(found.host, {}), found.source in _OF_RANKS
        for metric in found.metrics:
            inside = []
            for each in found.series(metric):
                _, rank, _, entity = each.owner
                window = of_rank.get(rank) if is_of_ranks else of_host.get(found.host)
                owner = (None, rank, None, None) if is_of_ranks else (None, None, None, entity)
                inside += [] if window is None else [replace(each.cut(*window), owner=owner)]
            for each in sort_series(inside):
                (_, rank, _, entity), is_mean = each.owner, metric.name in _SHARES
                if rank is None:
                    of_node.setdefault(entity, {})[metric.name] = fmean(each.values.tolist())
                    continue
                average = fmean(each.values.tolist()) if is_mean else float(np.median(each.values))
                averages[metric.name][rank] = average
                if metric.name in _SERIES:
                    points.append((rank, metric.name, *_thin(each, *of_rank[rank])))
    ranks, names, times, medians = zip(*points, strict=True)
    whose = np.repeat(np.arange(len(points)), [len(each) for each in times])
    thinned = pl.DataFrame({
        "rank": np.array(ranks)[whose], "metric": pl.Series(names, dtype=_METRIC).gather(whose),
        "time_ns": np.concatenate(times), "value": np.concatenate(medians),
    }, schema=POINT_SCHEMA)  # fmt: skip
    return CounterAverages(
        of_ranks={metric: dict(sorted(own.items())) for metric, own in sorted(averages.items())},
        points=thinned.sort("metric", "rank", "time_ns"),
        nodes={host: {key: means[key] for key in sorted(means, key=lambda key: key or "")}
               for host, means in nodes.items()},
    )  # fmt: skip


def _thin(series: OwnerSeries, begin_ns: int, end_ns: int) -> tuple[Ints, Floats]:
    """At most POINT_COUNT parts of a series, each the medians of its points."""
    part = (series.time_ns - begin_ns) // max((end_ns - begin_ns) // POINT_COUNT, 1)
    first = np.flatnonzero(np.diff(np.sort(part), prepend=-1))
    both = first + np.append(first[1:], len(part)) - 1  # twice the middle
    columns = (each[np.lexsort((each, part))] for each in (series.time_ns, series.values))
    time, value = (own[both // 2] / 2 + own[(both + 1) // 2] / 2 for own in columns)
    return time.astype(np.int64), value


REQUESTS = {"server_read": "read", "server_write": "write", "metadata": "metadata request"}
"""Kinds of requests, by how their counters begin."""
_REQUEST_PARTS = ("queue", "rtt", "execute")
_OF_MOUNTS = frozenset(
    ("filesystem", name)
    for kind in REQUESTS
    for name in (f"{kind}_count_per_s", *(f"{kind}_{part}_ns" for part in _REQUEST_PARTS))
) | {("filesystem", "retransmission_count_per_s")}


@dataclass(frozen=True, slots=True, kw_only=True)
class MountRequests:
    """The requests of one kind of one NFS mount."""

    host: str
    point: str  # where it is mounted
    kind: str  # of REQUESTS: what one of them is
    count_per_s: float
    execute_ns: float  # mean time of one, from the call to the end
    queue_ns: float | None  # of that, waiting on this client to be sent; None: not counted
    rtt_ns: float | None  # and from sending to the reply
    sent_again_per_s: float | None  # requests of all kinds that were sent again

    @property
    def under_way(self) -> float:
        """How many of them were under way on average."""
        return self.count_per_s * self.execute_ns / 1e9


def mount_requests(run: RunFiles, windows: pl.DataFrame) -> tuple[MountRequests, ...]:
    """Those that were under way most come first; `windows` are `host`, `begin`, `end`."""
    spans = {host: (begin, end) for host, begin, end in windows.rows()}
    found = []
    for source in read_sources(run, _OF_MOUNTS, coarse=True):
        if source.host not in spans:
            continue
        series: dict[str, dict[str, OwnerSeries]] = {}
        for metric in source.metrics:
            for each in source.series(metric):
                if each.owner[3] is not None:
                    own = each.cut(*spans[source.host])
                    series.setdefault(each.owner[3], {})[metric.name] = own
        found += [_requests(source.host, point, kind, own)
                  for point, own in series.items() for kind in REQUESTS]  # fmt: skip
    known = (each for each in found if each is not None)
    return tuple(sorted(known, key=lambda each: -each.under_way))


def _requests(
    host: str, point: str, kind: str, series: dict[str, OwnerSeries]
) -> MountRequests | None:
    count = series.get(f"{kind}_count_per_s")
    if count is None or not count.values.sum():
        return None
    parts = dict.fromkeys(_REQUEST_PARTS)
    for part in _REQUEST_PARTS:
        if (times := series.get(f"{kind}_{part}_ns")) is None:
            continue
        # The mean over all requests, of means of those between two samples each.
        here = np.isin(times.time_ns, count.time_ns)
        many: Floats = count.values[np.isin(count.time_ns, times.time_ns)]
        parts[part] = float(np.average(times.values[here], weights=many)) if many.sum() else None
    if parts["execute"] is None:
        return None
    again = series.get("retransmission_count_per_s")
    return MountRequests(
        host=host, point=point, kind=REQUESTS[kind],
        count_per_s=float(count.values.mean()),
        execute_ns=parts["execute"], queue_ns=parts["queue"], rtt_ns=parts["rtt"],
        sent_again_per_s=None if again is None or not len(again.values)
        else float(again.values.mean()),
    )  # fmt: skip
