"""Launches of traces: how long calls and delays are, with the cut-offs of outliers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_US
from haiprof.show.figures.style import AXIS, BLUE, GREEN, GREY, PURPLE, figure_layout
from haiprof.trace_analysis.launches import LAUNCH_DELAY_CUTOFF_NS, RUNTIME_CUTOFF_NS

_BINS_PER_DECADE, _SHORTEST_US = 8, 0.1
_HEIGHT_PX = 720


def launch_figure(
    found: pl.DataFrame,
    *,
    runtime_cutoff_ns: int = RUNTIME_CUTOFF_NS,
    launch_delay_cutoff_ns: int = LAUNCH_DELAY_CUTOFF_NS,
    title: str = "",
) -> go.Figure:
    """Three distributions over all ranks, on logarithmic axes of time."""
    short = found.filter("is_short")
    panels = (
        (found["cpu_duration_ns"], BLUE, runtime_cutoff_ns,
         f"Calls by duration: {found['is_runtime_outlier'].sum()} of {found.height} are longer "
         f"than {runtime_cutoff_ns / NS_PER_US:g} µs"),
        (found["launch_delay_ns"], PURPLE, launch_delay_cutoff_ns,
         f"Delay from call to kernel: {found['is_launch_delay_outlier'].sum()} are longer than "
         f"{launch_delay_cutoff_ns / NS_PER_US:g} µs"),
        (short["gpu_duration_ns"], GREEN, None,
         f"Kernels shorter than their call: {short.height} of {found.height}, by duration"),
    )  # fmt: skip
    figure = make_subplots(
        rows=3, cols=1, vertical_spacing=0.13, subplot_titles=[text for *_, text in panels]
    )
    for row, (times, color, cutoff_ns, _) in enumerate(panels, start=1):
        for bars in _histogram(times, color):
            figure.add_trace(bars, row=row, col=1)
        if cutoff_ns:
            figure.add_vline(x=cutoff_ns / NS_PER_US, row=row, col=1,
                             line={"color": GREY, "dash": "dash"})  # fmt: skip
    figure.update_layout(
        **figure_layout(title or "<b>Launches</b>", height=_HEIGHT_PX) | {"showlegend": False}
    )
    for note in figure.layout.annotations:
        note.update(x=0, xanchor="left", font={"size": 13})
    figure.update_xaxes(type="log", ticksuffix=" µs", **AXIS)
    figure.update_yaxes(rangemode="tozero", **AXIS)
    return figure


def _histogram(times_ns: pl.Series, color: str) -> Iterator[go.Bar]:
    """How many are how long; what is shorter than the first bin counts in it."""
    known: Floats = times_ns.drop_nulls().to_numpy() / NS_PER_US
    if not len(known):
        return
    decades = np.log10(max(float(known.max()), _SHORTEST_US * 10) / _SHORTEST_US)
    edges = np.geomspace(
        _SHORTEST_US, _SHORTEST_US * 10**decades * 1.001, int(decades * _BINS_PER_DECADE) + 2
    )
    counts = np.histogram(np.maximum(known, _SHORTEST_US), edges)[0]
    yield go.Bar(
        x=np.sqrt(edges[:-1] * edges[1:]), y=counts, width=np.diff(edges),
        marker={"color": color}, customdata=np.stack([edges[:-1], edges[1:]], axis=1),
        hovertemplate="%{y} of %{customdata[0]:.3g} to %{customdata[1]:.3g} µs<extra></extra>",
    )  # fmt: skip
