"""The content of a run's page: words and tables for its text, numbers for its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.units import NS_PER_S, duration_text, ranks_text
from haiprof.diagnosis.compare.compared_run import baseline_named, open_compared_run
from haiprof.diagnosis.compare.comparison import compare_runs
from haiprof.diagnosis.engine import STANDSTILL, judge
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.before_death import Stretch, last_seconds, time_range
from haiprof.run_analysis.counter_summaries import CounterDigest
from haiprof.run_analysis.deaths import Fate
from haiprof.run_analysis.ranks import rank_grid
from haiprof.run_analysis.run_files import RunFiles
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures import job
from haiprof.show.figures.panel_table import panel_metrics
from haiprof.show.figures.style import FONT, PHASE_COLORS
from haiprof.show.flame import RunFlames, run_flames
from haiprof.show.frame_table import PageTable
from haiprof.show.page import run_sections as parts
from haiprof.show.page.counter_data import counter_data, map_data, step_data, traced_times
from haiprof.show.page.ledger_part import DevicePart, LedgerPart, device_part, ledger_part
from haiprof.show.page.memory_part import MemoryPart, memory_part
from haiprof.show.run_header import RunHeader, lead_with_a_stall
from haiprof.show.series import TimeRange
from haiprof.show.summary import OverviewSummary, overview_summary, select_judged_steps
from haiprof.show.text import by_reason, moment_text, printable
from haiprof.show.views import compare as rows
from haiprof.show.views import deaths

_KERNEL_LIMIT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSection:
    """A section of the page; all but `missing` is empty without a baseline."""

    state: str = "undecided"
    headline: str = ""
    lines: tuple[str, ...] = ()  # What was compared
    tables: tuple[PageTable, ...] = ()
    notes: tuple[str, ...] = ()  # Caveats of the claim, and what could not be compared
    missing: str = ""  # Why there is no comparison
    figure: go.Figure | None = None
    data: Mapping[str, Any] | None = None  # As `haiprof compare --json`
    other: RunFrames | None = None  # The run that it is compared with


def comparison_section(
    analyzer: RunFrames, baseline: str, *, read_traces: bool
) -> ComparisonSection:
    """Compares the page's run with another."""
    after = open_compared_run(analyzer)
    try:
        chosen = baseline_named(baseline, after)
    except MissingDataError as error:
        return ComparisonSection(missing=printable(str(error)))
    found = compare_runs(chosen.side, after, read_traces=read_traces)
    kernels = [f"kernels: {found.no_kernels}"] if found.no_kernels else []
    steps = found.before.step_ns, found.after.step_ns
    return ComparisonSection(
        state=found.state, headline=rows.headline(found),
        lines=tuple(rows.headline_notes(found, chosen.why)),
        tables=tuple(rows.tables(found, limit=_KERNEL_LIMIT)),
        notes=tuple(map(printable, (*rows.notes(found), *kernels))),
        figure=job.run_difference_figure(*steps, found.positions) if any(map(len, steps)) else None,
        data=rows.compare_data(found, chosen=chosen.why, of=chosen.of),
        other=found.before.analyzer,
    )  # fmt: skip


_ROWS = 64
_ORDER = ("cause", "victim", "stopped", "unknown", "clean", "absent")


class TimelineRow(NamedTuple):
    """One rank's last seconds: places in percent of the picture's width."""

    name: str
    stretches: tuple[tuple[str, float, float], ...]  # Phase, left, width
    end: float | None  # Where it ended
    role: str
    what: str


class DeathPart(NamedTuple):
    """What the page says of the death of a run, beside what the verdict has of it."""

    word: str
    then: str  # What a job script should do; empty where that is not known
    facts: tuple[str, ...]
    fates: PageTable
    rows: tuple[TimelineRow, ...]
    ends: tuple[str, str]  # What the ends of the time axis are
    more: int  # Ranks that are left out of the picture


def death_part(files: RunFiles, verdict: Verdict) -> DeathPart | None:
    """The death as the page shows it; None where the job has not died."""
    death = verdict.death
    if death is None:
        return None
    fates = sorted(death.fates, key=lambda f: (_ORDER.index(f.role), f.ended_ns or 0, f.rank))
    rows = [tuple(map(printable, row)) for row in deaths.grouped_fates(death)]
    between = time_range(death)
    lanes = tuple(
        _row(fate, last_seconds(files, death, fate), *between) for fate in fates[:_ROWS] if between
    )
    head = ("ranks", "", "what became of them")
    died = death.died_ns or (between[1] if between else 0)
    before, after = (died - between[0], between[1] - died) if between else (0, 0)
    return DeathPart(
        word=deaths.WORDS.get(death.cause, death.cause),
        then="" if verdict.advice is None else deaths.advice_text(verdict.advice),
        facts=(f"at {moment_text(death.died_ns)}; order of ends: {death.clock}",
               *deaths.said_lines(death), *deaths.memory_lines(verdict),
               *deaths.start_lines(verdict.starts, death)),
        fates=PageTable("", head, rows, left=head), rows=lanes, more=max(0, len(fates) - _ROWS),
        ends=(f"{duration_text(before)} before the failure", f"{duration_text(after)} after it"),
    )  # fmt: skip


def _row(fate: Fate, stretches: Sequence[Stretch], begin: int, end: int) -> TimelineRow:
    scale = 100 / max(end - begin, NS_PER_S)

    def position(time_ns: int) -> float:
        return round(min(max((time_ns - begin) * scale, 0.0), 100.0), 2)

    pieces: list[tuple[str, float, float]] = []
    for piece in stretches:
        left = position(piece.begin_ns)
        pieces.append((piece.phase, left, max(round(position(piece.end_ns) - left, 2), 0.1)))
    ended = None if fate.ended_ns is None else position(fate.ended_ns)
    return TimelineRow(f"rank {fate.rank}", tuple(pieces), ended, fate.role, printable(fate.what))


@dataclass(frozen=True, slots=True, kw_only=True)
class PageContent:
    """A run as the page shows it."""

    header: RunHeader
    verdict: Verdict
    ledger: LedgerPart | None
    device: DevicePart | None  # Of the GPUs in the last traced window
    summary: OverviewSummary
    ranks: PageTable
    nodes: PageTable
    phases: PageTable
    slowest: PageTable
    late: PageTable
    hung: str  # Ranks that hung, for which the others waited to the end; empty without any
    collectives: PageTable
    death: DeathPart | None
    traces: parts.TraceSections
    memory: MemoryPart
    windows: tuple[tuple[Path, ...], ...]  # Trace files by window
    snapshots: PageTable | None
    environment: tuple[tuple[str, str], ...]
    options: tuple[tuple[str, str], ...]
    one_rank: tuple[tuple[str, str], ...]  # Facts of the only rank and its host
    flames: RunFlames
    comparison: ComparisonSection | None  # With the run that was asked for
    not_measured: tuple[tuple[str, str], ...]
    """What has no number anywhere on the page, with the reason."""
    data: Mapping[str, Any]  # What the figures are drawn of, as plain JSON values

    @property
    def has_ranks(self) -> bool:
        """Whether several ranks trained."""
        steps = self.data["steps"]
        return steps is not None and len(steps["ranks"]) > 1


def page_content(
    analyzer: RunFrames, *, read_traces: bool = True, baseline: str | None = None
) -> PageContent:
    """Reads a run for its page, also one that still runs."""
    verdict, found = judge(analyzer, trace_limit_bytes=None if read_traces else 0)
    ledger = ledger_part(verdict, found)
    judged = select_judged_steps(analyzer.steps())
    digest = analyzer.counter_digest(judged)
    summary = overview_summary(analyzer, with_series=False, trace_limit_bytes=0, digest=digest)
    verdict = lead_with_a_stall(verdict, summary.run, analyzer)
    ranks, nodes = parts.rank_table(summary), parts.node_table(summary)
    late, hung = analyzer.lateness(), _hung_ranks(verdict)
    known = late["late_ns_per_step"].is_finite().any()
    late_figure = job.late_ranks_figure(late, step_ns=verdict.step_ns, hung=hung) if known else None
    windows, no_windows = parts.trace_files(analyzer.run)
    compared = comparison_section(analyzer, baseline, read_traces=read_traces) if baseline else None
    flames = run_flames(analyzer, compared.other if compared else None, found)
    traces = parts.trace_sections(analyzer.run, read=read_traces)
    start_ns = time_start_ns(summary)
    memory = memory_part(
        analyzer, digest, missing=summary.missing, traced=bool(traces.memory), start_ns=start_ns
    )
    others = {"lines of code": flames.missing, "traces": no_windows}
    return PageContent(
        header=summary.run, verdict=verdict, ledger=ledger, device=device_part(verdict.device),
        summary=summary, ranks=ranks, nodes=nodes, phases=parts.phase_table(judged),
        slowest=parts.slow_table(judged), late=parts.late_table(late),
        hung=ranks_text(hung) if hung else "",
        collectives=parts.collective_table(analyzer.collectives()),
        death=death_part(analyzer.files, verdict), traces=traces, memory=memory,
        windows=tuple(map(tuple, windows)), snapshots=parts.snapshot_table(analyzer.run),
        environment=parts.environment_pairs(
            analyzer.run, analyzer.files.manifest, analyzer.ranks()
        ),
        options=parts.option_pairs(analyzer.files.manifest),
        one_rank=parts.one_rank_facts(ranks, nodes),
        not_measured=tuple(by_reason({
            **dict(verdict.not_measured), **summary.missing, **dict(memory.missing),
            **dict(traces.missing), **{what: why for what, why in others.items() if why},
        })),
        flames=flames, comparison=compared,
        data={
            **_data(analyzer, judged, summary, late_figure, compared, traces, digest),
            "accounts": ledger.data if ledger else {"counts": {}},
            "memory": memory.data,
            "flame": flames.graph.as_json(),
        },
    )  # fmt: skip


def _hung_ranks(verdict: Verdict) -> tuple[int, ...]:
    """Ranks for which the others waited to the end, or still do."""
    if verdict.death is not None:
        return verdict.death.ranks if verdict.death.cause == "hang" else ()
    found = (f for f in verdict.findings if f.rule == STANDSTILL and f.severity == "critical")
    return tuple(each.rank for each in found if each.rank is not None)


def time_start_ns(summary: OverviewSummary) -> int:
    """Unix time of the first step or sample, from which the figures count seconds."""
    return summary.span.start_ns if summary.span else 0


def _data(
    analyzer: RunFrames, judged: pl.DataFrame, summary: OverviewSummary, late: go.Figure | None,
    compared: ComparisonSection | None, traces: parts.TraceSections, digest: CounterDigest,
) -> dict[str, Any]:  # fmt: skip
    """What the figures are drawn of."""
    steps = analyzer.steps()
    read = analyzer.read_series(panel_metrics().intersection(digest.present))
    start_ns = time_start_ns(summary)
    grid = rank_grid(judged)
    several = grid if grid and len(grid.ranks) > 1 else None
    figures = {
        "over-time": job.over_time_figure(several, start_ns=start_ns) if several else None,
        "late": late, "comparison": compared.figure if compared else None,
    }  # fmt: skip
    return {
        "style": {"phases": PHASE_COLORS, "parts": list(job.PARTS), "font": FONT,
                  "map": job.HEAT_STYLE},
        "span_s": summary.span.duration_ns / NS_PER_S if summary.span else 1.0,
        "window": summary.window and _seconds(summary.window, start_ns),
        "traced": [_seconds(part, start_ns) for part in traced_times(steps)],
        "map": map_data(several, start_ns) if several else None,
        "steps": step_data(steps, start_ns) if grid else None,
        "counters": counter_data(read, start_ns),
        "hosts": {str(row.rank): row.host for row in summary.ranks},
        "figures": {
            **{name: parts.plain_figure(each) for name, each in figures.items() if each},
            **{each.name: each.figure for each in traces.pictures},
        },
    }  # fmt: skip


def _seconds(part: TimeRange, start_ns: int) -> list[float]:
    """Begin and end on the time axis of the figures."""
    return [(ns - start_ns) / NS_PER_S for ns in (part.start_ns, part.end_ns)]
