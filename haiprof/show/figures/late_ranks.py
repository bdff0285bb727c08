"""How late each rank begins its collectives, as bars."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.style import AXIS, BLUE, VERMILLION, figure_layout

_HEIGHT_PX = 320
_FEW_RANKS, _WIDTH = 16, 0.8


def late_ranks_figure(late: pl.DataFrame, *, title: str) -> go.Figure:
    """One bar per rank: its lateness per step in the group in which it is latest."""
    known = late.filter(pl.col("late_ns_per_step").is_finite())
    worst = known.sort("late_ns_per_step", descending=True).unique(
        "rank", keep="first", maintain_order=True
    )
    ordered = worst.sort("rank")
    top = worst["rank"][0] if worst.height else None
    figure = go.Figure(
        go.Bar(
            x=ordered["rank"].to_list(),
            y=(ordered["late_ns_per_step"] / NS_PER_MS).to_list(),
            customdata=(ordered["last_ratio"] * 100).to_list(),
            marker={"color": [VERMILLION if r == top else BLUE for r in ordered["rank"]]},
            hovertemplate="rank %{x}: %{y:.4g} ms late per step, alone last at %{customdata:.0f} % "
            "of its collectives<extra></extra>",
        )
    )
    figure.update_layout(**figure_layout(title, height=_HEIGHT_PX))
    figure.update_xaxes(title="rank", tickformat="d", **AXIS)
    if ordered.height <= _FEW_RANKS:  # a tick for each, and no bar as wide as the page
        figure.update_xaxes(dtick=1)
        figure.update_traces(width=min(_WIDTH, ordered.height / _FEW_RANKS))
    figure.update_yaxes(rangemode="tozero", ticksuffix=" ms", **AXIS)
    return figure
