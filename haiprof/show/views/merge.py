"""What `haiprof merge` shows: each rank, what of it was merged, and how its clock was found."""

from __future__ import annotations

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.show.tables.frame_table import frame_table
from haiprof.show.text import count_text
from haiprof.show.views.blocks import notes_block, section
from haiprof.trace_analysis.matching import RULE
from haiprof.trace_analysis.merge import MergeReport

_COLUMNS = (
    ("rank", "rank"), ("merged_count", "events"), ("method", "clock"), ("moved_ns", "moved"),
    ("offset_ns", "seems ahead"), ("residual_ns", "± spread"), ("collective_count", "collectives"),
)  # fmt: skip
_SCHEMA = {name: pl.String if name == "method" else pl.Int64 for name, _ in _COLUMNS}
_LIMIT = 40


def merge_view(report: MergeReport) -> RenderableType:
    """The whole view."""
    merged = report.merged
    rows = [{name: row[name] for name in _SCHEMA} for row in report.as_json()["ranks"]]
    summary = f"{count_text(len(rows), 'rank')}, {count_text(merged.event_count, 'event')}"
    if merged.track_event_count:
        summary += f", {merged.track_event_count} of them haiprof's phases and counters"
    parts = [
        Text(str(report.path), style="bold"),
        Text(summary, style="dim"),
        section(
            "Ranks and their clocks",
            *frame_table(pl.DataFrame(rows, schema=_SCHEMA), _COLUMNS, limit=_LIMIT),
            Text(RULE, style="dim"),
        ),
    ]
    if report.notes:
        parts.append(notes_block(report.notes))
    return Group(*parts)
