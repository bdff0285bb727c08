"""Which series an overview shows over time, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from haiprof.report.series import Series, TimeRange, make_series


@dataclass(frozen=True, slots=True, kw_only=True)
class SeriesSpec:
    """One counter of an overview."""

    title: str
    source: str
    metric: str
    unit: str


OVERVIEW_SERIES = (
    SeriesSpec(title="CPU of ranks", source="process", metric="cpu_cores", unit="cores"),
    SeriesSpec(title="CPU of node", source="host", metric="cpu_utilization_ratio", unit="ratio"),
    SeriesSpec(title="GPU utilization", source="gpu", metric="utilization_ratio", unit="ratio"),
    SeriesSpec(title="GPU memory", source="gpu", metric="memory_used_bytes", unit="bytes"),
    SeriesSpec(title="GPU power", source="gpu", metric="power_watts", unit="watts"),
    SeriesSpec(title="memory of ranks", source="process", metric="memory_rss_bytes", unit="bytes"),
    SeriesSpec(title="read", source="process", metric="read_bytes_per_s", unit="bytes/s"),
    SeriesSpec(title="write", source="process", metric="write_bytes_per_s", unit="bytes/s"),
    SeriesSpec(
        title="net receive", source="host", metric="network_receive_bytes_per_s", unit="bytes/s"
    ),
    SeriesSpec(
        title="net transmit", source="host", metric="network_transmit_bytes_per_s", unit="bytes/s"
    ),
)


def overview_series(
    steps: pl.DataFrame, counters: pl.DataFrame, span: TimeRange
) -> Iterator[Series]:
    """Step time per rank, then each counter of the table that has a sample."""
    yield from step_series(steps, span)
    for spec in OVERVIEW_SERIES:
        yield from counter_series(counters, spec, span)


def step_series(steps: pl.DataFrame, span: TimeRange) -> Iterator[Series]:
    """Step time, one series per rank."""
    for frame in steps.sort("rank", "start_ns").partition_by("rank", maintain_order=True):
        rank, own = frame["rank"][0], lasting_values(frame, "step_ns")
        series = make_series(own, title="step time", label=f"rank {rank}", unit="ns", span=span)
        if series:
            yield series


def lasting_values(steps: pl.DataFrame, column: str) -> pl.DataFrame:
    """One column of the steps as `time_ns`, `end_ns`, `value`: it holds for the whole step."""
    return steps.sort("start_ns").select(
        time_ns="start_ns",
        end_ns=pl.col("start_ns") + pl.col("step_ns"),
        value=pl.col(column).cast(pl.Float64),
    )


def counter_series(counters: pl.DataFrame, spec: SeriesSpec, span: TimeRange) -> Iterator[Series]:
    """One counter, one series per owner."""
    mine = counters.filter((pl.col("source") == spec.source) & (pl.col("metric") == spec.metric))
    groups = mine.sort("rank", "gpu", "host", "time_ns").group_by(
        ["host", "rank", "gpu"], maintain_order=True
    )
    for key, frame in groups:
        series = make_series(
            frame,
            title=spec.title,
            label=owner_label(*key),
            unit=spec.unit,
            span=span,
        )
        if series:
            yield series


def owner_label(host: object, rank: object, gpu: object) -> str:
    """Whose a counter is: the rank where it is known, else the GPU, else the host."""
    if rank is not None:
        return f"rank {rank}"
    return f"GPU {gpu}" if gpu is not None else str(host)
