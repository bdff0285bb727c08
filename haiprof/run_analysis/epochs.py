"""The frame of epochs: what starting and ending them costs each rank in its DataLoader."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import polars as pl

from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_format import schema

LOADING_SCHEMA = {
    "rank": pl.Int64,
    "attempt": pl.Int64,
    "epoch_count": pl.Int64,
    "epoch_ns": pl.Int64,
    "wait_ns": pl.Int64,
}
_LOADER_PHASE = 0  # in steps.SPAN_PHASES


def loading_frame(rows: Iterable[tuple[int, ...]]) -> pl.DataFrame:
    """Waits for the loader in the training steps after each rank's first one."""
    return pl.DataFrame(list(rows), schema=LOADING_SCHEMA, orient="row")


def loading_row(rank: RankSegments) -> tuple[int, ...]:
    """The row of one rank."""
    found = rank.found
    spans = found.nested.spans
    chosen = np.flatnonzero((found.phase == _LOADER_PHASE) & (found.step > 0))
    kind = spans.kind[chosen]
    own = found.nested.self_ns[chosen]
    starts = kind == schema.DATA_ITER
    first = np.append(False, starts[:-1])[: len(starts)] & (kind == schema.DATA)
    edge = starts | first | (kind == schema.DATA_END)
    return (
        rank.files.rank,
        rank.files.attempt,
        int(starts.sum()),
        int(own[edge].sum()) if starts.any() else 0,
        int(own.sum()),
    )
