"""Replays the steps of all ranks: as they were, then with each change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.what_if.changes import Change
from haiprof.trace_analysis.what_if.graph import plan_graph, times
from haiprof.trace_analysis.what_if.intervals import step_shares
from haiprof.trace_analysis.what_if.joining import Job, join_ranks
from haiprof.trace_analysis.what_if.replay import RankGraph

PREDICTIONS_SCHEMA = {
    "change": pl.String,
    "measured_step_ns": pl.Int64,
    "reproduced_step_ns": pl.Int64,
    "error_ratio": pl.Float64,
    "unexplained_ratio": pl.Float64,
    "predicted_step_ns": pl.Int64,
    "low_step_ns": pl.Int64,
    "high_step_ns": pl.Int64,
    "saved_ratio": pl.Float64,
    "shortened_ns": pl.Int64,
    "changed_count": pl.Int64,
    "held_count": pl.Int64,
    "collective_count": pl.Int64,
    "unmatched_count": pl.Int64,
    "apart_count": pl.Int64,
    "ahead_count": pl.Int64,
}


def predictions(
    graphs: Mapping[int, RankGraph],
    waits: pl.DataFrame,
    changes: Sequence[Change],
    offsets: Mapping[int, int],
    collectives: pl.DataFrame,
) -> pl.DataFrame:
    """Step time as measured, as reproduced, and with each change."""
    job = join_ranks(graphs, waits, changes, offsets, collectives)
    plan = plan_graph(job.graph)
    reached = times(plan, job.lengths, _delays(job))
    spans = reached.max(axis=0) - job.begun_ns
    explained = int(times(plan, job.lengths[:, :1]).max()) - job.begun_ns
    measured = int(job.times.max()) - job.begun_ns
    if measured <= 0:
        raise MissingDataError("what-if: no time passes in the steps of the traces")
    shortened = (job.lengths[:, :1] - job.lengths).sum(axis=0)
    changed = (job.lengths[:, :1] != job.lengths).sum(axis=0)
    reproduced = int(spans[0])
    step_ns = reproduced / job.step_count
    common = {
        "measured_step_ns": round(measured / job.step_count),
        "reproduced_step_ns": round(step_ns),
        "error_ratio": reproduced / measured - 1,
        "unexplained_ratio": 1 - explained / measured,
        "collective_count": job.collective_count,
        "unmatched_count": job.unmatched_count,
        "apart_count": job.apart_count,
        "ahead_count": job.ahead_count,
    }
    shares = step_shares(
        job, reached, spans, error_ratio=common["error_ratio"],
        unexplained_ratio=common["unexplained_ratio"],
    )  # fmt: skip
    rows = [
        {
            "change": str(change),
            "predicted_step_ns": round(share.value * step_ns),
            "low_step_ns": None if share.low is None else round(share.low * step_ns),
            "high_step_ns": None if share.high is None else round(share.high * step_ns),
            "saved_ratio": 1 - share.value,
            "shortened_ns": int(less),
            "changed_count": int(count),
            "held_count": held,
            **common,
        }
        for change, share, less, count, held in zip(
            changes, shares, shortened[1:], changed[1:], job.held_counts, strict=True
        )
    ]
    return pl.DataFrame(rows, schema=PREDICTIONS_SCHEMA)


def _delays(job: Job) -> Ints:
    """How much later each point was than its dependencies explain, shape (points, 1)."""
    arrivals = job.times[job.graph.sources] + job.lengths[:, 0]
    never = np.iinfo(np.int64).min
    latest = np.full(job.graph.point_count, never)
    np.maximum.at(latest, job.graph.targets, arrivals)
    found: Ints = np.where(latest > never, np.maximum(job.times - latest, 0), 0)[:, None]
    return found
