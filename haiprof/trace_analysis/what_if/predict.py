"""Replays the steps of all ranks, joined at collectives: as they were, then with each change."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError, UsageError
from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.statistics import mean_error
from haiprof.trace_analysis.what_if import replay


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Points in time and what each waits for, in an order in which the edges can be followed.

    A task is two points (start, end) with its duration between them; a collective is a point that
    waits for the start of every member, with an edge to each member's end.
    """

    point_count: int  # points are 0 .. point_count - 1; one without an incoming edge is at 0 ns
    sources: Ints  # earlier end of each edge, shape (edges,)
    targets: Ints  # later end of each edge, shape (edges,)
    edges: Ints  # edges by the level of their target, those of one target together
    heads: Ints  # where a new target begins in `edges`
    levels: Ints  # where a new level begins in `heads`; ends with their number


def plan_graph(point_count: int, sources: Ints, targets: Ints) -> Plan:
    """The order of a graph's edges; work and waiting are their lengths."""
    # Most edges in a chain before each point: Kahn's algorithm, a level at a time.
    after = targets[np.argsort(sources, kind="stable")]
    counts = np.bincount(sources, minlength=point_count)
    first = np.cumsum(counts) - counts
    missing = np.bincount(targets, minlength=point_count)
    depth = np.zeros(point_count, dtype=np.int64)
    front, level, seen = np.flatnonzero(missing == 0), 0, 0
    while len(front):
        depth[front] = level
        seen, level = seen + len(front), level + 1
        width = counts[front]
        inside = np.arange(width.sum()) - np.repeat(np.cumsum(width) - width, width)
        reached = after[np.repeat(first[front], width) + inside]
        np.subtract.at(missing, reached, 1)
        front = np.unique(reached[missing[reached] == 0])
    if seen < point_count:
        raise TraceFormatError(f"{point_count - seen} points in time wait for each other")
    order = np.lexsort((targets, depth[targets]))
    later = targets[order]
    heads = np.flatnonzero(np.append(True, later[1:] != later[:-1])[: len(later)])
    level_of_head = depth[later[heads]]
    changes = np.append(True, level_of_head[1:] != level_of_head[:-1])[: len(heads)]
    levels = np.append(np.flatnonzero(changes), len(heads))
    return Plan(point_count=point_count, sources=sources, targets=targets, edges=order,
                heads=heads, levels=levels)  # fmt: skip


def times(plan: Plan, lengths: Ints, delays: Ints | None = None) -> Ints:
    """When each point is reached."""
    found = np.zeros((plan.point_count, lengths.shape[1]), dtype=np.int64)
    sources, along = plan.sources[plan.edges], lengths[plan.edges]
    reached = plan.targets[plan.edges[plan.heads]]
    bounds = np.append(plan.heads, len(plan.edges))
    for low, high in zip(plan.levels[:-1], plan.levels[1:], strict=True):
        begin, end = bounds[low], bounds[high]
        arrivals = found[sources[begin:end]] + along[begin:end]
        latest = np.maximum.reduceat(arrivals, plan.heads[low:high] - begin, axis=0)
        points = reached[low:high]
        found[points] = latest if delays is None else latest + delays[points]
    return found


class Job(NamedTuple):
    """The graphs of all ranks as one; point 0 is the beginning."""

    plan: Plan
    times: Ints  # when each point was reached, ns since the beginning, shape (points,)
    caused_ns: Ints
    """When a host caused each point to be reached, shape (points,); of a loader's workers never."""
    lengths: Ints  # ns of each edge as it was and with each change, shape (edges, 1 + changes)
    held_counts: list[int]
    """Communication kernels that each change is about, and cannot change."""
    collective_count: int  # of which waiting and transfer are told apart
    unmatched_count: int  # communication kernels that take as long as they took, with waiting


def join_ranks(
    graphs: Mapping[int, replay.RankGraph], waits: pl.DataFrame, changes: Sequence[replay.Change],
    offsets: Mapping[int, int], collectives: pl.DataFrame,
) -> Job:  # fmt: skip
    """One graph of all ranks."""
    times, caused, edges, lengths = _side_by_side(graphs, offsets)
    # Kernels of collectives whose waiting is known and that are in the window on every rank.
    # `collective` (from 0), `rank`, `edge`, `launch_ns`, `kind`, `name`.
    kernels = edges.drop_nulls("event")
    found = waits.filter(pl.col("missing").is_null()).join(
        kernels.select("rank", "event", "edge", launch_ns="begin_ns"), on=["rank", "event"]
    )
    whole = found.filter(pl.len().over("collective") == pl.col("rank_count"))
    number = (pl.col("collective").rank("dense") - 1).cast(pl.Int64).alias("collective")
    columns = (number, "rank", "edge", "launch_ns", "kind", "name")
    members = whole.select(*columns).sort("collective", "rank")
    for column, change in enumerate(changes, start=1):
        if change.kind == replay.RANK:
            lengths[:, column] = _even_out(change, edges, lengths[:, 0], members)
    # How many kernels that stay as long as they were each change is about.
    talks = kernels.filter(pl.col("label").is_null())
    held = talks.join(members, on=["rank", "edge"], how="anti")
    named = collectives.join(held, on=["rank", "event"], how="semi")
    met = [np.any([_meets(part, named) for part in change.parts or (change,)], axis=0)
           for change in changes]  # fmt: skip
    plan, arrived, lengths = _with_collectives(times, edges, lengths, members, changes)
    times, caused = (np.concatenate([each, arrived]) for each in (times, caused))
    counts = [int(np.count_nonzero(each)) for each in met]
    return Job(plan, times, caused, lengths, counts, len(arrived), talks.height - members.height)


def _side_by_side(
    graphs: Mapping[int, replay.RankGraph], offsets: Mapping[int, int]
) -> tuple[Ints, Ints, pl.DataFrame, Ints]:
    """Points of all ranks, their edges and lengths; point 0 is the beginning of all."""
    begin = min(each.begins_ns - offsets.get(rank, 0) for rank, each in graphs.items())
    points, edges, first = [pl.DataFrame({"time_ns": [0], "caused_ns": [0]})], [], 1
    for rank, each in graphs.items():
        offset = offsets.get(rank, 0)
        points.append(each.points.select(pl.all() - (begin + offset)))
        places = pl.col("source", "target") + first
        begun = pl.col("begin_ns") - offset
        edges.append(each.edges.with_columns(places, begun, rank=pl.lit(rank, pl.Int64)))
        first += each.points.height
    both, joined = pl.concat(points), pl.concat(edges)
    times = both["time_ns"].clip(0).to_numpy()
    free = np.setdiff1d(np.arange(1, first), joined["target"].to_numpy())
    kept = np.repeat(times[free, None], next(iter(graphs.values())).lengths.shape[1], axis=1)
    apart = pl.DataFrame({"source": np.zeros(len(free), dtype=np.int64), "target": free})
    every = pl.concat([joined, apart], how="diagonal").with_row_index("edge")
    return (
        times,
        both["caused_ns"].fill_null(np.iinfo(np.int64).max).to_numpy(),
        every.with_columns(pl.col("edge").cast(pl.Int64)),
        np.concatenate([*(each.lengths for each in graphs.values()), kept]),
    )


def _with_collectives(
    times: Ints, edges: pl.DataFrame, lengths: Ints, members: pl.DataFrame,
    changes: Sequence[replay.Change],
) -> tuple[Plan, Ints, Ints]:  # fmt: skip
    """The graph with a point per collective, when the last member came, and lengths."""
    sources, targets = edges["source"].to_numpy().copy(), edges["target"].to_numpy()
    edge, number = members["edge"].to_numpy(), members["collective"].to_numpy()
    begun = sources[edge]
    arrived = np.zeros(int(number.max() + 1) if len(number) else 0, dtype=np.int64)
    np.maximum.at(arrived, number, times[begun])
    transfer = np.maximum(times[targets[edge]] - arrived[number], 0)
    speedups = [np.ones(len(edge)), *(_speedups(change, members) for change in changes)]
    entering = np.zeros((len(edge), lengths.shape[1]), dtype=np.int64)
    lengths = np.concatenate([lengths, entering])
    lengths[edge] = np.rint(transfer[:, None] / np.stack(speedups, axis=1)).astype(np.int64)
    points = len(times) + number
    sources[edge] = points
    sources, targets = np.append(sources, begun), np.append(targets, points)
    return plan_graph(len(times) + len(arrived), sources, targets), arrived, lengths


def _speedups(change: replay.Change, members: pl.DataFrame) -> npt.NDArray[np.float64]:
    """How many times as fast the transfer of each member of a collective is."""
    found = np.ones(len(members))
    for part in change.parts:
        found = found * _speedups(part, members)
    return np.where(_meets(change, members), change.speedup, found)


def _meets(change: replay.Change, collectives: pl.DataFrame) -> Bools:
    """Which collectives, by `kind` and `name`, a change by itself is about."""
    meets = np.zeros(len(collectives), dtype=np.bool_)
    if change.kind == replay.NETWORK:
        meets[:] = True
    elif change.kind in (replay.COLLECTIVE, replay.KERNEL):
        columns = ("kind", "name") if change.kind == replay.COLLECTIVE else ("name",)
        rows = collectives.select(columns).iter_rows()
        meets[:] = [any(re.search(change.name, text) for text in row) for row in rows]
    return meets


def _even_out(
    change: replay.Change, edges: pl.DataFrame, lengths: Ints, members: pl.DataFrame
) -> Ints:
    """Lengths with the work of one rank, or of all, set to that of the others.

    Between two collectives of all, work of one kind takes as long as the middle of the others' (of
    all ranks: as their mean).
    """
    own = edges.with_columns(ns=pl.Series(lengths)).drop_nulls("label").sort("begin_ns")
    known = own["rank"].unique().to_list()
    if change.rank is not None and change.rank not in known:
        raise UsageError(f"trace what-if: rank {change.rank} has no trace")
    if len(known) < 2:
        raise UsageError("trace what-if: there is no other rank to compare with")
    everyone = members.filter(pl.len().over("collective") == len(known))
    passed = everyone.sort("launch_ns").select("rank", launch_ns="launch_ns", phase="collective")
    work = own.join_asof(
        passed, left_on="begin_ns", right_on="launch_ns", by="rank", check_sortedness=False
    ).with_columns(pl.col("phase").fill_null(-1))
    sums = work.group_by("rank", "phase", "label").agg(pl.col("ns").sum())
    if change.rank is None:
        aim = sums.group_by("phase", "label").agg(aim=pl.col("ns").mean())
    else:
        others = sums.filter(pl.col("rank") != change.rank)
        aim = others.group_by("phase", "label").agg(aim=pl.col("ns").median())
        sums = sums.filter(pl.col("rank") == change.rank)
    keys = ["rank", "phase", "label"]
    aimed = sums.filter(pl.col("ns") > 0).join(aim, on=keys[1:])
    scaled = work.join(aimed.select(*keys, factor=pl.col("aim") / pl.col("ns")), on=keys)
    found = lengths.copy()
    found[scaled["edge"]] = (scaled["ns"] * scaled["factor"]).round().cast(pl.Int64)
    return found


_LEAST_STEPS = 4  # of fewer, the spread between steps is not known
_LEAST_PART = 0.5  # batches that were waited for must span so much of the window to stand for it
_INEXACT_RATIO = 0.05
"""Of what a change gains: a real change is seldom exactly the one that is asked for, and tracing
makes short calls longer. Own choice, held against benchmarks/results/whatif_reruns.md."""


def interval(
    value: float, changed: Ints, before: Ints, error_ratio: float, unexplained_ratio: float
) -> tuple[float | None, float | None]:
    """The interval (95 %) of a share of the step, from lengths of steps; None of too few steps."""
    if len(before) < _LEAST_STEPS or before.sum() <= 0:
        return None, None
    residuals: Floats = changed - value * before
    spread = mean_error(residuals).half_width(0.95)
    inexact = math.hypot(spread / before.mean(), error_ratio, _INEXACT_RATIO * abs(1 - value))
    low = max(value - inexact - unexplained_ratio * max(1 - value, 0.0), 0.0)
    return low, value + inexact


PREDICTIONS_SCHEMA = {
    "change": pl.String, "measured_step_ns": pl.Int64, "reproduced_step_ns": pl.Int64,
    "error_ratio": pl.Float64, "unexplained_ratio": pl.Float64, "predicted_step_ns": pl.Int64,
    "low_step_ns": pl.Int64, "high_step_ns": pl.Int64, "saved_ratio": pl.Float64,
    "shortened_ns": pl.Int64, "changed_count": pl.Int64, "held_count": pl.Int64,
    "collective_count": pl.Int64, "unmatched_count": pl.Int64, "apart_count": pl.Int64,
    "ahead_count": pl.Int64,
}  # fmt: skip


def predictions(
    graphs: Mapping[int, replay.RankGraph], waits: pl.DataFrame, changes: Sequence[replay.Change],
    offsets: Mapping[int, int], collectives: pl.DataFrame,
) -> pl.DataFrame:  # fmt: skip
    """Step time as measured, as reproduced, and with each change."""
    counts = {graph.step_count for graph in graphs.values()}
    if len(counts) > 1:
        raise MissingDataError(
            f"trace what-if: ranks have from {min(counts)} to {max(counts)} profiler steps",
            hint="name steps that all of them have",
        )
    job, step_count = join_ranks(graphs, waits, changes, offsets, collectives), counts.pop()
    begins = {rank: each.begins_ns - offsets.get(rank, 0) for rank, each in graphs.items()}
    first_ns, begun_ns = min(begins.values()), max(begins.values()) - min(begins.values())
    # How much later each point was than its dependencies explain, shape (points, 1).
    never = np.iinfo(np.int64).min
    latest = np.full(job.plan.point_count, never)
    along = job.times[job.plan.sources] + job.lengths[:, 0]
    np.maximum.at(latest, job.plan.targets, along)
    delays = np.where(latest > never, np.maximum(job.times - latest, 0), 0)[:, None]
    reached = times(job.plan, job.lengths, delays)
    spans = reached.max(axis=0) - begun_ns
    explained = int(times(job.plan, job.lengths[:, :1]).max()) - begun_ns
    measured = int(job.times.max()) - begun_ns
    if measured <= 0:
        raise MissingDataError("trace what-if: no time passes in the steps of the traces")
    reproduced = int(spans[0])
    step_ns = reproduced / step_count
    error_ratio, unexplained_ratio = reproduced / measured - 1, 1 - explained / measured
    # Time in ns from bound to bound, shape (bounds - 1, 1 + changes): of the rank that waits most
    # for its loader's workers, or began last. A bound is reached when the host is there, and all
    # that it launched before has run.
    leading = max(graphs, key=lambda rank: (graphs[rank].waited_ns, begins[rank]))
    bounds_ns = graphs[leading].bounds_ns - offsets.get(leading, 0) - first_ns
    order = np.argsort(job.caused_ns, kind="stable")
    at = np.searchsorted(job.caused_ns[order], bounds_ns, side="right") - 1
    steps: Ints = np.diff(np.maximum.accumulate(reached[order], axis=0)[at], axis=0)
    covered = steps[:, 0].sum() / spans[0]
    by_batches = graphs[leading].waited_ns > 0 and len(steps) > 1 and covered >= _LEAST_PART
    sums = steps.sum(axis=0) if by_batches else spans
    rows = []
    for column, change in enumerate(changes, start=1):
        value, lengths = float(sums[column] / sums[0]), job.lengths[:, column]
        low, high = interval(
            value, steps[:, column], steps[:, 0], abs(error_ratio), unexplained_ratio
        )
        rows.append({
            "change": str(change), "measured_step_ns": round(measured / step_count),
            "reproduced_step_ns": round(step_ns), "error_ratio": error_ratio,
            "unexplained_ratio": unexplained_ratio, "predicted_step_ns": round(value * step_ns),
            "low_step_ns": None if low is None else round(low * step_ns),
            "high_step_ns": None if high is None else round(high * step_ns),
            "saved_ratio": 1 - value, "shortened_ns": int((job.lengths[:, 0] - lengths).sum()),
            "changed_count": int((job.lengths[:, 0] != lengths).sum()),
            "held_count": job.held_counts[column - 1], "collective_count": job.collective_count,
            "unmatched_count": job.unmatched_count,
            "apart_count": sum(each.apart_count for each in graphs.values()),
            "ahead_count": sum(each.workers_ahead for each in graphs.values()),
        })  # fmt: skip
    return pl.DataFrame(rows, schema=PREDICTIONS_SCHEMA)
