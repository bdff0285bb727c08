"""The numbers of an overview, computed once for the terminal, figures and `--json`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.diagnosis.rule_inputs import judged_steps, usual_split
from haiprof.diagnosis.run_notes import traced_lines
from haiprof.diagnosis.traced_window import StepWork, step_work
from haiprof.run_analysis.counter_summaries import (
    CounterDigest,
    MetricStat,
    host_windows,
    select_training_samples,
    training_spans,
)
from haiprof.run_analysis.counters import SeriesReader
from haiprof.run_analysis.nccl_witness import NcclReport
from haiprof.run_analysis.run_files import number
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import by_attempt, untrained_boundary
from haiprof.run_analysis.steps import WORDS
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest
from haiprof.run_format.reader import read_lines
from haiprof.show.figures import panel_table
from haiprof.show.figures.style import PHASES
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.series import Series, TimeRange, make_series, time_range
from haiprof.show.text import moment_text


def select_judged_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of all ranks and attempts that count: warm and not traced."""
    return pl.concat([steps.clear(), *(judged_steps(part) for _, part in by_attempt(steps))])


def select_judged_samples(
    counters: pl.DataFrame, judged: pl.DataFrame, ranks: pl.DataFrame
) -> pl.DataFrame:
    """Samples of counters while the steps that count ran: not of start-up, nor of a process's end.

    All of them where there is none: a start-up of minutes must not dilute an average, but a short
    run must not lose all samples.
    """
    spans = training_spans(part for _, part in by_attempt(judged))
    inside = select_training_samples(counters, host_windows(spans, ranks))
    return counters if inside.is_empty() else inside


PERIOD = "period_ns"


def select_settled(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps of one attempt that count, with the `PERIOD` from each begin to the next one's."""
    begin = pl.col("start_ns")
    period = (begin.shift(-1) - begin).fill_null(pl.col("step_ns")).alias(PERIOD)
    return judged_steps(steps.with_columns(period))


def phase_split(settled: pl.DataFrame, *, clock: str = "host") -> dict[str, float | None]:
    """The mean of such steps by phase; what lies between steps is `other`."""
    found = usual_split(settled, clock=clock)
    mean = number(settled[PERIOD].mean()) if clock == "host" else None
    if mean is not None:
        found["other"] = mean - sum(ns or 0.0 for name, ns in found.items() if name != "other")
    return found


PROCESS, HOST, GPU = "process", "host", "gpu"

_OfRanks = dict[tuple[str, int | None], dict[str, MetricStat]]  # Metrics by source and rank

_HIGHEST = ("memory_rss_bytes", "memory_used_bytes", "memory_total_bytes", "cpu_count")
"""Metrics of which the highest value is shown; of others the mean."""
_OF_GPU = ("utilization_ratio", "memory_used_bytes", "memory_total_bytes", "power_watts")


def _values(stats: Mapping[str, MetricStat], *metrics: str, prefix: str = "") -> dict[str, Any]:
    """What is shown of some metrics; None where one was not measured."""
    found = {name: stats.get(name) for name in metrics}
    return {
        f"{prefix}{name}": None if each is None else each.max if name in _HIGHEST else each.mean
        for name, each in found.items()
    }


_ALL = "all"


def missing_sources(
    run: RunPaths, manifest: Manifest | None, present: Collection[tuple[str, str]]
) -> dict[str, str]:
    """Rows of panels without any sample, by title, each with the reason."""
    said: dict[tuple[Any, str], str] = {}
    for _, node in run.node_folders():
        try:
            lines, _ = read_lines(node.events)
        except RunFormatError as error:  # it counts for the node
            lines = [{"type": "sampler_error", "source": "host", "reason": str(error)}]
        for line in lines:
            if line.get("type") in ("counter_missing", "sampler_error"):
                of = line.get("source"), _stem(str(line.get("metric") or _ALL))
                said.setdefault(of, str(line.get("reason")))
    chosen = manifest.options.get("recorder") if manifest else None
    found = {}
    for row in panel_table.PANEL_ROWS:
        metrics = panel_table.panel_metrics(row.panels)
        if metrics.intersection(present):
            continue
        wanted = {(source, _stem(metric)) for source, metric in metrics}
        wanted |= {(source, _ALL) for source in row.sources}
        why = next((why for of, why in said.items() if of in wanted), "no sample was taken")
        if isinstance(chosen, list) and row.recorder not in chosen:
            why = f"the recorder `{row.recorder}` was left out by --recorder"
        found[row.title] = why
    return found


def _stem(metric: str) -> str:
    """The common part of the names of a column and the metric that is derived from it."""
    for end in ("_per_s", "_ns", "_ratio"):
        metric = metric.removesuffix(end)
    return metric


def counters_over_time(read: SeriesReader, span: TimeRange) -> Iterator[Series]:
    """Each counter that the terminal draws and that has a sample, one series per owner."""
    for panel in panel_table.PANELS:
        for spec in panel.counters if panel.terminal is not None else ():
            title = f"{panel.terminal} {spec.word}".strip()
            for label, samples in panel_table.label_series(read, spec):
                frame = pl.DataFrame({"time_ns": samples.time_ns, "value": samples.values})
                yield from make_series(
                    frame, title=title, label=label, unit=panel.base_unit, span=span
                )


def step_series(steps: pl.DataFrame, span: TimeRange) -> Iterator[Series]:
    """Step time, one series per rank."""
    for frame in steps.sort("rank", "start_ns").partition_by("rank", maintain_order=True):
        rank, own = frame["rank"][0], lasting_values(frame, "step_ns")
        yield from make_series(own, title="step time", label=f"rank {rank}", unit="ns", span=span)


def lasting_values(steps: pl.DataFrame, column: str) -> pl.DataFrame:
    """One column of the steps as `time_ns`, `end_ns`, `value`: it holds for the whole step."""
    return steps.sort("start_ns").select(
        time_ns="start_ns",
        end_ns=pl.col("start_ns") + pl.col("step_ns"),
        value=pl.col(column).cast(pl.Float64),
    )


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
    mean_step_ns: float | None
    """Of the steps that the verdict judges, with what is paid between them."""
    median_step_ns: float | None  # Of the same steps, without that
    split_ns: Split  # Host time of the mean step by phase; None for a phase never seen
    device_split_ns: Split | None  # The same on the device's clock; None without a device
    cpu_cores: float | None
    memory_rss_bytes: float | None  # Highest
    read_bytes_per_s: float | None
    write_bytes_per_s: float | None
    gpu_utilization_ratio: float | None
    gpu_memory_used_bytes: float | None  # Highest
    gpu_power_watts: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSummary:
    """One host of the overview; averages are over the training window."""

    host: str | None
    cpu_count: float | None
    cpu_utilization_ratio: float | None
    memory_used_bytes: float | None  # Maximum: total minus the lowest available
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
    memory_used_bytes: float | None  # Highest
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
    missing: Mapping[str, str]  # Reason by source that has no sample
    series: tuple[Series, ...]
    work: StepWork | None  # FLOPs and MFU of the mean step, where shapes were traced
    traces: tuple[str, ...]  # Traced windows, and why others were not
    reactions: tuple[str, ...]
    nccl: NcclReport | None  # What NCCL itself wrote of the ranks' collectives
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values; times in ns, sizes in bytes, ratios in [0, 1]."""
        return asdict(self) | {"nccl": self.nccl and self.nccl.as_json()}


_TRACE_LIMIT_BYTES = 64 << 20
"""Of traces on disk that an overview reads for the work of a step: it answers at once."""


def overview_summary(
    data: RunFrames, *, with_series: bool = True, trace_limit_bytes: int = _TRACE_LIMIT_BYTES,
    digest: CounterDigest | None = None,
) -> OverviewSummary:  # fmt: skip
    """The numbers of a job, also of one that still runs; of its counters where they are read."""
    steps, ranks = data.steps(), data.ranks()
    manifest = manifest_or_none(data.run)
    counted = select_judged_steps(steps)
    digest = digest or data.counter_digest(counted)
    stats = dict(sorted(digest.stats.items(), key=lambda item: tuple(map(str, item[0]))))
    span = time_range(steps, digest.span)
    rows = {(row["rank"], row["attempt"]): row for row in ranks.iter_rows(named=True)}
    of_ranks: _OfRanks = defaultdict(dict)  # of the last one where a rank has several GPUs
    for (source, _, rank, _), values in digest.stats.items():
        of_ranks[source, rank].update(values)
    trained = {
        (rank, attempt): _rank_summary(rows[rank, attempt], own, of_ranks)
        for (rank, attempt), own in by_attempt(steps)
    }
    marked_by = untrained_boundary(steps)
    window = time_range(counted, None) or span
    series: list[Series] = []
    if window and with_series:
        read = data.read_series(panel_table.panel_metrics().intersection(digest.present))
        series += step_series(counted, window)
        series += counters_over_time(digest.count_series(read), window)
    return OverviewSummary(
        run=run_header(data.run, manifest), span=span, window=window,
        ranks=tuple(
            trained.get(key) or _rank_summary(row, steps.clear(), of_ranks)
            for key, row in rows.items()
        ),
        nodes=tuple(
            _node_summary(owner[1], values) for owner, values in stats.items() if owner[0] == HOST
        ),
        gpus=tuple(
            GpuSummary(host=host, gpu=gpu, rank=rank, **_values(values, *_OF_GPU))
            for (source, host, rank, gpu), values in stats.items()
            if source == GPU
        ),
        missing=missing_sources(data.run, manifest, digest.present), series=tuple(series),
        work=step_work(data.run, _job_step_ns(trained), limit_bytes=trace_limit_bytes),
        traces=traced_lines(data),
        reactions=tuple(
            # Of a hang when it was noticed, else since when it is: the time that the verdict says.
            f"{moment_text(row['since_ns' if row['trigger'] == 'slow' else 'noticed_ns'])}  "
            f"{row['reason']}: {row['outcome']}"
            for row in data.reactions().iter_rows(named=True)
        ),
        nccl=data.nccl().known,
        notes=(*([WORDS[marked_by]] if marked_by else []), *data.notes()),
    )  # fmt: skip


def _job_step_ns(trained: Mapping[tuple[Any, Any], RankSummary]) -> float | None:
    """The mean of the ranks' mean steps, of the last attempt of each."""
    last = {rank: own.mean_step_ns for (rank, _), own in sorted(trained.items())}
    means = [ns for ns in last.values() if ns is not None]
    return sum(means) / len(means) if means else None


def rank_name(rank: RankSummary) -> str:
    """`3`, or `3.1` for the second attempt."""
    return f"{rank.rank}.{rank.attempt}" if rank.attempt else str(rank.rank)


def rank_steps(steps: pl.DataFrame, rank: int, attempt: int) -> pl.DataFrame:
    """The steps of one attempt of one rank."""
    return steps.filter((pl.col("rank") == rank) & (pl.col("attempt") == attempt))


def _rank_summary(row: Mapping[str, Any], own: pl.DataFrame, stats: _OfRanks) -> RankSummary:
    process, gpu = (stats.get((source, row["rank"]), {}) for source in (PROCESS, GPU))
    settled = select_settled(own)
    device_split = phase_split(settled, clock="device")
    return RankSummary(
        **{name: row[name] for name in ("rank", "attempt", "host", "pid", "device")},
        step_count=own.height if row["step_count"] is None else row["step_count"],
        mean_step_ns=number(settled[PERIOD].mean()),
        median_step_ns=number(settled["step_ns"].median()),
        split_ns=phase_split(settled),
        device_split_ns=device_split if any(device_split[p] is not None for p in PHASES) else None,
        **_values(
            process, "cpu_cores", "memory_rss_bytes", "read_bytes_per_s", "write_bytes_per_s"
        ),
        **_values(gpu, "utilization_ratio", "memory_used_bytes", "power_watts", prefix="gpu_"),
        notes=tuple(row["notes"] or ()),
    )


def _node_summary(host: str | None, stats: Mapping[str, MetricStat]) -> NodeSummary:
    values = _values(
        stats, "cpu_count", "cpu_utilization_ratio", "memory_total_bytes", "disk_read_bytes_per_s",
        "disk_write_bytes_per_s", "network_receive_bytes_per_s", "network_transmit_bytes_per_s",
    )  # fmt: skip
    total, available = values["memory_total_bytes"], stats.get("memory_available_bytes")
    used = None if total is None or available is None else total - available.min
    return NodeSummary(host=host, memory_used_bytes=used, **values)
