"""What `haiprof memory-timeline` shows of a snapshot: what is allocated, by line, and in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Group, RenderableType

from haiprof.show.tables.frame_table import frame_table
from haiprof.show.views.blocks import section
from haiprof.trace_format.memory_snapshot import read_memory_snapshot, sum_by_line

_DEVICES = (
    ("device", "GPU"), ("reserved_bytes", "reserved"), ("allocated_bytes", "allocated"),
    ("free_bytes", "cached, free"), ("largest_free_bytes", "largest piece"),
    ("private_bytes", "private pools"), ("segment_count", "segments"),
)  # fmt: skip
_LINES = (
    ("device", "GPU"), ("name", "allocated at"), ("block_count", "blocks"), ("size_bytes", "size"),
    ("share_ratio", "share"),
)  # fmt: skip
_FAILED = (
    ("device", "GPU"), ("name", "allocated at"), ("size_bytes", "asked for"),
    ("device_free_bytes", "free on the device"),
)  # fmt: skip
_BEFORE = "(before the history began)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAnswers:
    """What a snapshot of the CUDA caching allocator says."""

    devices: pl.DataFrame
    by_line: pl.DataFrame
    failed: pl.DataFrame
    """Allocations in its history that failed, oldest first."""
    event_count: int

    def as_json(self) -> dict[str, Any]:
        """Plain data, whole."""
        frames = {"devices": self.devices, "by_line": self.by_line, "failed": self.failed}
        return {
            **{name: frame.to_dicts() for name, frame in frames.items()},
            "event_count": self.event_count,
        }


def snapshot_answers(path: Path) -> SnapshotAnswers:
    """Reads a snapshot; nothing in it is executed."""
    from haiprof.run_format.stack_frames import frame_text, own_frame

    found = read_memory_snapshot(path)
    free = found.blocks.filter(pl.col("state") == "inactive").group_by("device").agg(
        free_bytes=pl.col("size_bytes").sum(), largest_free_bytes=pl.col("size_bytes").max()
    )  # fmt: skip
    devices = found.segments.group_by("device").agg(
        reserved_bytes=pl.col("size_bytes").sum(), allocated_bytes=pl.col("allocated_bytes").sum(),
        private_bytes=pl.col("size_bytes").filter("private").sum(),
        segment_count=pl.len().cast(pl.Int64),
    ).join(free, on="device", how="left").sort("device")  # fmt: skip
    own = [own_frame(stack) for stack in found.stacks]
    places = {number: frame_text(frame) for number, frame in enumerate(own) if frame is not None}
    failed = found.events.filter(pl.col("action") == "oom").with_columns(
        line=pl.col("stack").replace_strict(places, default=None, return_dtype=pl.String)
    )
    total = pl.col("size_bytes").sum().over("device")
    by_line = sum_by_line(found).with_columns(share_ratio=pl.col("size_bytes") / total)
    return SnapshotAnswers(
        devices=devices,
        by_line=by_line,
        failed=failed.select("device", "time_ns", "line", "size_bytes", "device_free_bytes"),
        event_count=found.events.height,
    )


def snapshot_view(answers: SnapshotAnswers) -> RenderableType:
    """The whole view."""
    named = pl.col("line").fill_null(_BEFORE).alias("name")
    parts = [
        section("GPU memory in the snapshot", *frame_table(answers.devices, _DEVICES, limit=16))
    ]
    if answers.by_line.height:
        lines = answers.by_line.with_columns(named)
        parts.append(section("In use, by line of your code", *frame_table(lines, _LINES, limit=20)))
    if answers.failed.height:
        failed = answers.failed.with_columns(named)
        parts.append(section("Allocations that failed", *frame_table(failed, _FAILED, limit=8)))
    return Group(*parts)
