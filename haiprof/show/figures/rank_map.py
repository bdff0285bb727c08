"""The map of ranks over time: where a step, or a phase of it, took longer than the median."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.rank_grid import RankGrid
from haiprof.show.figures.style import AXIS, BLUE, PHASES, TIME_AXIS, VERMILLION, figure_layout

PARTS = ("step", *PHASES)
LOW_PERCENT, HIGH_PERCENT = -50, 100
_MOST_TICKS = 16
_ROW_PX, _FRAME_PX, _LEAST_PX, _MOST_PX = 18, 190, 300, 720
# Blue is faster than the median step, red slower; told apart with every common colour blindness.
_MIDDLE = -LOW_PERCENT / (HIGH_PERCENT - LOW_PERCENT)
SCALE = ((0.0, BLUE), (_MIDDLE, "#F2F2F2"), (0.5, "#F0B58A"), (1.0, VERMILLION))


def rank_map_figure(grid: RankGrid, *, title: str, start_ns: int) -> go.Figure:
    """A cell per rank and stretch of time; a menu chooses the step or one of its phases.

    The colour is what the step or phase takes above its median over all ranks, as a share of the
    median step: 100 % in the row of a rank is a step that takes twice the median.
    """
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
    figure.update_layout(updatemenus=[_menu(grid)])
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
        "hovertemplate": "rank %{y}, %{x:.4g} s: %{customdata:.4g} ms, "
        "%{z:+.1f} % of a median step above the median<extra></extra>",
        "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
    }


def _cells(grid: RankGrid, part: str) -> dict[str, Any]:
    return {
        "z": (grid.excess_ratio(part) * 100).astype(np.float32),
        "customdata": (grid.of(part) / NS_PER_MS).astype(np.float32),
    }


def _menu(grid: RankGrid) -> dict[str, Any]:
    seen = [part for part in PARTS if grid.typical_ns[part] is not None]
    buttons = []
    for part in seen:
        cells = _cells(grid, part)
        argument = {name: [values] for name, values in cells.items()}
        buttons.append({"label": part, "method": "restyle", "args": [argument]})
    return {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
