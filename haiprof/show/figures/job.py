"""The whole job over time: step time, its parts, the map of ranks, and who is late."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.intervals import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.ranks import RankGrid
from haiprof.show.figures.style import (
    AXIS,
    BLUE,
    PHASE_COLORS,
    PHASES,
    TIME_AXIS,
    VERMILLION,
    figure_layout,
    series_color,
    time_unit,
)

LINE_LIMIT = 8
"""More ranks than this are drawn as their spread."""
_HEIGHT_PX = 520
_BAND = "rgba(0, 114, 178, 0.25)"


def over_time_figure(grid: RankGrid, *, title: str, start_ns: int) -> go.Figure:
    """Step time above, phases below; of more than eight ranks the median, most and the slowest."""
    unit, unit_ns = time_unit(grid.typical_ns["step"])
    edges = np.linspace(grid.start_ns, grid.end_ns, grid.column_count + 1)
    seconds = (edges - start_ns) / NS_PER_S
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=[f"Step time ({unit})", f"Phases of a step, mean over ranks ({unit})"],
    )  # fmt: skip
    lines = _spread(grid, seconds) if len(grid.ranks) > LINE_LIMIT else (
        _line(seconds, grid.step_ns[place], f"rank {rank}", series_color(rank))
        for place, rank in enumerate(grid.ranks)
    )  # fmt: skip
    for trace in lines:
        figure.add_trace(trace, row=1, col=1)
    for trace in _areas(grid, seconds):
        figure.add_trace(trace, row=2, col=1)
    for trace in figure.data:
        trace.y = np.asarray(trace.y, dtype=np.float32) * np.float32(NS_PER_MS / unit_ns)
        trace.hovertemplate = trace.hovertemplate.replace(" ms<", f" {unit}<")
    figure.update_layout(**figure_layout(title, height=_HEIGHT_PX))
    for each in figure.layout.annotations:
        each.update(x=0, xanchor="left", font={"size": 13}, yshift=2)
    figure.update_xaxes(**TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", **AXIS)
    return figure


def _spread(grid: RankGrid, seconds: Floats) -> Iterator[go.Scatter]:
    """The slowest rank of each stretch is named on hover; where there is no step is a gap."""
    values = grid.step_ns
    seen = ~np.isnan(values).all(axis=0)
    filled = np.where(seen, values, 0.0)
    low, middle, high = np.nanpercentile(filled, [5, 50, 95], axis=0)
    slowest = np.nanargmax(filled, axis=0)
    tops = np.nanmax(filled, axis=0)
    for part in (low, middle, high, tops):
        part[~seen] = np.nan
    yield _line(seconds, low, "95 % of ranks", BLUE, width=0, showlegend=False)
    yield _line(
        seconds, high, "middle 90 % of ranks", BLUE, width=0, fill="tonexty", fillcolor=_BAND
    )
    yield _line(seconds, middle, "median rank", BLUE)
    names = [grid.ranks[place] for place in slowest]
    top = _line(seconds, tops, "slowest rank", VERMILLION)
    template = "slowest, rank %{customdata}: %{y:.3r} ms<extra></extra>"
    yield top.update(customdata=[*names, names[-1]], hovertemplate=template)


def _areas(grid: RankGrid, seconds: Floats) -> Iterator[go.Scatter]:
    for phase in PHASES:
        values = grid.phase_ns[phase]
        seen = ~np.isnan(values).all(axis=0)
        if seen.any():
            mean = np.full(values.shape[1], np.nan)
            mean[seen] = np.nanmean(values[:, seen], axis=0)
            color = PHASE_COLORS[phase]
            yield _line(seconds, mean, phase, color, width=0, stackgroup="step", fillcolor=color)


def _line(
    seconds: Floats, values_ns: Floats, name: str, color: str, *, width: float = 1.5,
    **style: object,
) -> go.Scatter:  # fmt: skip
    """A line of steps, each value until the next stretch begins."""
    return go.Scatter(
        x=seconds.astype(np.float32),
        y=(np.append(values_ns, values_ns[-1:]) / NS_PER_MS).astype(np.float32),
        name=name,
        mode="lines",
        line={"color": color, "width": width, "shape": "hv"},
        hovertemplate=f"{name}: %{{y:.3r}} ms<extra></extra>",
        **style,
    )


PARTS = ("step", *PHASES)
LOW_PERCENT, HIGH_PERCENT = -50, 100
_MOST_TICKS = 16
_ROW_PX, _FRAME_PX, _LEAST_PX, _MOST_PX = 18, 190, 300, 720
# Blue is faster than the median step, red slower; told apart with every common colour blindness.
_MIDDLE = -LOW_PERCENT / (HIGH_PERCENT - LOW_PERCENT)
SCALE = ((0.0, BLUE), (_MIDDLE, "#F2F2F2"), (0.5, "#F0B58A"), (1.0, VERMILLION))


def rank_map_figure(grid: RankGrid, *, title: str, start_ns: int) -> go.Figure:
    """A cell per rank and stretch of time: what a step or phase takes above the ranks' median."""
    edges = (np.linspace(grid.start_ns, grid.end_ns, grid.column_count + 1) - start_ns) / NS_PER_S
    figure = go.Figure(
        go.Heatmap(
            x=(edges[:-1] + edges[1:]) / 2,
            y=list(grid.ranks),
            **_cells(grid, "step"),
            **heat_style(),
        )
    )
    height = min(_MOST_PX, max(_LEAST_PX, _ROW_PX * len(grid.ranks))) + _FRAME_PX
    figure.update_layout(**figure_layout(title, height=height))
    buttons = [
        {"label": part, "method": "restyle",
         "args": [{name: [values] for name, values in _cells(grid, part).items()}]}
        for part in PARTS if grid.typical_ns[part] is not None
    ]  # fmt: skip
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[menu])
    figure.update_xaxes(**TIME_AXIS)
    whole = {"tickformat": "d", "tick0": 0, "dtick": -(-len(grid.ranks) // _MOST_TICKS)}
    figure.update_yaxes(title="rank", autorange="reversed", **whole, **AXIS)
    if len(grid.ranks) == 1:  # plotly cannot know how high a single row is
        (rank,) = grid.ranks
        figure.update_yaxes(autorange=False, range=[rank + 0.5, rank - 0.5], dtick=1)
    return figure


def heat_style() -> dict[str, Any]:
    """The style of a heat map of ranks, without its numbers."""
    return {
        "zmin": LOW_PERCENT,
        "zmax": HIGH_PERCENT,
        "colorscale": [list(stop) for stop in SCALE],
        "hoverongaps": False,
        "hovertemplate": "rank %{y}, %{x:.1f} s: %{customdata:.3r} ms, "
        "%{z:+.1f} % of a median step above the median<extra></extra>",
        "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
    }


def _cells(grid: RankGrid, part: str) -> dict[str, Any]:
    return {
        "z": (grid.excess_ratio(part) * 100).astype(np.float32),
        "customdata": (grid.of(part) / NS_PER_MS).astype(np.float32),
    }


_LATE_RANKS_HEIGHT_PX = 320
_FEW_RANKS, _WIDTH = 16, 0.8
_LATE_RATIO = 0.02
"""Of a step: what is less says nothing of a rank."""


def late_ranks_figure(
    late: pl.DataFrame, *, title: str, step_ns: float | None, hung: Sequence[int] = ()
) -> go.Figure:
    """One bar per rank: its lateness per step in the group in which it is latest."""
    known = late.filter(pl.col("late_ns_per_step").is_finite())
    worst = known.sort("late_ns_per_step", descending=True).unique(
        "rank", keep="first", maintain_order=True
    )
    ordered = worst.sort("rank")
    marked = set(hung) or set(
        worst.head(1).filter(pl.col("late_ns_per_step") >= _LATE_RATIO * (step_ns or 0))["rank"]
    )
    figure = go.Figure(
        go.Bar(
            x=ordered["rank"].to_list(),
            y=(ordered["late_ns_per_step"] / NS_PER_MS).to_list(),
            customdata=(ordered["last_ratio"] * 100).to_list(),
            marker={"color": [VERMILLION if r in marked else BLUE for r in ordered["rank"]]},
            hovertemplate="rank %{x}: %{y:.3r} ms late per step, alone last at %{customdata:.0f} % "
            "of its collectives<extra></extra>",
        )
    )
    figure.update_layout(**figure_layout(title, height=_LATE_RANKS_HEIGHT_PX))
    figure.update_xaxes(title="rank", tickformat="d", **AXIS)
    if ordered.height <= _FEW_RANKS:  # a tick for each, and no bar as wide as the page
        figure.update_xaxes(dtick=1)
        figure.update_traces(width=min(_WIDTH, ordered.height / _FEW_RANKS))
    figure.update_yaxes(rangemode="tozero", ticksuffix=" ms", **AXIS)
    return figure
