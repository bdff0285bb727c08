"""Compares two runs: their step times, and the difference of each part of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_MS
from haiprof.show.figures.style import AXIS, BLUE, BROWN, GREY, VERMILLION, figure_layout

BIN_COUNT = 60
_SHOWN_RATIO = 0.99
_HEIGHT_PX, _ROW_PX, _FRAME_PX = 220, 26, 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The additional time of one part of a step in the new run, with its interval."""

    name: str
    ns: float
    low_ns: float
    high_ns: float
    is_sure: bool
    """Beyond chance."""


def run_difference_figure(
    before_ns: Floats, after_ns: Floats, parts: Sequence[Difference], *, title: str
) -> go.Figure:
    """Step times of both runs as shares by length, above the difference of each part.

    The longest 1 % of the steps of either run may lie beyond the axis: otherwise one stall would
    squeeze all others into one bar.
    """
    rows = 2 if parts else 1
    lower = _ROW_PX * len(parts)
    titles = ["Steps by length (%)", "Difference by part, with 99 % intervals"]
    figure = make_subplots(
        rows=rows, cols=1, subplot_titles=titles[:rows],
        **({"row_heights": [_HEIGHT_PX, lower], "vertical_spacing": 80 / (_HEIGHT_PX + lower + 80)}
           if parts else {}),
    )  # fmt: skip
    for trace in _lengths(before_ns, after_ns):
        figure.add_trace(trace, row=1, col=1)
    for trace in _whiskers(parts):
        figure.add_trace(trace, row=2, col=1)
    figure.update_layout(**figure_layout(title, height=_HEIGHT_PX + lower + _FRAME_PX))
    for each in figure.layout.annotations:
        each.update(x=0, xanchor="left", font={"size": 13}, yshift=2)
    figure.update_xaxes(ticksuffix=" ms", **AXIS)
    figure.update_yaxes(rangemode="tozero", **AXIS, row=1, col=1)
    if parts:
        names = [part.name for part in parts]
        figure.update_yaxes(**AXIS, type="category", categoryorder="array",
                            categoryarray=names[::-1], row=2, col=1)  # fmt: skip
        figure.add_vline(x=0, line={"color": GREY, "width": 1}, row=2, col=1)
    return figure


def _lengths(before_ns: Floats, after_ns: Floats) -> Iterator[go.Scatter]:
    runs = [values / NS_PER_MS for values in (before_ns, after_ns)]
    known = [values for values in runs if len(values)]
    if not known:
        return
    low = min(float(values.min()) for values in known)
    high = max(float(np.quantile(values, _SHOWN_RATIO)) for values in known)
    edges = np.linspace(low, max(high, low * (1 + 1e-6)), BIN_COUNT + 1)
    for name, values, color in zip(("baseline", "new run"), runs, (BROWN, BLUE), strict=True):
        if not len(values):
            continue
        shares = np.histogram(values, edges)[0] / len(values) * 100
        yield go.Scatter(
            x=edges.astype(np.float32), y=np.append(shares, shares[-1:]).astype(np.float32),
            name=name, mode="lines", line={"color": color, "width": 2, "shape": "hv"},
            hovertemplate=f"{name}: %{{y:.3g}} % of its steps<extra></extra>",
        )  # fmt: skip


def _whiskers(parts: Sequence[Difference]) -> Iterator[go.Scatter]:
    for name, color, chosen in (
        ("beyond chance", VERMILLION, [part for part in parts if part.is_sure]),
        ("may be chance", GREY, [part for part in parts if not part.is_sure]),
    ):
        if not chosen:
            continue
        middle, low, high = (
            np.array([getattr(part, key) for part in chosen]) / NS_PER_MS
            for key in ("ns", "low_ns", "high_ns")
        )
        yield go.Scatter(
            x=middle.tolist(), y=[part.name for part in chosen], name=name, mode="markers",
            marker={"color": [color] * len(chosen), "size": 9},
            line={"color": color},
            error_x={"type": "data", "symmetric": False, "array": (high - middle).tolist(),
                     "arrayminus": (middle - low).tolist(), "color": color, "thickness": 2,
                     "width": 5},
            customdata=np.stack([low, high], axis=1).tolist(),
            hovertemplate="%{y}: %{x:+.4g} ms (%{customdata[0]:+.4g} to %{customdata[1]:+.4g})"
            "<extra></extra>",
        )  # fmt: skip
