"""Causes in traces: the critical path by cause, what-if, and who is late, as bars."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.style import AXIS, BLUE, GREY, VERMILLION, figure_layout, time_unit
from haiprof.show.figures.trace_bars import layout_rows

_HEIGHT_PX = 340


def critical_path_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """What the critical path consists of, the longest cause on top."""
    ordered = found.filter(pl.col("duration_ns") > 0).sort(-pl.col("duration_ns"), "bound_by")
    return _time_bars(
        [name.replace("_", " ") for name in ordered["bound_by"]],
        ordered["duration_ns"].to_list(),
        ordered["share_ratio"].to_list(),
        colors=[BLUE] * ordered.height,
        share="%{customdata:.3g} % of the window",
        title=title or "<b>Critical path by cause</b>",
    )


def what_if_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The step as it is, and as each change would make it."""
    now_ns = [found["reproduced_step_ns"][0]] if found.height else []
    figure = _time_bars(
        ["as it is", *found["change"]][: len(now_ns) + found.height],
        [*now_ns, *found["predicted_step_ns"]],
        [0.0] * len(now_ns) + found["saved_ratio"].to_list(),
        colors=[GREY] * len(now_ns) + [BLUE] * found.height,
        share="shorter by %{customdata:.3g} %",
        title=title or "<b>What would make the step shorter</b>",
    )
    _, size = time_unit(now_ns[0] if now_ns else None)
    above, below = (
        [0.0] * len(now_ns)
        + ((found[name] - found["predicted_step_ns"]).abs() / size).fill_null(0).to_list()
        for name in ("high_step_ns", "low_step_ns")
    )
    figure.update_traces(
        error_x={"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    )
    return figure


def _time_bars(
    names: Sequence[str],
    times_ns: Sequence[float],
    ratios: Sequence[float],
    *,
    colors: Sequence[str],
    share: str,
    title: str,
) -> go.Figure:
    """A bar of time per name, the first on top and the unit's measure, with what its ratio says."""
    unit, size = time_unit(times_ns[0] if times_ns else None)
    figure = go.Figure(
        go.Bar(
            y=names, x=[time / size for time in times_ns], orientation="h",
            marker={"color": colors}, customdata=[ratio * 100 for ratio in ratios],
            hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}, {share}<extra></extra>",
        )
    )  # fmt: skip
    layout_rows(figure, names, title=title)
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **AXIS)
    return figure


def arrival_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """How late each rank begins its collectives, per step, with its interval where there is one."""
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
