"""The figure of one rank: its phases step by step, and its counters on the same time axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.plots.overview import add_reason, left_titles, panel_title
from haiprof.plots.panels import measured_panels
from haiprof.plots.style import AXIS, PHASE_COLORS, PHASES, TIME_AXIS, figure_layout
from haiprof.plots.thin import gap_starts, kept_points, with_gaps
from haiprof.units import NS_PER_MS, NS_PER_S

_STEPS_PX, _PANEL_PX, _EMPTY_PX, _FRAME_PX = 320, 150, 70, 180


def one_rank_figure(
    steps: pl.DataFrame,
    counters: pl.DataFrame,
    *,
    missing: Mapping[str, str],
    title: str,
    start_ns: int,
) -> go.Figure:
    """Phases of each step as a stacked area, and below it the counters of the rank and its host.

    Of more than about 5000 steps the slowest and fastest of each stretch are drawn, all their
    phases together, so that a stack always is one real step.

    Args:
        steps: `Analyzer.steps()` of one rank.
        counters: `Analyzer.counters()` of that rank and its host.
        missing: Reason by source that has no sample.
        title: First line of the figure; more lines after `<br>`.
        start_ns: Unix time at which the time axis begins.
    """
    panels = list(measured_panels(counters, missing, start_ns))
    heights = [_STEPS_PX, *(_PANEL_PX if lines else _EMPTY_PX for _, lines, _ in panels)]
    figure = make_subplots(
        rows=len(heights),
        cols=1,
        shared_xaxes=True,
        row_heights=heights,
        subplot_titles=[
            "Phases of each step (ms)",
            *(panel_title(s.title, s.unit) if lines else s.missing for s, lines, _ in panels),
        ],
        vertical_spacing=min(0.1, 36 / sum(heights)),
    )
    figure.update_xaxes(**TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", **AXIS)
    for area in phase_areas(steps, start_ns):
        figure.add_trace(area, row=1, col=1)
    for row, (spec, traces, reason) in enumerate(panels, start=2):
        for trace in traces:
            trace.showlegend = False
            figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(range=[0, spec.top] if spec.top else None, row=row, col=1)
        if reason:
            add_reason(figure, reason, row=row, col=1)
    figure.update_layout(
        **figure_layout(title, height=sum(heights) + _FRAME_PX), hovermode="x unified"
    )
    left_titles(figure)
    return figure


def phase_areas(steps: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """One stacked area per phase that was seen, in ms over seconds; hover names the step."""
    ordered = steps.sort("start_ns")
    if ordered.is_empty():
        return []
    seconds = (ordered["start_ns"].to_numpy() - start_ns) / NS_PER_S
    step_ns = ordered["step_ns"].to_numpy()
    ends = seconds + step_ns / NS_PER_S
    kept, breaks = kept_points(step_ns.astype(float)), gap_starts(seconds, ends)
    numbers = ordered["step"].to_numpy()
    found = []
    for phase in PHASES:
        column = ordered[f"{phase}_host_ns"]
        if column.null_count() == len(column):
            continue
        times_ms = column.cast(pl.Float64).to_numpy() / NS_PER_MS
        x, y, step = with_gaps(kept, breaks, [seconds, times_ms, numbers], ends)
        found.append(go.Scatter(x=x, y=y, customdata=step, **_area_style(phase)))
    return found


def _area_style(phase: str) -> dict[str, Any]:
    return {
        "name": phase,
        "stackgroup": "step",
        "mode": "lines",
        "line": {"width": 0, "color": PHASE_COLORS[phase], "shape": "hv"},
        "fillcolor": PHASE_COLORS[phase],
        "hovertemplate": f"{phase}: %{{y:.4g}} ms (step %{{customdata:.0f}})<extra></extra>",
    }
