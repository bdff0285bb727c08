"""The numbers of an overview, computed once for the terminal, figures and `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from haiprof.diagnosis.recorded_windows import traced_lines
from haiprof.diagnosis.rule_inputs import typical_of, usual_split
from haiprof.diagnosis.step_work import StepWork, step_work
from haiprof.run_analysis.records import number
from haiprof.run_analysis.step_boundaries import WORDS
from haiprof.run_analysis.step_frame import last_attempts, untrained_boundary
from haiprof.show import metrics as m
from haiprof.show.figures.style import PHASES
from haiprof.show.missing import missing_sources
from haiprof.show.overview_series import overview_series
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.series import Series, TimeRange, time_range
from haiprof.show.source import RunData
from haiprof.show.split import (
    find_judged_time,
    phase_split,
    select_judged_samples,
    select_judged_steps,
    settled_steps,
)
from haiprof.show.text import moment_text

Split = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """One rank of the overview; averages are over the training window."""

    rank: int
    attempt: int
    host: str | None
    pid: int | None
    device: str | None
    step_count: int
    median_step_ns: float | None
    """Without the first, slower steps, as in the verdict; so are the splits."""
    split_ns: Split
    """Host time of a middle step by phase; None for a phase never seen."""
    device_split_ns: Split | None
    """The same on the device's clock; None without a device."""
    cpu_cores: float | None
    memory_rss_bytes: float | None
    """Highest."""
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    gpu_utilization_ratio: float | None
    gpu_memory_used_bytes: float | None
    """Highest."""
    gpu_power_watts: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """One host of the overview; averages are over the training window."""

    host: str | None
    cpu_count: float | None
    cpu_utilization_ratio: float | None
    memory_used_bytes: float | None
    """Maximum: total minus the lowest available."""
    memory_total_bytes: float | None
    disk_read_bytes_per_s: float | None
    disk_write_bytes_per_s: float | None
    network_receive_bytes_per_s: float | None
    network_transmit_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """One GPU of the overview; averages are over the training window."""

    host: str | None
    gpu: int | None
    rank: int | None
    utilization_ratio: float | None
    memory_used_bytes: float | None
    """Highest."""
    memory_total_bytes: float | None
    power_watts: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OverviewSummary:
    """The whole job."""

    run: RunHeader
    span: TimeRange | None
    """From the first to the last sample or step; None where nothing was sampled."""
    window: TimeRange | None
    """The time axis of the series: while the steps ran that count, warm and not traced."""
    ranks: tuple[RankSummary, ...]
    nodes: tuple[NodeSummary, ...]
    gpus: tuple[GpuSummary, ...]
    missing: Mapping[str, str]
    """Reason by source that has no sample."""
    series: tuple[Series, ...]
    work: StepWork | None
    """FLOPs and MFU of the usual step of the typical rank, where shapes were traced."""
    traces: tuple[str, ...]
    """Traced windows, and why others were not."""
    reactions: tuple[str, ...]
    """Automatic reactions."""
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; times in ns, sizes in bytes, ratios in [0, 1]."""
        return asdict(self)


_TRACE_LIMIT_BYTES = 64 << 20
"""Of traces on disk that an overview reads for the work of a step: it answers at once."""


def overview_summary(
    data: RunData, *, with_series: bool = True, trace_limit_bytes: int = _TRACE_LIMIT_BYTES
) -> OverviewSummary:
    """The numbers of a job, also of one that still runs."""
    steps, counters, ranks = data.steps(), data.counters(), data.ranks()
    by_rank = steps.partition_by("rank", "attempt", as_dict=True)
    manifest = manifest_or_none(data.run)
    counted = select_judged_steps(steps)
    samples = select_judged_samples(counters, counted, ranks)
    stats = m.metric_stats(samples)
    span = time_range(steps, counters)
    marked_by = untrained_boundary(steps)
    window = find_judged_time(counted, span)
    return OverviewSummary(
        run=run_header(data.run, manifest),
        span=span,
        window=window,
        ranks=tuple(
            _rank_summary(row, by_rank.get((row["rank"], row["attempt"]), steps.clear()), stats)
            for row in ranks.iter_rows(named=True)
        ),
        nodes=tuple(
            _node_summary(owner[1], values)
            for owner, values in _sort_stats(stats)
            if owner[0] == m.HOST
        ),
        gpus=tuple(
            _gpu_summary(owner, values) for owner, values in _sort_stats(stats) if owner[0] == m.GPU
        ),
        missing=missing_sources(data.run, manifest, counters),
        series=tuple(overview_series(counted, samples, window)) if window and with_series else (),
        work=step_work(data.run, _usual_step_ns(counted), limit_bytes=trace_limit_bytes),
        traces=traced_lines(data.windows(), steps, data.run),
        reactions=tuple(map(_reaction_line, data.reactions().iter_rows(named=True))),
        notes=(*([WORDS[marked_by]] if marked_by else []), *data.notes()),
    )


def _usual_step_ns(judged: pl.DataFrame) -> float | None:
    """Of the typical rank in its last attempt, as on the card."""
    steps = last_attempts(judged)
    by_rank = {
        int(rank): part for (rank,), part in steps.partition_by("rank", as_dict=True).items()
    }
    if not by_rank:
        return None
    return sum(ns or 0.0 for ns in usual_split(by_rank[typical_of(by_rank)]).values())


def _reaction_line(row: Mapping[str, Any]) -> str:
    return f"{moment_text(row['noticed_ns'])}  {row['reason']}: {row['outcome']}"


def _sort_stats(stats: m.Metrics) -> list[tuple[m.Owner, Mapping[str, m.MetricStat]]]:
    return sorted(stats.items(), key=lambda item: tuple(str(part) for part in item[0]))


def rank_name(rank: RankSummary) -> str:
    """`3`, or `3.1` for the second attempt."""
    return f"{rank.rank}.{rank.attempt}" if rank.attempt else str(rank.rank)


def rank_steps(steps: pl.DataFrame, rank: int, attempt: int) -> pl.DataFrame:
    """The steps of one attempt of one rank."""
    return steps.filter((pl.col("rank") == rank) & (pl.col("attempt") == attempt))


def _rank_summary(row: Mapping[str, Any], own: pl.DataFrame, stats: m.Metrics) -> RankSummary:
    process = m.metrics_of_rank(stats, m.PROCESS, rank=row["rank"])
    gpu = m.metrics_of_rank(stats, m.GPU, rank=row["rank"])
    median = settled_steps(own)["step_ns"].median()
    device_split = phase_split(own, clock="device")
    return RankSummary(
        rank=row["rank"],
        attempt=row["attempt"],
        host=row["host"],
        pid=row["pid"],
        device=row["device"],
        step_count=own.height,
        median_step_ns=number(median),
        split_ns=phase_split(own),
        device_split_ns=device_split if any(device_split[p] is not None for p in PHASES) else None,
        cpu_cores=m.mean_of(process, "cpu_cores"),
        memory_rss_bytes=m.max_of(process, "memory_rss_bytes"),
        read_bytes_per_s=m.mean_of(process, "read_bytes_per_s"),
        write_bytes_per_s=m.mean_of(process, "write_bytes_per_s"),
        gpu_utilization_ratio=m.mean_of(gpu, "utilization_ratio"),
        gpu_memory_used_bytes=m.max_of(gpu, "memory_used_bytes"),
        gpu_power_watts=m.mean_of(gpu, "power_watts"),
        notes=tuple(row["notes"] or ()),
    )


def _node_summary(host: str | None, stats: Mapping[str, m.MetricStat]) -> NodeSummary:
    total = m.max_of(stats, "memory_total_bytes")
    available = stats.get("memory_available_bytes")
    known = total is not None and available is not None
    return NodeSummary(
        host=host,
        cpu_count=m.max_of(stats, "cpu_count"),
        cpu_utilization_ratio=m.mean_of(stats, "cpu_utilization_ratio"),
        memory_used_bytes=total - available.min if known and total and available else None,
        memory_total_bytes=total,
        disk_read_bytes_per_s=m.mean_of(stats, "disk_read_bytes_per_s"),
        disk_write_bytes_per_s=m.mean_of(stats, "disk_write_bytes_per_s"),
        network_receive_bytes_per_s=m.mean_of(stats, "network_receive_bytes_per_s"),
        network_transmit_bytes_per_s=m.mean_of(stats, "network_transmit_bytes_per_s"),
    )


def _gpu_summary(owner: m.Owner, stats: Mapping[str, m.MetricStat]) -> GpuSummary:
    _, host, rank, gpu = owner
    return GpuSummary(
        host=host,
        gpu=gpu,
        rank=rank,
        utilization_ratio=m.mean_of(stats, "utilization_ratio"),
        memory_used_bytes=m.max_of(stats, "memory_used_bytes"),
        memory_total_bytes=m.max_of(stats, "memory_total_bytes"),
        power_watts=m.mean_of(stats, "power_watts"),
    )
