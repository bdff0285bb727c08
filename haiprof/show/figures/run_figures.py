"""The plotly figures of a run: overview, one rank, and two runs compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from haiprof.base.intervals import Floats
from haiprof.base.units import MISSING, NS_PER_MS, NS_PER_S, duration_text
from haiprof.run_analysis.ranks import rank_grid
from haiprof.run_analysis.run_files import median
from haiprof.show.figures.job import late_ranks_figure, rank_map_figure
from haiprof.show.figures.panel_table import frame_reader
from haiprof.show.figures.panels import (
    COLUMNS,
    ROW_PX,
    gap_starts,
    panel_grid,
    same_time_axis,
    source_rows,
    step_traces,
    thin_points,
    with_gaps,
)
from haiprof.show.figures.style import (
    AXIS,
    BLUE,
    BROWN,
    GREY,
    PHASE_COLORS,
    PHASES,
    TIME_AXIS,
    VERMILLION,
    figure_layout,
)
from haiprof.show.rank_summary import one_rank_summary, rank_counters
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.summary import (
    OverviewSummary,
    overview_summary,
    rank_name,
    rank_steps,
    read_counted_series,
    select_judged_samples,
    select_judged_steps,
)
from haiprof.show.text import count_text, moment_text
from haiprof.show.views.compare import headline, step_facts

if TYPE_CHECKING:
    from haiprof.diagnosis.compare.comparison import Change, Comparison
    from haiprof.run_analysis.run_frames import RunFrames

Split = Mapping[str, float | None]

_BAR_PX, _BAR_FRAME_PX, _HEAD_MAX_PX = 26, 60, 600
_LEGEND_LIMIT = 24


def _add_splits(figure: go.Figure, splits: Sequence[tuple[str, Split]]) -> None:
    names = [name for name, _ in splits]
    for phase in PHASES:
        times = [split[phase] for _, split in splits]
        whole = [sum(ns or 0.0 for ns in split.values()) for _, split in splits]
        shares = [
            None if ns is None or not total else ns / total * 100
            for ns, total in zip(times, whole, strict=True)
        ]
        figure.add_bar(
            x=[None if ns is None else ns / NS_PER_MS for ns in times],
            y=names,
            customdata=shares,
            orientation="h",
            name=phase,
            legendgroup=phase,
            marker={"color": PHASE_COLORS[phase]},
            text=[f"{share:.0f} %" if share and share >= 9 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": "#111111"},
            hovertemplate=f"{phase}: %{{x:.3r}} ms, %{{customdata:.1f}} %<extra>%{{y}}</extra>",
            row=1,
            col=1,
        )
    figure.update_xaxes(row=1, col=1, **AXIS)
    figure.update_yaxes(autorange="reversed", type="category", row=1, col=1)


_STEPS_PX = 320


def phase_areas(steps: pl.DataFrame, start_ns: int) -> list[go.Scatter]:
    """One stacked area per phase that was seen, in ms over seconds; hover names the step."""
    ordered = steps.sort("start_ns")
    if ordered.is_empty():
        return []
    seconds = (ordered["start_ns"].to_numpy() - start_ns) / NS_PER_S
    step_ns = ordered["step_ns"].to_numpy()
    ends = seconds + step_ns / NS_PER_S
    kept, breaks = thin_points(step_ns.astype(float)), gap_starts(seconds, ends)
    numbers = ordered["step"].to_numpy()
    found = []
    for phase in PHASES:
        column = ordered[f"{phase}_host_ns"]
        if column.null_count() == len(column):
            continue
        times_ms = column.cast(pl.Float64).to_numpy() / NS_PER_MS
        x, y, step = with_gaps(kept, breaks, [seconds, times_ms, numbers], ends)
        found.append(go.Scatter(
            x=x, y=y, customdata=step, name=phase, stackgroup="step", mode="lines",
            line={"width": 0, "color": PHASE_COLORS[phase], "shape": "hv"},
            fillcolor=PHASE_COLORS[phase],
            hovertemplate=f"{phase}: %{{y:.3r}} ms (step %{{customdata:.0f}})<extra></extra>",
        ))  # fmt: skip
    return found


BIN_COUNT = 60
_SHOWN_RATIO = 0.99
_HEIGHT_PX, _ROW_PX, _FRAME_PX = 220, 26, 150


def run_difference_figure(
    before_ns: Floats, after_ns: Floats, parts: Sequence[Change], *, title: str
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
        names = [part.title for part in parts]
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
            hovertemplate=f"{name}: %{{y:.3r}} % of its steps<extra></extra>",
        )  # fmt: skip


def _whiskers(parts: Sequence[Change]) -> Iterator[go.Scatter]:
    for name, color, chosen in (
        ("beyond chance", VERMILLION, [part for part in parts if part.is_certain]),
        ("may be chance", GREY, [part for part in parts if not part.is_certain]),
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


_SMALL = "<br><span style='font-size:12px;color:#666666'>{}</span>"


def overview_picture(data: RunFrames) -> go.Figure:
    """The whole job as one interactive figure: the mean step per rank, and panels over time."""
    counted = select_judged_steps(data.steps())
    digest = data.counter_digest(counted)
    summary = overview_summary(data, digest=digest)
    splits = [(f"rank {rank_name(r)}", r.split_ns) for r in summary.ranks if r.step_count]
    start_ns = summary.span.start_ns if summary.span else 0
    title = _title(summary.run, _overview_facts(summary))
    head = ["Mean step by phase (ms)", "Step time (ms)"]
    height = min(max(ROW_PX, _BAR_PX * len(splits) + _BAR_FRAME_PX), _HEAD_MAX_PX)
    rows = source_rows(read_counted_series(data, digest), start_ns)
    figure = panel_grid(head, rows, head_px=height, title=title, missing=summary.missing)
    _add_splits(figure, splits)
    place = {"row": 1, "col": COLUMNS // 2 + 1}
    for trace in step_traces(counted, start_ns):
        figure.add_trace(trace, **place)
    figure.update_xaxes(**place, **TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", **place, **AXIS)
    same_time_axis(figure, "x2", head=["x"])
    # One legend entry per phase, and per rank or host while they are few.
    names = {trace.legendgroup for trace in figure.data}
    shown, seen = names if len(names) <= _LEGEND_LIMIT else set(PHASES), set[str]()
    for trace in figure.data:
        trace.showlegend = trace.legendgroup in shown and trace.legendgroup not in seen
        if trace.showlegend:
            trace.name = trace.legendgroup
        seen.add(trace.legendgroup)
    return figure


def one_rank_picture(data: RunFrames, rank: int) -> go.Figure:
    """One rank over time: its real steps by phase, and below them the counters."""
    summary = one_rank_summary(data, rank)
    counted = select_judged_steps(rank_steps(data.steps(), rank, summary.attempt))
    samples = rank_counters(data, rank, summary.about["host"])
    read = frame_reader(select_judged_samples(samples, counted, data.ranks()))
    start_ns = summary.span.start_ns if summary.span else 0
    name = f"rank {summary.rank}" + (f", attempt {summary.attempt}" if summary.attempt else "")
    mean = duration_text(summary.mean_step_ns) if summary.step_count else MISSING
    facts = f"{name} · {count_text(summary.step_count, 'step')} · mean step {mean}"
    figure = panel_grid(
        ["Phases of each step (ms)"], source_rows(read, start_ns), head_px=_STEPS_PX,
        title=_title(summary.run, facts), missing=summary.missing,
    )  # fmt: skip
    for area in phase_areas(counted, start_ns):
        figure.add_trace(area, row=1, col=1)
    figure.update_xaxes(row=1, col=1, **TIME_AXIS)
    figure.update_yaxes(rangemode="tozero", row=1, col=1, **AXIS)
    same_time_axis(figure, "x", head=[])
    for trace in figure.select_traces(selector={"stackgroup": None}):
        trace.showlegend = False
    figure.update_layout(hovermode="x unified")
    return figure


def rank_map_picture(data: RunFrames) -> go.Figure | None:
    """All ranks over time as one interactive figure; None where there is no step."""
    grid = rank_grid(select_judged_steps(data.steps()))
    if grid is None:
        return None
    header = run_header(data.run, manifest_or_none(data.run))
    title = _title(header, f"{count_text(len(grid.ranks), 'rank')} over time")
    return rank_map_figure(grid, title=title, start_ns=grid.start_ns)


def late_ranks_picture(data: RunFrames) -> go.Figure | None:
    """How late each rank begins its collectives; None where that was not measured."""
    late = data.lateness()
    if not late["late_ns_per_step"].is_finite().any():
        return None
    header = run_header(data.run, manifest_or_none(data.run))
    return late_ranks_figure(
        late, title=_title(header, "lateness at collectives, per step"),
        step_ns=median(data.steps()["step_ns"]),
        hung=[rank for d in data.deaths() if d.final and d.cause == "hang" for rank in d.ranks],
    )  # fmt: skip


def comparison_picture(found: Comparison, *, title: str | None = None) -> go.Figure | None:
    """Two runs' steps and the difference of each part; None where neither has a step."""
    before, after = found.before.step_ns, found.after.step_ns
    if not len(before) and not len(after):
        return None
    if title is None:
        small = f"{found.after.path.name} against {found.before.path.name}: {step_facts(found)}"
        title = f"<b>{escape(headline(found))}</b>{_SMALL.format(escape(small))}"
    return run_difference_figure(before, after, found.positions, title=title)


def _title(run: RunHeader, step_facts: str) -> str:
    started = f"started {moment_text(run.start_wall_ns)}, {duration_text(run.duration_ns)}"
    lines = [f"<b>{escape(run.name)}</b> {escape(run.outcome)}"]
    lines.append(_SMALL.format(escape(f"{started} · {step_facts}")))
    return "".join(lines)


def _overview_facts(summary: OverviewSummary) -> str:
    means = [r.mean_step_ns for r in summary.ranks if r.mean_step_ns is not None]
    ranks = count_text(len({rank.rank for rank in summary.ranks}), "rank")
    if not means:
        return f"{ranks} · no step recorded"
    low, high = duration_text(min(means)), duration_text(max(means))
    return f"{ranks} · mean step {low if low == high else f'{low} to {high}'}"
