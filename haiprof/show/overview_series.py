"""The series that an overview shows over time, as a table."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl

from haiprof.show.figures.labels import OWNER, entity_label
from haiprof.show.figures.panel_table import PANEL_ROWS, CounterSpec, PanelSpec
from haiprof.show.series import Series, TimeRange, make_series


def overview_series(
    steps: pl.DataFrame, counters: pl.DataFrame, span: TimeRange
) -> Iterator[Series]:
    """Step time per rank, then each counter of the table that has a sample."""
    yield from step_series(steps, span)
    yield from counters_over_time(counters, span)


def counters_over_time(counters: pl.DataFrame, span: TimeRange) -> Iterator[Series]:
    """Each counter that the terminal draws and that has a sample, one series per owner."""
    for row in PANEL_ROWS:
        for panel in row.panels:
            if panel.terminal is not None:
                for spec in panel.counters:
                    yield from _counter_series(counters, panel, spec, span)


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


def _counter_series(
    counters: pl.DataFrame, panel: PanelSpec, spec: CounterSpec, span: TimeRange
) -> Iterator[Series]:
    mine = counters.filter((pl.col("source") == spec.source) & (pl.col("metric") == spec.metric))
    groups = mine.sort("rank", "gpu", "host", "entity", "time_ns").group_by(
        OWNER, maintain_order=True
    )
    many_hosts = mine["host"].n_unique() > 1
    for key, frame in groups:
        series = make_series(
            frame,
            title=f"{panel.terminal} {spec.word}".strip(),
            label=entity_label(*key, many_hosts=many_hosts),
            unit=panel.base_unit,
            span=span,
        )
        if series:
            yield series
