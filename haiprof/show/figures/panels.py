"""Lines of a panel, thinned, with gaps where a series pauses, and the grid of panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from textwrap import shorten
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.intervals import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.counters import SeriesReader
from haiprof.show.figures.panel_table import PANEL_ROWS, PanelSpec, label_series
from haiprof.show.figures.style import AXIS, TIME_AXIS, figure_layout, series_color
from haiprof.show.text import by_reason

POINT_LIMIT = 5000
_FIGURE_POINT_LIMIT = 200_000
_LEAST_POINTS = 200

Columns = list[Floats]
_GAP_INTERVALS = 5.0


def thin_points(
    values: npt.NDArray[np.float64], *, limit: int = POINT_LIMIT
) -> npt.NDArray[np.intp]:
    """Which points to draw: all of a short series, else the extremes of equal stretches."""
    count = len(values)
    if count <= limit:
        return np.arange(count)
    edges = np.linspace(0, count, max(1, limit // 2 - 1) + 1).astype(np.intp)
    kept = {0, count - 1}
    for start, end in pairwise(edges):
        stretch = values[start:end]
        kept.update((int(start + stretch.argmin()), int(start + stretch.argmax())))
    return np.array(sorted(kept), dtype=np.intp)


def points_per_series(series_count: int) -> int:
    """Points for each of many series, so that a figure of a thousand ranks still opens."""
    return max(_LEAST_POINTS, min(POINT_LIMIT, _FIGURE_POINT_LIMIT // max(1, series_count)))


def gap_starts(
    starts: npt.NDArray[np.float64], ends: npt.NDArray[np.float64] | None = None
) -> npt.NDArray[np.intp]:
    """Where a line must break: indices before a pause much longer than the usual interval.

    Samples that come more slowly from some time on, as on a node without a free core, are no
    pauses: a pause is much longer than those beside it, too.
    """
    none = np.array([], dtype=np.intp)
    if len(starts) < 3:
        return none
    pauses = starts[1:] - (starts if ends is None else ends)[:-1]
    if ends is None and pauses.max() <= _GAP_INTERVALS * pauses.min():
        return none  # as nearly always; of a thousand ranks the rest takes seconds
    usual: npt.NDArray[np.float64] = np.full(len(starts) - 1, np.median(np.diff(starts)))
    if ends is None:
        beside = np.maximum(np.append(pauses[:1], pauses[:-1]), np.append(pauses[1:], pauses[-1:]))
        beside[[0, -1]] = usual[[0, -1]]
        usual = np.maximum(usual, beside)
    return np.flatnonzero(pauses > _GAP_INTERVALS * usual)


def with_gaps(
    kept: npt.NDArray[np.intp], breaks: npt.NDArray[np.intp], columns: Columns, ends: Floats
) -> Columns:
    """The chosen points of each column, and at each break a point without values."""
    if not len(breaks):
        return [columns[0][kept], *(c[kept].astype(np.float64) for c in columns[1:])]
    after = np.searchsorted(kept, breaks, side="right")
    inner = (after > 0) & (after < len(kept))
    places, first = np.unique(after[inner], return_index=True)
    times = np.insert(columns[0][kept], places, ends[breaks[inner][first]])
    values = [np.insert(c[kept].astype(np.float64), places, np.nan) for c in columns[1:]]
    return [times, *values]


_HOST_COLOR_INDEX = 6  # hosts begin at another colour than ranks


def counter_traces(panel: PanelSpec, read: SeriesReader, start_ns: int) -> list[go.Scatter]:
    """The lines of one panel; empty where nothing of it was measured."""
    found = []
    for spec in panel.counters:
        series = label_series(read, spec)
        for place, (name, samples) in enumerate(series):
            seconds = (samples.time_ns - start_ns) / NS_PER_S
            found.append(_draw_line(
                seconds, samples.values / panel.scale, name=f"{name} {spec.word}".rstrip(),
                group=name, color=owner_color(samples.owner, place), dash=spec.dash,
                unit=panel.unit, limit=points_per_series(len(series)),
            ))  # fmt: skip
    return found


def owner_color(owner: Sequence[Any], place: int) -> str:
    """The colour of a rank, or of a host's series by its place."""
    rank = owner[1]
    return series_color(rank if isinstance(rank, int) else _HOST_COLOR_INDEX + place)


def step_traces(steps: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """Step time in ms over time, one line per rank."""
    frames = steps.sort("rank", "start_ns").partition_by("rank", maintain_order=True)
    found = []
    for own in frames:
        rank, times_ns = own["rank"][0], own["step_ns"].to_numpy()
        seconds = (own["start_ns"].to_numpy() - start_ns) / NS_PER_S
        found.append(_draw_line(
            seconds, times_ns / NS_PER_MS, seconds + times_ns / NS_PER_S, name=f"rank {rank}",
            group=f"rank {rank}", color=series_color(rank), unit="ms",
            limit=points_per_series(len(frames)),
        ))  # fmt: skip
    return found


def _draw_line(
    seconds: Floats, values: Floats, ends: Floats | None = None, *,
    name: str, group: str, color: str, unit: str, limit: int, dash: str = "solid",
) -> go.Scatter:  # fmt: skip
    """One series: its points thinned to a limit, with a gap at each pause."""
    kept = thin_points(values, limit=limit)
    lasting = seconds if ends is None else ends
    x, y = with_gaps(kept, gap_starts(seconds, ends), [seconds, values], lasting)
    shape = "linear" if ends is None else "hv"
    return go.Scatter(
        x=x, y=y, name=name, legendgroup=group, mode="lines" if len(kept) > 1 else "markers",
        line={"color": color, "width": 1.5, "dash": dash, "shape": shape},
        marker={"color": color}, hovertemplate=f"{name}: %{{y:.3r}} {unit}<extra></extra>",
    )  # fmt: skip


COLUMNS = 4
ROW_PX, _FRAME_PX, _LINE_PX, _BOTTOM_PX = 190, 150, 18, 36
_REASON_CHARS = 150

Row = list[tuple[PanelSpec, list[go.Scatter]]]


def source_rows(read: SeriesReader, start_ns: int) -> list[Row]:
    """The rows of `PANEL_ROWS` with values, without their empty panels."""
    rows = []
    for row in PANEL_ROWS:
        drawn = [(panel, counter_traces(panel, read, start_ns)) for panel in row.panels]
        shown = [(panel, traces) for panel, traces in drawn if traces]
        if shown:
            rows.append(shown)
    return rows


def panel_grid(
    head: Sequence[str],
    rows: Sequence[Row],
    *,
    head_px: int,
    title: str,
    missing: Mapping[str, str],
) -> go.Figure:
    """A figure with its titles, axes and counters; the head's panels are left to the caller."""
    heights, span = [head_px, *(ROW_PX for _ in rows)], COLUMNS // len(head)
    absent = by_reason(missing)
    below = _LINE_PX * len(absent)
    titles = [*head, *(f"{panel.title} ({panel.unit})" for row in rows for panel, _ in row)]
    figure = make_subplots(
        rows=len(heights),
        cols=COLUMNS,
        specs=[
            [{"colspan": span} if at % span == 0 else None for at in range(COLUMNS)],
            *([{} if at < len(row) else None for at in range(COLUMNS)] for row in rows),
        ],
        row_heights=heights,
        subplot_titles=titles,
        horizontal_spacing=0.05,
        vertical_spacing=min(0.3, 56 / sum(heights)),
    )
    layout = figure_layout(title, height=sum(heights) + _FRAME_PX + below)
    layout["margin"] = {**layout["margin"], "b": _BOTTOM_PX + below}
    figure.update_layout(**layout)
    left_titles(figure)
    for number, row in enumerate(rows, start=2):
        for column, (panel, traces) in enumerate(row, start=1):
            for trace in traces:
                figure.add_trace(trace, row=number, col=column)
            figure.update_xaxes(row=number, col=column, **TIME_AXIS)
            top = [0, panel.top] if panel.top else None
            figure.update_yaxes(range=top, rangemode="tozero", row=number, col=column, **AXIS)
    for place, (what, why) in enumerate(absent):  # below the panels
        figure.add_annotation(
            text=f"{escape(what)}: not measured: {escape(shorten(why, _REASON_CHARS))}",
            showarrow=False, xref="paper", yref="paper", x=0, xanchor="left", y=0, yanchor="top",
            yshift=-(_BOTTOM_PX - 4 + _LINE_PX * place), font={"color": "#777777", "size": 11},
        )  # fmt: skip
    return figure


def same_time_axis(figure: go.Figure, axis: str, *, head: Sequence[str]) -> None:
    """Zooms all panels over time together."""
    for each in figure.select_xaxes():
        name = each.plotly_name.replace("axis", "")
        if name not in (*head, axis):
            each.update(matches=axis)


def left_titles(figure: go.Figure) -> None:
    """Moves the titles of panels to their left edge."""
    axes = list(figure.select_xaxes())
    for title in figure.layout.annotations:
        if title.yanchor == "bottom":  # a panel's, which stands over the middle of its axis
            axis = min(axes, key=lambda axis: abs(sum(axis.domain) / 2 - title.x))
            title.update(x=axis.domain[0], xanchor="left", font={"size": 13}, yshift=2)
