"""The content of a run's page: words and tables for its text, numbers for its figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.rank_grid import RankGrid, rank_grid
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures.labels import by_reason
from haiprof.show.figures.late_ranks import late_ranks_figure
from haiprof.show.figures.over_time import over_time_figure
from haiprof.show.figures.rank_map import PARTS, heat_style
from haiprof.show.figures.style import FONT, PHASE_COLORS
from haiprof.show.flame import RunFlames, run_flames
from haiprof.show.page import run_sections as parts
from haiprof.show.page.comparison import ComparisonSection, comparison_section
from haiprof.show.page.counter_data import counter_data
from haiprof.show.page.death_part import DeathPart, death_part
from haiprof.show.page.memory_part import MemoryPart, memory_part
from haiprof.show.page.picture_parts import figure_data, plain_figure
from haiprof.show.page.slow_step import SlowStepPart, slow_step_part
from haiprof.show.page.step_data import map_data, step_data, traced_times
from haiprof.show.page.tables import PageTable
from haiprof.show.page.trace_sections import TraceSections, trace_sections
from haiprof.show.run_header import RunHeader
from haiprof.show.series import TimeRange
from haiprof.show.split import select_judged_samples, select_judged_steps
from haiprof.show.summary import OverviewSummary, overview_summary


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """A run as the page shows it."""

    header: RunHeader
    verdict: Verdict
    summary: OverviewSummary
    ranks: PageTable
    nodes: PageTable
    phases: PageTable
    slowest: PageTable
    slow_step: SlowStepPart | None
    late: PageTable
    collectives: PageTable
    death: DeathPart | None
    traces: TraceSections
    memory: MemoryPart
    windows: tuple[tuple[Path, ...], ...]
    """Trace files by window."""
    no_windows: str
    """Why there is none."""
    snapshots: PageTable | None
    environment: PageTable
    flames: RunFlames
    comparison: ComparisonSection | None
    """With the run that was asked for."""
    not_measured: tuple[tuple[str, str], ...]
    """Rows of counters that have no sample, with the reason."""
    data: Mapping[str, Any]
    """What the figures are drawn of, as plain JSON values."""


def page_content(
    analyzer: RunFrames, *, read_traces: bool = True, baseline: str | None = None
) -> PageContent:
    """Reads a run for its page, also one that still runs."""
    verdict = diagnose(analyzer, trace_limit_bytes=None if read_traces else 0)
    summary = overview_summary(analyzer, with_series=False, trace_limit_bytes=0)
    steps, late = analyzer.steps(), analyzer.lateness()
    judged = select_judged_steps(steps)
    windows, no_windows = parts.trace_files(analyzer.run)
    compared = comparison_section(analyzer, baseline, read_traces=read_traces) if baseline else None
    flames = run_flames(analyzer, compared.other if compared else None)
    traces = trace_sections(analyzer.run, read=read_traces)
    memory = memory_part(
        analyzer,
        select_judged_samples(analyzer.counters(), judged, analyzer.ranks()),
        missing=summary.missing,
        traced=bool(traces.memory),
        start_ns=time_start_ns(summary),
    )
    return PageContent(
        header=summary.run,
        verdict=verdict,
        summary=summary,
        ranks=parts.rank_table(summary),
        nodes=parts.node_table(summary),
        phases=parts.phase_table(judged, verdict.split),
        slowest=parts.slow_table(judged),
        slow_step=slow_step_part(analyzer, judged),
        late=parts.late_table(late),
        collectives=parts.collective_table(analyzer.collectives()),
        death=death_part(analyzer.files, verdict),
        traces=traces,
        memory=memory,
        windows=tuple(map(tuple, windows)),
        no_windows=no_windows,
        snapshots=parts.snapshot_table(analyzer.run),
        environment=parts.environment_table(
            analyzer.run, analyzer.files.manifest, analyzer.ranks()
        ),
        not_measured=tuple(by_reason(summary.missing)),
        flames=flames,
        comparison=compared,
        data={
            **_data(analyzer, summary, late, compared, traces),
            "memory": memory.data,
            "flame": flames.graph.as_json(),
        },
    )


def time_start_ns(summary: OverviewSummary) -> int:
    """Unix time of the first step or sample, from which the figures count seconds."""
    return summary.span.start_ns if summary.span else 0


def _data(
    analyzer: RunFrames,
    summary: OverviewSummary,
    late: pl.DataFrame,
    compared: ComparisonSection | None,
    traces: TraceSections,
) -> dict[str, Any]:
    """What the figures are drawn of."""
    steps, counters = analyzer.steps(), analyzer.counters()
    start_ns = time_start_ns(summary)
    grid = rank_grid(select_judged_steps(steps))
    return {
        "style": {"phases": PHASE_COLORS, "parts": list(PARTS), "font": FONT, "map": heat_style()},
        "span_s": summary.span.duration_ns / NS_PER_S if summary.span else 1.0,
        "window": _seconds(summary.window, start_ns),
        "traced": [_seconds(part, start_ns) for part in traced_times(steps)],
        "map": map_data(grid, start_ns) if grid else None,
        "steps": step_data(steps, start_ns) if grid else None,
        "counters": counter_data(counters, start_ns),
        "hosts": {str(row.rank): row.host for row in summary.ranks},
        "figures": {
            **dict(_figures(grid, late, compared, start_ns)),
            **figure_data(traces.pictures),
        },
    }


def _seconds(part: TimeRange | None, start_ns: int) -> list[float] | None:
    """Begin and end on the time axis of the figures."""
    if part is None:
        return None
    return [(ns - start_ns) / NS_PER_S for ns in (part.start_ns, part.end_ns)]


def _figures(
    grid: RankGrid | None, late: pl.DataFrame, compared: ComparisonSection | None, start_ns: int
) -> Iterator[tuple[str, Any]]:
    """The figures that do not depend on the reader's choices, as plain JSON values."""
    if grid is not None:
        yield "over-time", plain_figure(over_time_figure(grid, title="", start_ns=start_ns))
    if late["late_ns_per_step"].is_finite().any():
        yield "late", plain_figure(late_ranks_figure(late, title=""))
    if compared is not None and compared.figure is not None:
        yield "comparison", plain_figure(compared.figure)
