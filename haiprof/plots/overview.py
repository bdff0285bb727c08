"""The overview figure: the whole job, panels on one time axis beside the split of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from textwrap import wrap

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.plots.panels import measured_panels, step_traces
from haiprof.plots.style import AXIS, GRID, PHASE_COLORS, PHASES, TIME_AXIS, figure_layout
from haiprof.units import NS_PER_MS

Split = Mapping[str, float | None]
Panel = tuple[str, str, list[go.Scatter], str, float | None]

_ROW_PX, _FRAME_PX = 200, 150
_COLUMNS = 2
_LEGEND_LIMIT = 24
_REASON_COLUMNS = 52


def overview_figure(
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    *,
    splits: Sequence[tuple[str, Split]],
    missing: Mapping[str, str],
    title: str,
    start_ns: int,
) -> go.Figure:
    """Split of a middle step per rank, and over time: step time, CPU, GPU, memory, traffic.

    Series longer than about 5000 points are thinned; the highest and lowest point of each stretch
    stay. A pause of a series is a gap in its line. A source that is missing as a whole is one empty
    panel that says why.

    Args:
        steps: `Analyzer.steps()`.
        counters: `Analyzer.counters()`.
        splits: Name and split in ns of each rank.
        missing: Reason by source that has no sample.
        title: First line of the figure; more lines after `<br>`.
        start_ns: Unix time at which the time axis begins.
    """
    panels: list[Panel] = []
    if not steps.is_empty():
        panels.append(("Step time", "ms", step_traces(steps, start_ns), "", None))
    for spec, traces, reason in measured_panels(counters, missing, start_ns):
        heading = (spec.title, spec.unit) if traces else (spec.missing, "")
        panels.append((*heading, traces, reason, spec.top))
    rows = len(panels) // _COLUMNS + 1
    titles = ["Middle step by phase (ms)", *(panel_title(panel[0], panel[1]) for panel in panels)]
    figure = make_subplots(
        rows=rows,
        cols=_COLUMNS,
        subplot_titles=titles,
        horizontal_spacing=0.08,
        vertical_spacing=min(0.3, 56 / (rows * _ROW_PX)),
    )
    _add_splits(figure, splits)
    for place, panel in enumerate(panels, start=1):
        _add_panel(figure, panel, cell=place)
    figure.update_layout(**figure_layout(title, height=rows * _ROW_PX + _FRAME_PX))
    left_titles(figure)
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


def _add_panel(figure: go.Figure, panel: Panel, *, cell: int) -> None:
    _, _, traces, reason, top = panel
    place = {"row": cell // _COLUMNS + 1, "col": cell % _COLUMNS + 1}
    for trace in traces:
        figure.add_trace(trace, **place)
    if reason:
        add_reason(figure, reason, **place)
        return
    figure.update_xaxes(matches="x2", **place, **TIME_AXIS)
    figure.update_yaxes(range=[0, top] if top else None, rangemode="tozero", **place, **AXIS)


def panel_title(title: str, unit: str) -> str:
    """Title and unit of a panel."""
    return f"{title} ({unit})" if unit else title


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


def add_reason(figure: go.Figure, reason: str, *, row: int, col: int) -> None:
    """Writes into an empty panel why it is empty; plotly draws no axes without a trace.

    Args:
        figure: The figure.
        reason: Text; it is wrapped.
        row: The panel's row, from 1.
        col: Its column, from 1.
    """
    panel = figure.get_subplot(row, col)
    left, right = panel.xaxis.domain
    low, high = panel.yaxis.domain
    paper = {"xref": "paper", "yref": "paper"}
    figure.add_shape(
        type="rect", x0=left, x1=right, y0=low, y1=high, line={"color": GRID, "width": 1}, **paper
    )
    figure.add_annotation(
        text="<br>".join(wrap(escape(reason), _REASON_COLUMNS)),
        showarrow=False,
        xanchor="center",
        x=(left + right) / 2,
        y=(low + high) / 2,
        yanchor="middle",
        font={"color": "#777777"},
        **paper,
    )


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
