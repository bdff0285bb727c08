"""The frame of steps: one row per rank, attempt and step."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.run_analysis.nesting import Bools, Codes
from haiprof.run_analysis.segments import RankSegments
from haiprof.run_analysis.step_boundaries import BOUNDARIES, WORDS
from haiprof.run_analysis.steps import PHASES

STEP_PHASES = (*PHASES, "other")
"""What a step's time is split into."""
STEP_SCHEMA = {
    "rank": pl.Int64,
    "attempt": pl.Int64,  # restart of the rank
    "step": pl.Int64,  # from 0 in that attempt
    "start_ns": pl.Int64,  # Unix time
    "step_ns": pl.Int64,  # evaluation taken out
    # exclusive, adding up to `step_ns`; null: never seen in this rank
    **{f"{phase}_host_ns": pl.Int64 for phase in STEP_PHASES},
    **{f"{phase}_device_ns": pl.Int64 for phase in STEP_PHASES},  # null: no device, or times lack
    "micro_step_count": pl.Int64,
    "optimizer_step_count": pl.Int64,
    "skipped": pl.Boolean,  # the gradient scaler let no optimizer step
    # phase; `fetch`, `module`, `collective` without training; `mark`: haiprof.step()
    "boundary": pl.String,
    "confidence": pl.Float64,  # in [0, 1]
    # a trace window, or the stall at one of its ends, was in it: it took longer
    "traced": pl.Boolean,
}


def last_attempts(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of each rank's last attempt; others are of starts that died, or of jobs beside it."""
    return frame.filter(pl.col("attempt") == pl.col("attempt").max().over("rank"))


class SharedColumns:
    """Columns of many ranks that hold the same: one value throughout, or counts from 0.

    They are made once and cut to length, so that a thousand ranks share their memory.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[str, str | float | None], pl.Series] = {}

    def constant(
        self, value: str | float | None, count: int, dtype: type[pl.DataType]
    ) -> pl.Series:
        """So many times the same value; None is null."""
        key: tuple[str, str | float | None] = (str(dtype), value)
        if key not in self._made or len(self._made[key]) < count:
            self._made[key] = pl.Series([value], dtype=dtype).new_from_index(0, count)
        return self._made[key].head(count)

    def counting(self, count: int) -> pl.Series:
        """0, 1, 2, ..."""
        key: tuple[str, str | float | None] = ("counting", 0)
        if key not in self._made or len(self._made[key]) < count:
            self._made[key] = pl.Series(np.arange(count), dtype=pl.Int64)
        return self._made[key].head(count)

    def compact(self, values: np.ndarray, dtype: type[pl.DataType]) -> pl.Series:
        """The values, shared where all are the same."""
        if len(values) and (values == values[0]).all():
            return self.constant(values[0].item(), len(values), dtype)
        return pl.Series(values, dtype=dtype)


def step_frame(
    rank: RankSegments, traced: Bools | None = None, *, shared: SharedColumns | None = None
) -> pl.DataFrame:
    """Steps of one rank, in order."""
    shared = shared or SharedColumns()
    steps = rank.found.steps
    count = len(steps.start_ns)
    columns: dict[str, object] = {
        "rank": pl.Series([rank.files.rank], dtype=pl.Int64).new_from_index(0, count),
        "attempt": shared.constant(rank.files.attempt, count, pl.Int64),
        "step": shared.counting(count),
        "start_ns": steps.start_ns + rank.wall_offset_ns,
        "step_ns": steps.step_ns,
        "micro_step_count": shared.compact(steps.micro_step_count, pl.Int64),
        "optimizer_step_count": shared.compact(steps.optimizer_step_count, pl.Int64),
        "skipped": shared.compact(steps.skipped, pl.Boolean),
        "boundary": _boundaries(steps.boundary, shared),
        "confidence": shared.compact(steps.confidence, pl.Float64),
        "traced": shared.compact(
            np.zeros(count, dtype=np.bool_) if traced is None else traced, pl.Boolean
        ),
        "other_host_ns": steps.other_ns,
    }
    missing = shared.constant(None, count, pl.Int64)
    for place, phase in enumerate(PHASES):
        columns[f"{phase}_host_ns"] = steps.host_ns[place] if rank.seen[place] else missing
    columns.update(_device(rank, missing))
    ordered = {name: columns[name] for name in STEP_SCHEMA}
    return pl.DataFrame(ordered, schema_overrides=STEP_SCHEMA)


def untrained_boundary(steps: pl.DataFrame) -> str | None:
    """What most steps of a run are marked by, where that is no training; None elsewhere."""
    common = steps["boundary"].drop_nulls().mode()
    boundary = str(common.sort()[0]) if len(common) else ""
    return boundary if boundary in WORDS else None


def _boundaries(codes: Codes, shared: SharedColumns) -> pl.Series:
    if len(codes) and (codes == codes[0]).all():
        return shared.constant(BOUNDARIES[codes[0]], len(codes), pl.String)
    return pl.Series(BOUNDARIES, dtype=pl.String).gather(codes)


def _device(rank: RankSegments, missing: pl.Series) -> dict[str, object]:
    if rank.device_ns is None:
        return {f"{phase}_device_ns": missing for phase in STEP_PHASES}
    seen = [*rank.seen.tolist(), True]
    return {
        f"{phase}_device_ns": pl.Series(values).fill_nan(None).round() if shown else missing
        for phase, values, shown in zip(STEP_PHASES, rank.device_ns, seen, strict=True)
    }
