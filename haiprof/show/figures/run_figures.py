"""The plotly figures of a run, titled with the same numbers that the terminal shows."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from haiprof.base.units import MISSING, duration_text
from haiprof.run_analysis.rank_grid import rank_grid
from haiprof.show.figures.late_ranks import late_ranks_figure
from haiprof.show.figures.one_rank import one_rank_figure
from haiprof.show.figures.overview import overview_figure
from haiprof.show.figures.rank_map import rank_map_figure
from haiprof.show.figures.run_difference import Difference, run_difference_figure
from haiprof.show.rank_summary import OneRankSummary, one_rank_summary, rank_counters
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.source import RunData
from haiprof.show.split import select_judged_samples, select_judged_steps
from haiprof.show.summary import OverviewSummary, overview_summary, rank_name, rank_steps
from haiprof.show.tables.compare import headline, part_name, step_facts
from haiprof.show.text import count_text, moment_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from haiprof.diagnosis.compare.comparison import Comparison
    from haiprof.run_analysis.run_frames import RunFrames

_SMALL = "<br><span style='font-size:12px;color:#666666'>{}</span>"


def overview_picture(data: RunData) -> go.Figure:
    """The whole job as one interactive figure."""
    summary = overview_summary(data)
    counted = select_judged_steps(data.steps())
    return overview_figure(
        counted,
        select_judged_samples(data.counters(), counted, data.ranks()),
        splits=[(f"rank {rank_name(r)}", r.split_ns) for r in summary.ranks if r.step_count],
        missing=summary.missing,
        title=_title(summary.run, _overview_facts(summary)),
        start_ns=summary.span.start_ns if summary.span else 0,
    )


def one_rank_picture(data: RunData, rank: int) -> go.Figure:
    """One rank over time as one interactive figure."""
    summary = one_rank_summary(data, rank)
    counted = select_judged_steps(rank_steps(data.steps(), rank, summary.attempt))
    samples = rank_counters(data.counters(), rank, summary.about["host"])
    return one_rank_figure(
        counted,
        select_judged_samples(samples, counted, data.ranks()),
        missing=summary.missing,
        title=_title(summary.run, _rank_facts(summary)),
        start_ns=summary.span.start_ns if summary.span else 0,
    )


def rank_map_picture(data: RunData) -> go.Figure | None:
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
    return late_ranks_figure(late, title=_title(header, "lateness at collectives, per step"))


def comparison_picture(found: Comparison, *, title: str | None = None) -> go.Figure | None:
    """Two runs' steps and the difference of each part; None where neither has a step."""
    before, after = found.before.step_ns, found.after.step_ns
    if not len(before) and not len(after):
        return None
    parts = [
        Difference(name=part_name(part), ns=part.difference_ns, low_ns=part.low_ns,
                   high_ns=part.high_ns, is_sure=part.is_significant)
        for part in found.parts if part.before_ns or part.after_ns
    ]  # fmt: skip
    if title is None:
        small = f"{found.after.path.name} against {found.before.path.name}: {step_facts(found)}"
        title = f"<b>{escape(headline(found))}</b>{_SMALL.format(escape(small))}"
    return run_difference_figure(before, after, parts, title=title)


def _title(run: RunHeader, step_facts: str) -> str:
    started = f"started {moment_text(run.start_wall_ns)}, {duration_text(run.duration_ns)}"
    lines = [f"<b>{escape(run.name)}</b> {escape(run.outcome)}"]
    lines.append(_SMALL.format(escape(f"{started} · {step_facts}")))
    return "".join(lines)


def _overview_facts(summary: OverviewSummary) -> str:
    medians = [r.median_step_ns for r in summary.ranks if r.median_step_ns is not None]
    ranks = count_text(len({rank.rank for rank in summary.ranks}), "rank")
    if not medians:
        return f"{ranks} · no step recorded"
    low, high = duration_text(min(medians)), duration_text(max(medians))
    return f"{ranks} · median step {low if low == high else f'{low} to {high}'}"


def _rank_facts(summary: OneRankSummary) -> str:
    name = f"rank {summary.rank}" + (f", attempt {summary.attempt}" if summary.attempt else "")
    median = duration_text(summary.median_step_ns) if summary.step_count else MISSING
    return f"{name} · {count_text(summary.step_count, 'step')} · median step {median}"
