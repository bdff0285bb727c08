"""The overview figure: the split of a step, step time, and below them a row per source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.grid import COLUMNS, ROW_PX, panel_grid, same_time_axis, source_rows
from haiprof.show.figures.panels import step_traces
from haiprof.show.figures.style import AXIS, PHASE_COLORS, PHASES, TIME_AXIS

Split = Mapping[str, float | None]

_BAR_PX, _BAR_FRAME_PX, _HEAD_MAX_PX = 26, 60, 600
_LEGEND_LIMIT = 24


def overview_figure(
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    *,
    splits: Sequence[tuple[str, Split]],
    missing: Mapping[str, str],
    title: str,
    start_ns: int,
) -> go.Figure:
    """Split of a middle step per rank; over time the step, and one row of panels per source.

    Series longer than about 5000 points are thinned; the highest and lowest point of each stretch
    stay. A pause of a series is a gap in its line. Sources that are missing as a whole are named
    below the panels, each with the reason.
    """
    head = ["Middle step by phase (ms)", "Step time (ms)"]
    rows = source_rows(counters, start_ns)
    height = min(max(ROW_PX, _BAR_PX * len(splits) + _BAR_FRAME_PX), _HEAD_MAX_PX)
    figure = panel_grid(head, rows, head_px=height, title=title, missing=missing)
    _add_splits(figure, splits)
    for trace in step_traces(steps, start_ns):
        figure.add_trace(trace, row=1, col=COLUMNS // 2 + 1)
    place = {"row": 1, "col": COLUMNS // 2 + 1}
    figure.update_xaxes(**place, **TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", **place, **AXIS)
    same_time_axis(figure, "x2", head=["x"])
    _show_each_name_once(figure)
    return figure


def _add_splits(figure: go.Figure, splits: Sequence[tuple[str, Split]]) -> None:
    names = [name for name, _ in splits]
    for phase in PHASES:
        times = [split[phase] for _, split in splits]
        whole = [sum(ns or 0.0 for ns in split.values()) for _, split in splits]
        shares = [
            None if ns is None or not total else ns / total * 100
            for ns, total in zip(times, whole, strict=True)
        ]
        figure.add_bar(
            x=[None if ns is None else ns / NS_PER_MS for ns in times],
            y=names,
            customdata=shares,
            orientation="h",
            name=phase,
            legendgroup=phase,
            marker={"color": PHASE_COLORS[phase]},
            text=[f"{share:.0f} %" if share and share >= 9 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "#111111"},
            hovertemplate=f"{phase}: %{{x:.4g}} ms, %{{customdata:.1f}} %<extra>%{{y}}</extra>",
            row=1,
            col=1,
        )
    figure.update_xaxes(row=1, col=1, **AXIS)
    figure.update_yaxes(autorange="reversed", type="category", row=1, col=1)


def _show_each_name_once(figure: go.Figure) -> None:
    """One legend entry per phase, and per rank or host while they are few."""
    names = {trace.legendgroup for trace in figure.data}
    shown = names if len(names) <= _LEGEND_LIMIT else set(PHASES)
    seen: set[str] = set()
    for trace in figure.data:
        group = trace.legendgroup
        trace.showlegend = group in shown and group not in seen
        if trace.showlegend:
            trace.name = group
        seen.add(group)
