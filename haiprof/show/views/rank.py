"""One rank over time in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base.units import MISSING, NS_PER_S, duration_text, ratio_text, visible
from haiprof.run_analysis.settings import RankSettings
from haiprof.run_analysis.step_boundaries import WORDS
from haiprof.show.rank_summary import OneRankSummary, SlowStep
from haiprof.show.series import Series
from haiprof.show.setting_rows import setting_rows
from haiprof.show.split_bar import SplitBar
from haiprof.show.split_legend import PhaseMark
from haiprof.show.text import count_text, number_text
from haiprof.show.views.blocks import (
    header_block,
    missing_block,
    notes_block,
    plain_table,
    section,
    series_block,
)

_EVENT_TITLES = {
    "gc": "garbage collection",
    "save": "checkpoint save",
    "eval": "evaluation forward",
    "dataloader_iter": "dataloader start",
    "nograd_forward": "forward without gradients",
}
_BOUNDARIES = {
    "dataloader": "a step begins with its batch",
    "optimizer": "a step ends with its optimizer",
    "backward": "a step ends with its backward",
    **WORDS,
}


def rank_view(summary: OneRankSummary) -> RenderableType:
    """The terminal view of a rank."""
    counts = count_text(summary.step_count, "step")
    parts = [header_block(summary.run, counts=counts), Text(), _identity(summary)]
    if summary.step_count:
        parts += [*_step_parts(summary)]
    if summary.events:
        parts.append(section("Besides the phases", _events(summary)))
    if summary.settings is not None:
        parts.append(section("Settings", _settings(summary.settings)))
    if summary.counter_series:
        parts.append(section("Counters", _over_time(summary, summary.counter_series)))
    if summary.missing:
        parts.append(missing_block(summary.missing))
    of_run = [note for note in summary.notes if not note.startswith("rank ")]
    notes = [*(summary.about.get("notes") or ()), *of_run]
    if notes:
        parts.append(notes_block(notes))
    return Group(*parts)


def _identity(summary: OneRankSummary) -> Text:
    about = summary.about
    text = Text(f"rank {summary.rank}", style="bold")
    words = [
        f"of {about['world_size']}" if about.get("world_size") else "",
        f"pid {about['pid']} on {about['host']}",
        f"Python {about['python']}" if about.get("python") else "",
        f"torch {about['torch']}" if about.get("torch") else "",
        str(about.get("device") or ""),
        f"attempt {summary.attempt}" if summary.attempt or summary.other_attempts else "",
    ]
    text.append("  " + " · ".join(fact for fact in words if fact), style="not bold dim")
    return text


def _step_parts(summary: OneRankSummary) -> Iterator[RenderableType]:
    yield section("Middle step", SplitBar(summary.split_ns), Text(_steps_line(summary)))
    yield section("Phases", _phases(summary))
    yield section("Over time", _over_time(summary, summary.phase_series))
    yield section("Slowest steps", _slowest(summary))


def _over_time(summary: OneRankSummary, series: Sequence[Series]) -> RenderableType:
    return series_block(series, summary.window, begin=summary.span)


def _steps_line(summary: OneRankSummary) -> str:
    parts = [f"median {duration_text(summary.median_step_ns)}"]
    boundary = _BOUNDARIES.get(summary.boundary or "")
    if boundary:
        parts.append(f"{boundary} (confidence {ratio_text(summary.confidence)})")
    if summary.skipped_step_count:
        parts.append(f"{count_text(summary.skipped_step_count, 'skipped step')}")
    return " · ".join(parts)


def _phases(summary: OneRankSummary) -> RenderableType:
    device = any(stat.device_median_ns is not None for stat in summary.phases)
    columns = ["", "phase", "median", "p95", "max", "share"]
    table = plain_table(*columns, *(["on the GPU"] if device else []), left=["", "phase"])
    for stat in summary.phases:
        row: list[RenderableType] = [PhaseMark(stat.phase), stat.phase]
        row += [duration_text(ns) for ns in (stat.median_ns, stat.p95_ns, stat.max_ns)]
        row.append(ratio_text(stat.share_ratio))
        table.add_row(*row, *([duration_text(stat.device_median_ns)] if device else []))
    return table


def _slowest(summary: OneRankSummary) -> RenderableType:
    table = plain_table("step", "at", "took", "of median", "mostly", left=["mostly"])
    for slow in summary.slowest:
        start_ns = summary.span.start_ns if summary.span else slow.start_ns
        table.add_row(
            str(slow.step),
            f"{(slow.start_ns - start_ns) / NS_PER_S:.1f} s",
            duration_text(slow.step_ns),
            f"{number_text(round(slow.over_median_ratio, 2))}x",
            _excess(slow),
        )
    return table


def _excess(slow: SlowStep) -> str:
    if not slow.longest_excess or not slow.longest_excess_ns or slow.longest_excess_ns <= 0:
        return MISSING
    return f"{slow.longest_excess} +{duration_text(slow.longest_excess_ns)}"


def _events(summary: OneRankSummary) -> RenderableType:
    table = plain_table("what", "count", "total", "longest", left=["what"])
    for event in summary.events:
        table.add_row(
            _EVENT_TITLES.get(event.phase, event.phase),
            str(event.count),
            duration_text(event.total_ns),
            duration_text(event.max_ns),
        )
    return table


def _settings(settings: RankSettings) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in setting_rows(settings):
        table.add_row(name, Text(visible(text)))
    return table
