"""What `haiprof memory-timeline` shows of torch.profiler's own timeline: memory by category."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
from rich.console import RenderableType

from haiprof.base.units import bytes_text, duration_text
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.views.blocks import section
from haiprof.trace_analysis.memory_timeline import CATEGORIES, memory_by_category

_COLUMNS = (
    ("name", "category"), ("at_peak_bytes", "at the peak"), ("share_ratio", "share"),
    ("max_bytes", "its own most"), ("end_bytes", "at the end"),
)  # fmt: skip


def category_answers(path: Path) -> pl.DataFrame:
    """Memory by category over time."""
    return memory_by_category(path)


def category_json(timeline: pl.DataFrame) -> dict[str, Any]:
    """Plain data, whole."""
    return {"timeline": timeline.to_dicts(), "at_peak": _table(timeline).to_dicts()}


def category_view(timeline: pl.DataFrame) -> RenderableType:
    """What each category holds where all together hold most."""
    span = int(timeline["ts_ns"][-1]) - int(timeline["ts_ns"][0])
    peak = int(str(timeline["total_bytes"].max()))
    title = f"Memory by category, {duration_text(span)}, {bytes_text(peak)} at the peak"
    return section(title, *frame_table(_table(timeline), _COLUMNS, limit=len(CATEGORIES)))


def _table(timeline: pl.DataFrame) -> pl.DataFrame:
    peak = timeline.row(int(timeline["total_bytes"].arg_max() or 0), named=True)
    rows = [
        {
            "name": name.replace("_", " "),
            "at_peak_bytes": peak[f"{name}_bytes"],
            "share_ratio": peak[f"{name}_bytes"] / max(peak["total_bytes"], 1),
            "max_bytes": timeline[f"{name}_bytes"].max(),
            "end_bytes": timeline[f"{name}_bytes"][-1],
        }
        for name in CATEGORIES
    ]
    return pl.DataFrame(rows).sort("at_peak_bytes", descending=True)
