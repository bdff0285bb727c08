"""A rank's own work in backward: up to the last collective that it began there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from haiprof.run_analysis.step_frame import RankSegments
from haiprof.run_format import schema

BACKWARD_WORK_SCHEMA = {
    "rank": pl.Int64,
    "own_ns": pl.Float64,
    "after_ns": pl.Float64,
    "backward_count": pl.Int64,
}


def backward_work(segments: Sequence[RankSegments], collectives: pl.DataFrame) -> pl.DataFrame:
    """From the start of a backward to the last collective that the rank began in it, and on.

    Gradients are averaged as they become ready, so the last one is begun when the rank's own work
    is done; what follows until backward returns is transfer, and waiting for other ranks. The rank
    that begins last waits for none: the shortest such end among the ranks is without waiting.

    Source: torch DistributedDataParallel, "Internal Design": buckets are reduced as hooks fire.
    """
    known = collectives.filter(~pl.col("p2p") & pl.col("created_ns").is_not_null())
    found = {}
    for rank in segments:
        own = known.filter(
            (pl.col("rank") == rank.files.rank) & (pl.col("attempt") == rank.files.attempt)
        )
        parts = own_and_after(rank, own["created_ns"].sort().to_numpy())
        if parts.size:
            found[rank.files.rank] = parts
    after = _shortest([parts[1] for parts in found.values()])
    rows = [
        (rank, float(np.median(parts[0])), after, parts.shape[1]) for rank, parts in found.items()
    ]
    return pl.DataFrame(rows, schema=BACKWARD_WORK_SCHEMA, orient="row")


def _shortest(ends: Sequence[np.ndarray]) -> float | None:
    if not ends:
        return None
    if len({len(own) for own in ends}) == 1:
        return float(np.median(np.min(np.stack(ends), axis=0)))
    return min(float(np.median(own)) for own in ends)


def own_and_after(rank: RankSegments, created: np.ndarray) -> np.ndarray:
    """[own or after, backward pass with collectives] in ns."""
    spans = rank.found.nested.spans
    backward = np.flatnonzero(spans.kind == schema.BACKWARD)
    start = spans.start_ns[backward] + rank.wall_offset_ns
    end = spans.end_ns[backward] + rank.wall_offset_ns
    last = np.searchsorted(created, end, side="right") - 1
    inside = last >= 0
    inside[inside] = created[last[inside]] >= start[inside]
    begun = created[last[inside]]
    return np.stack([begun - start[inside], end[inside] - begun])
