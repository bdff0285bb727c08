"""The whole job over time: step time of its ranks, and what an average step consists of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.rank_grid import RankGrid
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
    """Step time above, phases below, both as means of the steps in each stretch of time.

    Of up to eight ranks each has its line; of more the median, the middle 90 % and the slowest one
    of each stretch. The phases are means over all ranks.
    """
    unit, unit_ns = time_unit(grid.typical_ns["step"])
    edges = np.linspace(grid.start_ns, grid.end_ns, grid.column_count + 1)
    seconds = (edges - start_ns) / NS_PER_S
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=[f"Step time ({unit})", f"Phases of a step, mean over ranks ({unit})"],
    )  # fmt: skip
    draw = _lines if len(grid.ranks) <= LINE_LIMIT else _spread
    for trace in draw(grid, seconds):
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


def _lines(grid: RankGrid, seconds: Floats) -> Iterator[go.Scatter]:
    for place, rank in enumerate(grid.ranks):
        yield _line(seconds, grid.step_ns[place], f"rank {rank}", series_color(rank))


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
    template = "slowest, rank %{customdata}: %{y:.4g} ms<extra></extra>"
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
        hovertemplate=f"{name}: %{{y:.4g}} ms<extra></extra>",
        **style,
    )
