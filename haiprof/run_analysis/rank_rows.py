"""One rank's rows in the frames of the run: what is kept once its spans were cut into steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Intervals, Ints
from haiprof.run_analysis.compilations import compile_intervals
from haiprof.run_analysis.epochs import loading_row
from haiprof.run_analysis.ranks import rank_row
from haiprof.run_analysis.step_frame import (
    RankSegments,
    SharedColumns,
    cut_segments,
    pause_frame,
    step_frame,
)
from haiprof.run_analysis.step_positions import StepPositions, step_positions
from haiprof.run_analysis.windows import TraceWindow, traced_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRows:
    """A tenth of what the rank's spans take."""

    record_count: int
    """Records that its spans were read from."""
    wall_offset_ns: int
    """Unix time minus the clock of the spans."""
    step_count: int
    """Of the whole recording."""
    steps: pl.DataFrame
    """Of the whole recording; columns of `step_frame`."""
    pauses: pl.DataFrame
    """Of the whole recording; columns of `phase_frame`."""
    loading: tuple[int, ...]
    """Its row of `loading_frame`."""
    rank: Mapping[str, object]
    """Its row of `rank_frame`."""
    positions: Mapping[int, Ints]
    """[step] in ns of the whole recording, by index into POSITIONS; that of collections in a
    position comes len(POSITIONS) later. Those that the rank never was in are left out."""


def rank_rows(
    rank: RankSegments,
    windows: Sequence[TraceWindow],
    *,
    between: tuple[int, int] | None,
    shared: SharedColumns,
) -> RankRows:
    """The rows of one rank."""
    row = rank_row(rank.files, rank)
    cut = rank
    if between is not None:
        cut = cut_segments(rank, between)
        inside = rank_row(rank.files, cut)
        counted = ("step_count", "eval_ns", "nograd_ns", "eval_compile_ns")
        row |= {name: inside[name] for name in counted}
    return RankRows(
        record_count=rank.record_count,
        wall_offset_ns=rank.wall_offset_ns,
        step_count=len(rank.found.steps.start_ns),
        steps=step_frame(rank, traced_steps(rank, windows), shared=shared),
        pauses=pause_frame(rank),
        loading=loading_row(cut),
        rank=row,
        positions=_position_times(rank),
    )


def rank_positions(rank: RankSegments) -> StepPositions:
    """Where a rank's training thread was at each moment."""
    compiled = compile_intervals(rank.files)
    if compiled is not None:
        shift = rank.wall_offset_ns
        compiled = Intervals(compiled.starts - shift, compiled.ends - shift)
    return step_positions(rank.found, rank.events, compiled)


def _position_times(rank: RankSegments) -> dict[int, Ints]:
    """Small numbers are stored small: of a thousand ranks they are much."""
    plain, collected = rank_positions(rank).sums()
    times = np.concatenate([plain, collected])
    small = times.max(initial=0) < np.iinfo(np.int32).max
    kept = times.astype(np.int32) if small else times
    return {place: kept[place].copy() for place in np.flatnonzero(times.any(axis=1)).tolist()}
