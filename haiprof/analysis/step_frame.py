"""The frame of steps: one row per rank, attempt and step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from haiprof.analysis.boundaries import BOUNDARIES
from haiprof.analysis.segments import RankSegments
from haiprof.analysis.steps import PHASES

STEP_PHASES = (*PHASES, "other")
"""What a step's time is split into."""
STEP_SCHEMA = {
    "rank": pl.Int64,
    "attempt": pl.Int64,
    "step": pl.Int64,
    "start_ns": pl.Int64,
    "step_ns": pl.Int64,
    **{f"{phase}_host_ns": pl.Int64 for phase in STEP_PHASES},
    **{f"{phase}_device_ns": pl.Int64 for phase in STEP_PHASES},
    "micro_step_count": pl.Int64,
    "optimizer_step_count": pl.Int64,
    "skipped": pl.Boolean,
    "boundary": pl.String,
    "confidence": pl.Float64,
}


def step_frame(segments: Sequence[RankSegments]) -> pl.DataFrame:
    """Steps of all ranks, by rank, attempt and step.

    Returns:
        `rank`, `attempt` (restart of the rank), `step` (from 0 in that attempt), `start_ns` (Unix
        time), `step_ns` (evaluation taken out), `dataloader_host_ns`, `forward_host_ns`,
        `backward_host_ns`, `optimizer_host_ns`, `other_host_ns` (exclusive; they add up to
        `step_ns`; null: never seen in a step of this rank), the same five with
        `_device_ns` (null: no device, or not all times were there), `micro_step_count`,
        `optimizer_step_count`, `skipped` (the gradient scaler let no optimizer step), `boundary`
        (`dataloader`, `optimizer` or `backward`), `confidence` in [0, 1].
    """
    frames = [_of_rank(rank) for rank in segments]
    return pl.concat([pl.DataFrame(schema=STEP_SCHEMA), *frames])


def _of_rank(rank: RankSegments) -> pl.DataFrame:
    steps = rank.found.steps
    count = len(steps.start_ns)
    columns: dict[str, object] = {
        "rank": np.full(count, rank.files.rank),
        "attempt": np.full(count, rank.files.attempt),
        "step": np.arange(count),
        "start_ns": steps.start_ns + rank.wall_offset_ns,
        "step_ns": steps.step_ns,
        "micro_step_count": steps.micro_step_count,
        "optimizer_step_count": steps.optimizer_step_count,
        "skipped": steps.skipped,
        "boundary": pl.Series(BOUNDARIES, dtype=pl.String).gather(steps.boundary),
        "confidence": steps.confidence,
    }
    for place, phase in enumerate(PHASES):
        columns[f"{phase}_host_ns"] = steps.host_ns[place] if rank.seen[place] else None
    columns["other_host_ns"] = steps.other_ns
    columns.update(_device(rank))
    return pl.DataFrame(columns, schema_overrides=STEP_SCHEMA).select(*STEP_SCHEMA)


def _device(rank: RankSegments) -> dict[str, object]:
    if rank.device_ns is None:
        return {f"{phase}_device_ns": None for phase in STEP_PHASES}
    seen = [*rank.seen.tolist(), True]
    return {
        f"{phase}_device_ns": pl.Series(values).fill_nan(None).round() if shown else None
        for phase, values, shown in zip(STEP_PHASES, rank.device_ns, seen, strict=True)
    }
