"""The whole job over time: step time, its parts, who is late; and two runs compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.intervals import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.ranks import RankGrid
from haiprof.show.figures import style

if TYPE_CHECKING:
    from haiprof.diagnosis.compare.comparison import Change

LINE_LIMIT = 8  # More ranks than this are drawn as their spread
_HEIGHT_PX = 520
_BAND = "rgba(0, 114, 178, 0.25)"


def over_time_figure(grid: RankGrid, *, start_ns: int) -> go.Figure:
    """Step time above, phases below; of more than eight ranks the median, most and the slowest."""
    unit, unit_ns = style.time_unit(grid.typical_ns["step"])
    edges = np.linspace(grid.start_ns, grid.end_ns, grid.column_count + 1)
    seconds = (edges - start_ns) / NS_PER_S
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=[f"Step time ({unit})", f"Phases of a step, mean over ranks ({unit})"],
    )  # fmt: skip
    lines = _spread(grid, seconds) if len(grid.ranks) > LINE_LIMIT else (
        _line(seconds, grid.step_ns[place], f"rank {rank}", style.series_color(rank))
        for place, rank in enumerate(grid.ranks)
    )  # fmt: skip
    for trace in lines:
        figure.add_trace(trace, row=1, col=1)
    for trace in _areas(grid, seconds):
        figure.add_trace(trace, row=2, col=1)
    for trace in figure.data:
        trace.y = np.asarray(trace.y, dtype=np.float32) * np.float32(NS_PER_MS / unit_ns)
        trace.hovertemplate = trace.hovertemplate.replace(" ms<", f" {unit}<")
    figure.update_layout(**style.figure_layout("", height=_HEIGHT_PX))
    figure.update_annotations(x=0, xanchor="left", font={"size": 13}, yshift=2)
    figure.update_xaxes(**style.TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", **style.AXIS)
    return figure


def _spread(grid: RankGrid, seconds: Floats) -> Iterator[go.Scatter]:
    """The slowest rank of each stretch is named on hover; where there is no step is a gap."""
    values = grid.step_ns
    seen = ~np.isnan(values).all(axis=0)
    filled = np.where(seen, values, 0.0)
    slowest = np.nanargmax(filled, axis=0)
    lines = np.nanpercentile(filled, [5, 50, 95, 100], axis=0)
    low, middle, high, tops = np.where(seen, lines, np.nan)
    yield _line(seconds, low, "95 % of ranks", style.BLUE, width=0, showlegend=False)
    yield _line(
        seconds, high, "middle 90 % of ranks", style.BLUE, width=0, fill="tonexty", fillcolor=_BAND
    )
    yield _line(seconds, middle, "median rank", style.BLUE)
    names = [grid.ranks[place] for place in slowest]
    top = _line(seconds, tops, "slowest rank", style.VERMILLION)
    template = "slowest, rank %{customdata}: %{y:.3r} ms<extra></extra>"
    yield top.update(customdata=[*names, names[-1]], hovertemplate=template)


def _areas(grid: RankGrid, seconds: Floats) -> Iterator[go.Scatter]:
    for phase in style.PHASES:
        values = grid.phase_ns[phase]
        seen = ~np.isnan(values).all(axis=0)
        if seen.any():
            mean = np.full(values.shape[1], np.nan)
            mean[seen] = np.nanmean(values[:, seen], axis=0)
            color = style.PHASE_COLORS[phase]
            yield _line(seconds, mean, phase, color, width=0, stackgroup="step", fillcolor=color)


def _line(
    seconds: Floats, values_ns: Floats, name: str, color: str, *, width: float = 1.5,
    **more: Any,  # noqa: ANN401 - of plotly's line
) -> go.Scatter:  # fmt: skip
    """A line of steps, each value until the next stretch begins."""
    values = np.append(values_ns, values_ns[-1:]) / NS_PER_MS
    said = f"{name}: %{{y:.3r}} ms"
    return stepped_line(seconds, values, name, color, said=said, width=width, **more)


def stepped_line(
    x: Floats, y: Floats, name: str, color: str, *, said: str, width: float = 1.5,
    dash: str = "solid", **more: object,
) -> go.Scatter:  # fmt: skip
    """A line whose values hold until the next one; `said` is what hovering tells."""
    return go.Scatter(
        x=x.astype(np.float32), y=y.astype(np.float32), name=name, mode="lines",
        line={"color": color, "width": width, "shape": "hv", "dash": dash},
        hovertemplate=f"{said}<extra></extra>", **more,
    )  # fmt: skip


def rank_bars(
    ranks: pl.Series, values: pl.Series, marked: Iterable[bool], unit: str, *, said: str,
    title: str = "", height: int, **bar: object,
) -> go.Figure:  # fmt: skip
    """A bar for each rank, in another colour where it is marked."""
    figure = go.Figure(go.Bar(
        x=ranks.to_list(), y=values.to_list(),
        marker={"color": [style.VERMILLION if is_marked else style.BLUE for is_marked in marked]},
        hovertemplate=f"rank %{{x}}: %{{y:.3r}} {unit} {said}<extra></extra>", **bar,
    ))  # fmt: skip
    figure.update_layout(**style.figure_layout(title, height=height))
    figure.update_xaxes(title="rank", tickformat="d", **style.AXIS)
    figure.update_yaxes(ticksuffix=f" {unit}", **style.AXIS)
    return figure


PARTS = ("step", *style.PHASES)
LOW_PERCENT, HIGH_PERCENT = -50, 100
# Blue is faster than the median step, red slower; told apart with every common colour blindness.
_MIDDLE = -LOW_PERCENT / (HIGH_PERCENT - LOW_PERCENT)
SCALE = ((0.0, style.BLUE), (_MIDDLE, "#F2F2F2"), (0.5, "#F0B58A"), (1.0, style.VERMILLION))


HEAT_STYLE = {
    "zmin": LOW_PERCENT, "zmax": HIGH_PERCENT, "colorscale": [list(stop) for stop in SCALE],
    "hoverongaps": False,
    "hovertemplate": "rank %{y}, %{x:.1f} s: %{customdata:.3r} ms, "
    "%{z:+.1f} % of a median step above the median<extra></extra>",
    "colorbar": {"ticksuffix": " %", "thickness": 12, "outlinewidth": 0},
}  # fmt: skip
"""Of a heat map of ranks, without its numbers."""
_LATE_RANKS_HEIGHT_PX = 320
_FEW_RANKS, _WIDTH = 16, 0.8
_LATE_RATIO = 0.02  # Of a step: what is less says nothing of a rank


def late_ranks_figure(
    late: pl.DataFrame, *, step_ns: float | None, hung: Sequence[int] = ()
) -> go.Figure:
    """One bar per rank: its lateness per step in the group in which it is latest."""
    known = late.filter(pl.col("late_ns_per_step").is_finite()).sort(-pl.col("late_ns_per_step"))
    worst = known.unique("rank", keep="first", maintain_order=True)
    ordered = worst.sort("rank")
    marked = set(hung) or set(
        worst.head(1).filter(pl.col("late_ns_per_step") >= _LATE_RATIO * (step_ns or 0))["rank"]
    )
    figure = rank_bars(
        ordered["rank"], ordered["late_ns_per_step"] / NS_PER_MS,
        [rank in marked for rank in ordered["rank"]], "ms",
        said="late per step, alone last at %{customdata:.0f} % of its collectives",
        height=_LATE_RANKS_HEIGHT_PX, customdata=(ordered["last_ratio"] * 100).to_list(),
    )  # fmt: skip
    figure.update_yaxes(rangemode="tozero")
    if ordered.height <= _FEW_RANKS:  # a tick for each, and no bar as wide as the page
        figure.update_xaxes(dtick=1)
        figure.update_traces(width=min(_WIDTH, ordered.height / _FEW_RANKS))
    return figure


BIN_COUNT = 60
_SHOWN_RATIO = 0.99
_LENGTHS_PX, _PART_PX, _AROUND_PX = 220, 26, 150


def run_difference_figure(
    before_ns: Floats, after_ns: Floats, parts: Sequence[Change]
) -> go.Figure:
    """Step times of both runs as shares by length, above the difference of each part.

    The longest 1 % of the steps of either run may lie beyond the axis: otherwise one stall would
    squeeze all others into one bar.
    """
    rows = 2 if parts else 1
    lower = _PART_PX * len(parts)
    titles = ["Steps by length (%)", "Difference by part, with 99 % intervals"]
    spacing = 80 / (_LENGTHS_PX + lower + 80)
    figure = make_subplots(
        rows=rows, cols=1, subplot_titles=titles[:rows],
        **({"row_heights": [_LENGTHS_PX, lower], "vertical_spacing": spacing} if parts else {}),
    )  # fmt: skip
    for trace in _lengths(before_ns, after_ns):
        figure.add_trace(trace, row=1, col=1)
    for trace in _whiskers(parts):
        figure.add_trace(trace, row=2, col=1)
    figure.update_layout(**style.figure_layout("", height=_LENGTHS_PX + lower + _AROUND_PX))
    figure.update_annotations(x=0, xanchor="left", font={"size": 13}, yshift=2)
    figure.update_xaxes(ticksuffix=" ms", **style.AXIS)
    figure.update_yaxes(rangemode="tozero", **style.AXIS, row=1, col=1)
    if parts:
        names = [part.title for part in parts]
        figure.update_yaxes(**style.AXIS, type="category", categoryorder="array",
                            categoryarray=names[::-1], row=2, col=1)  # fmt: skip
        figure.add_vline(x=0, line={"color": style.GREY, "width": 1}, row=2, col=1)
    return figure


def _lengths(before_ns: Floats, after_ns: Floats) -> Iterator[go.Scatter]:
    runs = [values / NS_PER_MS for values in (before_ns, after_ns)]
    known = [values for values in runs if len(values)]
    if not known:
        return
    low = min(float(values.min()) for values in known)
    high = max(float(np.quantile(values, _SHOWN_RATIO)) for values in known)
    edges = np.linspace(low, max(high, low * (1 + 1e-6)), BIN_COUNT + 1)
    for name, values, color in zip(
        ("baseline", "new run"), runs, (style.BROWN, style.BLUE), strict=True
    ):
        if not len(values):
            continue
        shares = np.histogram(values, edges)[0] / len(values) * 100
        said = f"{name}: %{{y:.3r}} % of its steps"
        yield stepped_line(edges, np.append(shares, shares[-1:]), name, color, said=said, width=2)


def _whiskers(parts: Sequence[Change]) -> Iterator[go.Scatter]:
    for name, color, chosen in (
        ("beyond chance", style.VERMILLION, [part for part in parts if part.is_certain]),
        ("may be chance", style.GREY, [part for part in parts if not part.is_certain]),
    ):
        if not chosen:
            continue
        middle, low, high = (
            np.array([getattr(part, key) for part in chosen]) / NS_PER_MS
            for key in ("difference_ns", "low_ns", "high_ns")
        )
        yield go.Scatter(
            x=middle.tolist(), y=[part.title for part in chosen], name=name, mode="markers",
            marker={"color": [color] * len(chosen), "size": 9},
            line={"color": color},
            error_x={"type": "data", "symmetric": False, "array": (high - middle).tolist(),
                     "arrayminus": (middle - low).tolist(), "color": color, "thickness": 2,
                     "width": 5},
            customdata=np.stack([low, high], axis=1).tolist(),
            hovertemplate="%{y}: %{x:+.4g} ms (%{customdata[0]:+.4g} to %{customdata[1]:+.4g})"
            "<extra></extra>",
        )  # fmt: skip
