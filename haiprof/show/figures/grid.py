"""A grid of panels: a head row, one row per source, and what was not measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import shorten
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.show.figures.labels import by_reason
from haiprof.show.figures.panel_table import PANEL_ROWS, PanelSpec
from haiprof.show.figures.panels import counter_traces
from haiprof.show.figures.style import AXIS, TIME_AXIS, figure_layout

COLUMNS = 4
ROW_PX, _FRAME_PX, _LINE_PX, _BOTTOM_PX = 190, 150, 18, 36
_REASON_CHARS = 150

Row = list[tuple[PanelSpec, list[go.Scatter]]]


def source_rows(counters: pl.DataFrame, start_ns: int) -> list[Row]:
    """The rows of `PANEL_ROWS` with values, without their empty panels."""
    rows = []
    for row in PANEL_ROWS:
        mine = counters.filter(pl.col("source").is_in(row.sources))
        drawn = [(panel, counter_traces(panel, mine, start_ns)) for panel in row.panels]
        shown = [(panel, traces) for panel, traces in drawn if traces]
        if shown:
            rows.append(shown)
    return rows


def panel_grid(
    head: Sequence[str],
    rows: Sequence[Row],
    *,
    head_px: int,
    title: str,
    missing: Mapping[str, str],
) -> go.Figure:
    """A figure with its titles, axes and counters; the head's panels are left to the caller."""
    heights = [head_px, *(ROW_PX for _ in rows)]
    absent = by_reason(missing)
    below = _LINE_PX * len(absent)
    titles = [*head, *(f"{panel.title} ({panel.unit})" for row in rows for panel, _ in row)]
    figure = make_subplots(
        rows=len(heights),
        cols=COLUMNS,
        specs=[
            _head_cells(len(head)),
            *([{} if at < len(row) else None for at in range(COLUMNS)] for row in rows),
        ],
        row_heights=heights,
        subplot_titles=titles,
        horizontal_spacing=0.05,
        vertical_spacing=min(0.3, 56 / sum(heights)),
    )
    layout = figure_layout(title, height=sum(heights) + _FRAME_PX + below)
    layout["margin"] = {**layout["margin"], "b": _BOTTOM_PX + below}
    figure.update_layout(**layout)
    left_titles(figure)
    for number, row in enumerate(rows, start=2):
        for column, (panel, traces) in enumerate(row, start=1):
            _add_panel(figure, panel, traces, row=number, col=column)
    _add_missing(figure, absent)
    return figure


def _head_cells(count: int) -> list[dict[str, Any] | None]:
    span = COLUMNS // count
    return [{"colspan": span} if at % span == 0 else None for at in range(COLUMNS)]


def _add_panel(
    figure: go.Figure, panel: PanelSpec, traces: Sequence[go.Scatter], *, row: int, col: int
) -> None:
    for trace in traces:
        figure.add_trace(trace, row=row, col=col)
    figure.update_xaxes(row=row, col=col, **TIME_AXIS)
    top = [0, panel.top] if panel.top else None
    figure.update_yaxes(range=top, rangemode="tozero", row=row, col=col, **AXIS)


def same_time_axis(figure: go.Figure, axis: str, *, head: Sequence[str]) -> None:
    """Zooms all panels over time together."""
    for each in figure.select_xaxes():
        name = each.plotly_name.replace("axis", "")
        if name not in (*head, axis):
            each.update(matches=axis)


def left_titles(figure: go.Figure) -> None:
    """Moves the titles of panels to their left edge."""
    for title in figure.layout.annotations:
        if title.yanchor == "bottom":
            axis = _axis_below(figure, title.x)
            title.update(x=axis.domain[0], xanchor="left", font={"size": 13}, yshift=2)


def _axis_below(figure: go.Figure, x: float) -> go.layout.XAxis:
    """The x axis of the panels whose titles stand at x of the paper."""
    axes = list(figure.select_xaxes())
    return min(axes, key=lambda axis: abs(sum(axis.domain) / 2 - x))


def _add_missing(figure: go.Figure, missing: Sequence[tuple[str, str]]) -> None:
    """Below the panels: each source that has none, and why."""
    for place, (what, why) in enumerate(missing):
        figure.add_annotation(
            text=f"{escape(what)}: not measured: {escape(shorten(why, _REASON_CHARS))}",
            showarrow=False,
            xref="paper",
            yref="paper",
            x=0,
            xanchor="left",
            y=0,
            yanchor="top",
            yshift=-(_BOTTOM_PX - 4 + _LINE_PX * place),
            font={"color": "#777777", "size": 11},
        )
