"""Causes in traces: the critical path by cause, what-if, and who is late, as bars."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.style import AXIS, BLUE, GREY, VERMILLION, figure_layout, time_unit
from haiprof.show.figures.trace_bars import layout_rows

_HEIGHT_PX = 340


def critical_path_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """What the critical path consists of, the longest cause on top.

    Args:
        found: `CriticalPath.summary()`.
        title: First line of the figure; more lines after `<br>`.
    """
    ordered = found.filter(pl.col("duration_ns") > 0).sort(-pl.col("duration_ns"), "bound_by")
    names = [name.replace("_", " ") for name in ordered["bound_by"]]
    unit, size = time_unit(ordered["duration_ns"].max())  # type: ignore[arg-type]
    figure = go.Figure(
        go.Bar(
            y=names, x=(ordered["duration_ns"] / size).to_list(), orientation="h",
            marker={"color": [BLUE] * len(names)},
            customdata=(ordered["share_ratio"] * 100).to_list(),
            hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}, %{{customdata:.3g}} % of the window"
            "<extra></extra>",
        )
    )  # fmt: skip
    layout_rows(figure, names, title=title or "<b>Critical path by cause</b>")
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **AXIS)
    return figure


def what_if_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The step as it is, and as each change would make it.

    Args:
        found: `TraceAnalysis.what_if()`.
        title: First line of the figure.
    """
    now_ns = found["reproduced_step_ns"][0] if found.height else None
    unit, size = time_unit(now_ns)
    names = ["as it is", *found["change"]]
    steps = [now_ns, *found["predicted_step_ns"]] if found.height else []
    saved = [0.0, *(found["saved_ratio"] * 100)] if found.height else []
    figure = go.Figure(
        go.Bar(
            y=names[: len(steps)], x=[step / size for step in steps], orientation="h",
            marker={"color": [GREY, *[BLUE] * found.height][: len(steps)]}, customdata=saved,
            hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}, shorter by %{{customdata:.3g}} %"
            "<extra></extra>",
        )
    )  # fmt: skip
    layout_rows(figure, names, title=title or "<b>What would make the step shorter</b>")
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **AXIS)
    return figure


def arrival_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """How late each rank begins its collectives, per step, with its interval where there is one.

    Args:
        found: `TraceAnalysis.arrival_lateness()`.
        title: First line of the figure.
    """
    ordered = found.sort("rank")
    late = (ordered["late_ns"] / NS_PER_MS).cast(pl.Float64)
    above, below = (
        ((ordered[name] - ordered["late_ns"]).abs() / NS_PER_MS).fill_null(0).to_list()
        for name in ("high_ns", "low_ns")
    )
    said = str(found["said"][0]) if found.height else ""
    small = f"<br><span style='font-size:12px'>{said.split(';')[0]}</span>" if said else ""
    figure = go.Figure(
        go.Bar(
            x=ordered["rank"].to_list(), y=late.to_list(),
            marker={"color": [VERMILLION if is_late else BLUE for is_late in ordered["is_late"]]},
            error_y={"type": "data", "symmetric": False, "array": above, "arrayminus": below},
            hovertemplate="rank %{x}: %{y:.4g} ms late per step<extra></extra>",
        )
    )  # fmt: skip
    default = f"<b>Lateness at collectives, per step</b>{small}"
    figure.update_layout(**figure_layout(title or default, height=_HEIGHT_PX))
    figure.update_xaxes(title="rank", tickformat="d", **AXIS)
    figure.update_yaxes(ticksuffix=" ms", **AXIS)
    return figure
