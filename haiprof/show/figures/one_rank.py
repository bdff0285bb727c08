"""The figure of one rank: its phases step by step, and its counters on the same time axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.show.figures.grid import panel_grid, same_time_axis, source_rows
from haiprof.show.figures.style import AXIS, PHASE_COLORS, PHASES, TIME_AXIS
from haiprof.show.figures.thinning import gap_starts, thin_points, with_gaps

_STEPS_PX = 320


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
    """
    rows = source_rows(counters, start_ns)
    head = ["Phases of each step (ms)"]
    figure = panel_grid(head, rows, head_px=_STEPS_PX, title=title, missing=missing)
    for area in phase_areas(steps, start_ns):
        figure.add_trace(area, row=1, col=1)
    figure.update_xaxes(row=1, col=1, **TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", row=1, col=1, **AXIS)
    same_time_axis(figure, "x", head=[])
    for trace in figure.select_traces(selector={"stackgroup": None}):
        trace.showlegend = False
    figure.update_layout(hovermode="x unified")
    return figure


def phase_areas(steps: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """One stacked area per phase that was seen, in ms over seconds; hover names the step."""
    ordered = steps.sort("start_ns")
    if ordered.is_empty():
        return []
    seconds = (ordered["start_ns"].to_numpy() - start_ns) / NS_PER_S
    step_ns = ordered["step_ns"].to_numpy()
    ends = seconds + step_ns / NS_PER_S
    kept, breaks = thin_points(step_ns.astype(float)), gap_starts(seconds, ends)
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
