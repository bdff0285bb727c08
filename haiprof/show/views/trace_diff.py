"""What `haiprof trace-diff` shows: slower or not, and what makes the difference."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.views.blocks import notes_block, section
from haiprof.trace_analysis.diff import TraceDiff, Verdict

_COLUMNS = (
    ("name", "name"), ("change", "calls"), ("control_ns", "control"), ("test_ns", "test"),
    ("difference_ns", "difference"), ("explained_ratio", "explains"),
    ("adjusted_p_value", "p"),
)  # fmt: skip
_STYLES = {True: "bold red", False: "bold green", None: "bold yellow"}
_TITLES = {"kernel": "Kernels", "operator": "Operators"}


def diff_view(diff: TraceDiff, verdict: Verdict) -> RenderableType:
    """The whole view: times are means per step and rank."""
    time = diff.step_time
    words = f"step {duration_text(time.control_ns)} before, {duration_text(time.test_ns)} after"
    parts: list[RenderableType] = [
        Text(verdict.text, style=_STYLES[verdict.is_slower]),
        Text(words, style="dim"),
    ]
    for kind, title in _TITLES.items():
        changed = diff.names.filter((pl.col("of") == kind) & (pl.col("difference_ns") != 0))
        table = frame_table(changed, _COLUMNS, limit=10)
        parts.append(section(f"{title} per step, the largest difference first", *table))
    if diff.notes:
        parts.append(notes_block(diff.notes))
    return Group(*parts)


def diff_data(diff: TraceDiff, verdict: Verdict) -> dict[str, Any]:
    """The same as JSON, complete."""
    return {
        "is_slower": verdict.is_slower,
        "verdict": verdict.text,
        "step_time": {
            **asdict(diff.step_time),
            "difference_ns": diff.step_time.difference_ns,
            "change_ratio": diff.step_time.change_ratio,
        },
        "names": diff.names.to_dicts(),
        "steps": diff.steps.to_dicts(),
        "notes": list(diff.notes),
    }
