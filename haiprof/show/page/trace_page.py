"""The page of traces: pictures and tables of what they say, in one file that opens anywhere."""

from __future__ import annotations

from dataclasses import dataclass

from haiprof.show.figures.style import FONT
from haiprof.show.page.picture_parts import figure_data, page_pictures
from haiprof.show.page.render import trace_html
from haiprof.show.page.tables import page_table
from haiprof.show.text import count_text, printable
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.files import fault_lines
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import TraceReport
from haiprof.trace_format.checks.finding import EVERYTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """What stands on top."""

    name: str
    facts: str


def trace_page_html(report: TraceReport, traces: TraceQuestions) -> str:
    """The page with plotly, its script and all numbers inside; it needs no network."""
    pictures, missing = page_pictures(traces, report.steps)
    tables = [
        page_table(each.title, each.rows, each.columns, limit=each.limit, note=each.legend)
        for each in shown_tables(report)
    ]
    events = count_text(int(report.tables["files"]["event_count"].sum()), "event")
    reasons = [(name.replace("_", " "), why) for name, why in report.missing.items()]
    return trace_html(
        _Header(name=report.path.name, facts=f"{count_text(len(report.ranks), 'rank')} · {events}"),
        {"style": {"font": FONT}, "figures": figure_data(pictures)},
        faults=fault_lines(report.tables["checks"], EVERYTHING),
        pictures=pictures,
        tables=tables,
        missing=[(what, printable(why)) for what, why in [*missing, *reasons]],
        notes=[printable(note) for note in report.notes],
    )
