"""One rank's rows in the frames of the run: what is kept once its spans were cut into steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.run_analysis.epochs import loading_row
from haiprof.run_analysis.phases import pause_frame
from haiprof.run_analysis.ranks import rank_row
from haiprof.run_analysis.segments import RankSegments, cut_segments
from haiprof.run_analysis.step_frame import SharedColumns, step_frame
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


def rank_rows(
    rank: RankSegments,
    windows: Sequence[TraceWindow],
    *,
    between: tuple[int, int] | None,
    shared: SharedColumns,
) -> RankRows:
    """The rows of one rank.

    Args:
        rank: With all its steps.
        windows: Its trace windows.
        between: First and last Unix time in ns that loading and evaluation are counted in; None
            counts all.
        shared: What ranks have in common.
    """
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
    )
