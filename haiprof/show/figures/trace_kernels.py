"""Kernels of traces: the longest of each rank, and one kernel over all ranks."""

from __future__ import annotations

import plotly.graph_objects as go
import polars as pl

from haiprof.base.units import NS_PER_US
from haiprof.show.figures.style import (
    AXIS,
    BLUE,
    GREY,
    VERMILLION,
    figure_layout,
    series_color,
    time_unit,
)
from haiprof.show.figures.trace_bars import layout_rows, row_names
from haiprof.show.views.functions import kernel_label as short_label
from haiprof.trace_analysis.device_time import OTHERS

_COLORED = 8
"""So many kernels have a colour of their own: colours repeat after them."""
_HEIGHT_PX, _NAME_LENGTH = 340, 48


def top_kernels_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """The kernels with the most time, stacked for each rank; all others are one part."""
    labels = {name: kernel_label(name) for name in found["name"].unique()}
    found = found.with_columns(pl.col("name").replace_strict(labels))
    named = found.filter(pl.col("name") != OTHERS)
    sums = named.group_by("kind", "name").agg(pl.col("sum_ns").sum())
    top = sums.sort(-pl.col("sum_ns"), "name").head(_COLORED)
    ranks = found.select("rank").unique().sort("rank")
    whole = found.group_by("rank").agg(pl.col("sum_ns").sum())
    unit, size = time_unit(whole["sum_ns"].max())  # type: ignore[arg-type]
    names, figure = row_names(ranks, ("rank",)), go.Figure()
    rest = ranks.join(whole, on="rank", how="left")["sum_ns"]
    for index, (kind, name) in enumerate(top.select("kind", "name").iter_rows()):
        own = found.filter((pl.col("kind") == kind) & (pl.col("name") == name))
        own = own.group_by("rank").agg(pl.col("sum_ns").sum())
        times = ranks.join(own, on="rank", how="left")["sum_ns"].fill_null(0)
        rest = rest - times
        figure.add_trace(_bars(names, times / size, name, series_color(index), unit))
    if rest.sum():
        figure.add_trace(_bars(names, rest / size, "all others", GREY, unit))
    layout_rows(figure, names, title=title or "<b>Kernels with the most time, by rank</b>")
    # Names of kernels are long: a line for each in the legend, below the bars.
    figure.update_layout(
        height=figure.layout.height + 20 * len(figure.data),
        legend={"orientation": "v", "y": -0.12, "yref": "paper", "yanchor": "top"},
    )
    figure.update_xaxes(ticksuffix=f" {unit}", rangemode="tozero", **AXIS)
    return figure


def one_kernel_figure(found: pl.DataFrame, *, title: str = "") -> go.Figure:
    """One kernel on every rank: its mean duration, with the shortest and the longest call."""
    ordered = found.sort("rank", "device")
    mean, low, high = (ordered[name] / NS_PER_US for name in ("mean_ns", "min_ns", "max_ns"))
    worst = mean.max()
    figure = go.Figure(
        go.Bar(
            x=ordered["rank"].to_list(), y=mean.to_list(),
            marker={"color": [VERMILLION if value == worst else BLUE for value in mean]},
            error_y={"type": "data", "symmetric": False, "array": (high - mean).to_list(),
                     "arrayminus": (mean - low).to_list(), "thickness": 1.5},
            customdata=list(zip(low, high, ordered["count"], strict=True)),
            hovertemplate="rank %{x}: %{y:.4g} µs in the mean of %{customdata[2]} calls, "
            "%{customdata[0]:.4g} to %{customdata[1]:.4g} µs<extra></extra>",
        )
    )  # fmt: skip
    name = kernel_label(ordered["name"][0]) if ordered.height else "no such kernel"
    figure.update_layout(**figure_layout(title or f"<b>{name}</b> by rank", height=_HEIGHT_PX))
    figure.update_xaxes(title="rank", tickformat="d", **AXIS)
    figure.update_yaxes(rangemode="tozero", ticksuffix=" µs", **AXIS)
    return figure


def kernel_label(name: str) -> str:
    """A kernel's name for a legend: without template arguments, and not longer than a line."""
    short = short_label(name)
    cut = short if len(short) <= _NAME_LENGTH else f"{short[: _NAME_LENGTH - 1]}…"
    return cut.replace("&", "&amp;").replace("<", "&lt;")


def _bars(names: list[str], values: pl.Series, name: str, color: str, unit: str) -> go.Bar:
    return go.Bar(
        y=names, x=values.to_list(), name=name, orientation="h", marker={"color": color},
        hovertemplate=f"%{{y}}: %{{x:.4g}} {unit}<br>{name}<extra></extra>",
    )  # fmt: skip
