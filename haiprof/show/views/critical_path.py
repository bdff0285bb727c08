"""What `haiprof critical-path` shows: causes, names, and what they rest on."""

from __future__ import annotations

from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.text import count_text
from haiprof.show.views.blocks import notes_block, section
from haiprof.trace_analysis.critical_path import CriticalPath

_CAUSES = (
    ("bound_by", "cause"), ("duration_ns", "time"), ("share_ratio", "share"),
    ("segment_count", "pieces"),
)  # fmt: skip
_NAMES = (
    ("name", "name"), ("bound_by", "cause"), ("duration_ns", "time"), ("share_ratio", "share"),
    ("segment_count", "pieces"),
)  # fmt: skip
_OUTSIDE = "(host, outside of all events)"


def critical_path_view(path: CriticalPath) -> RenderableType:
    """The whole view."""
    changes = count_text(path.dependency_count, "change") + " between threads and streams"
    summary = f"{changes}, {path.assumed_count} of them assumed · confidence: {path.confidence}"
    causes = path.summary().filter(pl.col("duration_ns") > 0)
    causes = causes.sort("duration_ns", descending=True)
    names = path.top(12).with_columns(pl.col("name").fill_null(_OUTSIDE))
    parts = [
        Text(f"{path.window}, {duration_text(path.length_ns)}", style="bold"),
        Text(summary, style="dim"),
        section("What it consists of", *frame_table(causes, _CAUSES, limit=12)),
        section("By name", *frame_table(names, _NAMES, limit=12)),
    ]
    if path.caveats:
        parts.append(notes_block(path.caveats))
    return Group(*parts)


def critical_path_data(path: CriticalPath) -> dict[str, Any]:
    """The same as JSON, with every segment."""
    return {
        "window": path.window,
        "start_ns": path.start_ns,
        "end_ns": path.end_ns,
        "confidence": path.confidence,
        "dependency_count": path.dependency_count,
        "assumed_count": path.assumed_count,
        "caveats": list(path.caveats),
        "summary": path.summary().to_dicts(),
        "segments": path.segments().to_dicts(),
    }
