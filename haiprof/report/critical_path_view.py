"""What `haiprof critical-path` shows: causes, names, and what they rest on."""

from __future__ import annotations

from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.analysis.trace.critical.path import CriticalPath
from haiprof.report.blocks import notes_block, section
from haiprof.report.frame_table import frame_table
from haiprof.report.text import count_text
from haiprof.units import duration_text

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
    """The whole screen.

    Args:
        path: Of one window of one rank.
    """
    changes = count_text(path.dependency_count, "change") + " between threads and streams"
    facts = f"{changes}, {path.assumed_count} of them assumed · confidence: {path.confidence}"
    causes = path.summary().filter(pl.col("duration_ns") > 0)
    causes = causes.sort("duration_ns", descending=True)
    names = path.top(12).with_columns(pl.col("name").fill_null(_OUTSIDE))
    parts = [
        Text(f"{path.window}, {duration_text(path.length_ns)}", style="bold"),
        Text(facts, style="dim"),
        section("What it consists of", *frame_table(causes, _CAUSES, limit=12)),
        section("By name", *frame_table(names, _NAMES, limit=12)),
    ]
    if path.caveats:
        parts.append(notes_block(path.caveats))
    return Group(*parts)


def critical_path_data(path: CriticalPath) -> dict[str, Any]:
    """The same for scripts, with every segment."""
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
