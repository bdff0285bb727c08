"""All ranks' graphs as one, with collectives that wait for the last rank to arrive."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError, UsageError
from haiprof.trace_analysis.what_if.changes import COLLECTIVE, KERNEL, NETWORK, RANK, Change
from haiprof.trace_analysis.what_if.graph import Graph
from haiprof.trace_analysis.what_if.replay import NEVER_CAUSED_NS, RankGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The graphs of all ranks as one; point 0 is the beginning."""

    graph: Graph
    times: Ints
    """When each point was reached, ns since the beginning, shape (points,)."""
    caused_ns: Ints
    """When a host caused each point to be reached, shape (points,): see `RankGraph`."""
    lengths: Ints
    """ns of each edge as it was and with each change, shape (edges, 1 + changes)."""
    begun_ns: int
    """When the last rank began its first step, ns since the first one did."""
    bounds_ns: Ints
    """Of the rank that waits longest for its loader's workers, or began last: see `RankGraph`."""
    by_batches: bool
    """Whether the loader's workers limit the step: `bounds_ns` are of batches."""
    step_count: int
    collective_count: int
    """Of which waiting and transfer are told apart."""
    apart_count: int
    """Threads that keep their times, in sum over ranks."""
    unmatched_count: int
    """Communication kernels that take as long as they took, waiting included."""
    held_counts: tuple[int, ...] = ()
    """Of those, the ones that each change is about, and cannot change."""
    ahead_count: int = 0
    """Ranks whose loader's workers always had a batch ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """Graphs of ranks beside each other."""

    begun_ns: int
    bounds_ns: Ints
    by_batches: bool
    times: Ints
    caused_ns: Ints
    sources: Ints
    targets: Ints
    lengths: Ints
    work: pl.DataFrame
    """`rank`, `edge`, `label`, `begin_ns` of the edges that are work."""
    kernels: pl.DataFrame
    """`rank`, `event`, `edge`, `launch_ns`, `talks` of all kernels."""


def join_ranks(
    graphs: Mapping[int, RankGraph],
    waits: pl.DataFrame,
    changes: Sequence[Change],
    offsets: Mapping[int, int],
    collectives: pl.DataFrame,
) -> Job:
    """One graph of all ranks."""
    counts = {graph.step_count for graph in graphs.values()}
    if len(counts) > 1:
        raise MissingDataError(
            f"what-if: ranks have from {min(counts)} to {max(counts)} profiler steps",
            hint="name steps that all of them have",
        )
    ranks = _side_by_side(
        [_shift_clock(graph, offsets.get(r, 0)) for r, graph in graphs.items()], [*graphs]
    )
    members = _members(waits, ranks.kernels)
    lengths = ranks.lengths.copy()
    for column, change in enumerate(changes, start=1):
        if change.kind == RANK:
            lengths[:, column] = _even_out(change, ranks, members)
    job = _with_collectives(replace(ranks, lengths=lengths), members, changes)
    apart = sum(graph.apart_count for graph in graphs.values())
    return replace(
        job,
        step_count=counts.pop(),
        apart_count=apart,
        held_counts=_held_counts(collectives, ranks.kernels, members, changes),
        ahead_count=sum(graph.workers_ahead for graph in graphs.values()),
    )


def _shift_clock(graph: RankGraph, offset_ns: int) -> RankGraph:
    return replace(
        graph,
        times=graph.times - offset_ns,
        caused_ns=graph.caused_ns - np.where(graph.caused_ns < NEVER_CAUSED_NS, offset_ns, 0),
        bounds_ns=graph.bounds_ns - offset_ns,
        begin_ns=graph.begin_ns - offset_ns,
        begins_ns=graph.begins_ns - offset_ns,
    )


def _side_by_side(graphs: Sequence[RankGraph], names: Sequence[int]) -> _Ranks:
    begin = min(graph.begins_ns for graph in graphs)
    points = np.cumsum([1, *(len(graph.times) for graph in graphs)])
    edges = np.cumsum([0, *(len(graph.sources) for graph in graphs)])
    every = list(zip(graphs, names, points.tolist(), edges.tolist(), strict=False))
    times = np.concatenate([[0], *(np.maximum(graph.times - begin, 0) for graph in graphs)])
    targets = np.concatenate([graph.targets + first for graph, _, first, _ in every])
    led_to = np.zeros(len(times), dtype=bool)
    led_to[targets] = True
    free = np.flatnonzero(~led_to)[1:]  # what nothing leads to keeps its distance from the start
    lengths = np.concatenate([graph.lengths for graph in graphs])
    kept = np.repeat(times[free, None], lengths.shape[1], axis=1)
    sources = [graph.sources + first for graph, _, first, _ in every]
    caused = np.concatenate([[begin], *(graph.caused_ns for graph in graphs)])
    leading = max(graphs, key=lambda graph: (graph.waited_ns, graph.begins_ns))
    return _Ranks(
        begun_ns=max(graph.begins_ns for graph in graphs) - begin,
        bounds_ns=leading.bounds_ns - begin,
        by_batches=leading.waited_ns > 0,
        times=times,
        caused_ns=np.where(caused < NEVER_CAUSED_NS, caused - begin, caused),
        sources=np.concatenate([*sources, np.zeros(len(free), dtype=np.int64)]),
        targets=np.concatenate([targets, free]),
        lengths=np.concatenate([lengths, kept]),
        work=pl.concat([_work(graph, rank, edge) for graph, rank, _, edge in every]),
        kernels=pl.concat([_kernels(graph, rank, edge) for graph, rank, _, edge in every]),
    )


def _work(graph: RankGraph, rank: int, first_edge: int) -> pl.DataFrame:
    these = np.flatnonzero(graph.label >= 0)
    labels = np.array(graph.labels)[graph.label[these]]
    return pl.DataFrame(
        {"edge": these + first_edge, "begin_ns": graph.begin_ns[these], "label": labels},
        schema={"edge": pl.Int64, "begin_ns": pl.Int64, "label": pl.String},
    ).select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())


def _kernels(graph: RankGraph, rank: int, first_edge: int) -> pl.DataFrame:
    count = len(graph.events)
    return pl.DataFrame(
        {
            "event": graph.events,
            "edge": np.arange(count) + first_edge,
            "launch_ns": graph.begin_ns[:count],
            "talks": graph.label[:count] < 0,
        },
        schema_overrides={"event": pl.Int64, "edge": pl.Int64, "talks": pl.Boolean},
    ).select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all())


def _members(waits: pl.DataFrame, kernels: pl.DataFrame) -> pl.DataFrame:
    """Kernels of collectives whose waiting is known and that are in the window on every rank.

    `collective` (from 0), `rank`, `edge`, `launch_ns`, `kind`, `name`.
    """
    timed = waits.filter(pl.col("missing").is_null())
    found = timed.select("collective", "rank", "event", "rank_count", "kind", "name").join(
        kernels, on=["rank", "event"]
    )
    whole = found.filter(pl.len().over("collective") == pl.col("rank_count"))
    number = (pl.col("collective").rank("dense") - 1).cast(pl.Int64).alias("collective")
    columns = (number, "rank", "edge", "launch_ns", "kind", "name")
    return whole.select(*columns).sort("collective", "rank")


def _with_collectives(ranks: _Ranks, members: pl.DataFrame, changes: Sequence[Change]) -> Job:
    """With a point per collective between the start of every member and its end."""
    edge, number = members["edge"].to_numpy(), members["collective"].to_numpy()
    count = int(number.max() + 1) if len(number) else 0
    starts, ends = ranks.times[ranks.sources[edge]], ranks.times[ranks.targets[edge]]
    arrived = np.zeros(count, dtype=np.int64)
    np.maximum.at(arrived, number, starts)
    transfer = np.maximum(ends - arrived[number], 0)
    speedups = [np.ones(len(edge)), *(_speedups(change, members) for change in changes)]
    lengths = ranks.lengths.copy()
    lengths[edge] = np.rint(transfer[:, None] / np.stack(speedups, axis=1)).astype(np.int64)
    sources = ranks.sources.copy()
    sources[edge] = len(ranks.times) + number
    graph = Graph(
        point_count=len(ranks.times) + count,
        sources=np.concatenate([sources, ranks.sources[edge]]),
        targets=np.concatenate([ranks.targets, len(ranks.times) + number]),
    )
    entering = np.zeros((len(edge), lengths.shape[1]), dtype=np.int64)
    return Job(
        graph=graph,
        times=np.concatenate([ranks.times, arrived]),
        caused_ns=np.concatenate([ranks.caused_ns, arrived]),
        bounds_ns=ranks.bounds_ns,
        by_batches=ranks.by_batches,
        lengths=np.concatenate([lengths, entering]),
        begun_ns=ranks.begun_ns,
        apart_count=0,
        step_count=1,
        collective_count=count,
        unmatched_count=int(ranks.kernels["talks"].sum()) - len(edge),
    )


def _speedups(change: Change, members: pl.DataFrame) -> npt.NDArray[np.float64]:
    """How many times as fast the transfer of each member of a collective is."""
    found = np.ones(len(members))
    for part in change.parts:
        found = found * _speedups(part, members)
    return np.where(_meets(change, members), change.speedup, found)


def _meets(change: Change, collectives: pl.DataFrame) -> npt.NDArray[np.bool_]:
    """Which collectives, by `kind` and `name`, a change by itself is about."""
    meets = np.zeros(len(collectives), dtype=np.bool_)
    if change.kind == NETWORK:
        meets[:] = True
    elif change.kind in (COLLECTIVE, KERNEL):
        columns = ("kind", "name") if change.kind == COLLECTIVE else ("name",)
        rows = collectives.select(columns).iter_rows()
        meets[:] = [any(re.search(change.name, text) for text in row) for row in rows]
    return meets


def _held_counts(
    collectives: pl.DataFrame,
    kernels: pl.DataFrame,
    members: pl.DataFrame,
    changes: Sequence[Change],
) -> tuple[int, ...]:
    """How many kernels that stay as long as they were each change is about."""
    held = kernels.filter("talks").join(members, on=["rank", "edge"], how="anti")
    named = collectives.join(held, on=["rank", "event"], how="semi")
    parts = [change.parts or (change,) for change in changes]
    met = [np.any([_meets(part, named) for part in every], axis=0) for every in parts]
    return tuple(int(np.count_nonzero(each)) for each in met)


def _even_out(change: Change, ranks: _Ranks, members: pl.DataFrame) -> Ints:
    """Lengths with the work of one rank, or of all, set to that of the others.

    Between two collectives that all of them are in, a rank's work of one kind (kernels of one name,
    or the CPU) takes, in sum, as long as the middle of the other ranks' same work; with all ranks
    evened, as long as their mean.
    """
    known = ranks.work["rank"].unique().to_list()
    if change.rank is not None and change.rank not in known:
        raise UsageError(f"what-if: rank {change.rank} has no trace")
    if len(known) < 2:
        raise UsageError("what-if: there is no other rank to compare with")
    everyone = members.filter(pl.len().over("collective") == len(known))
    passed = everyone.sort("launch_ns").select("rank", launch_ns="launch_ns", phase="collective")
    work = (
        ranks.work.sort("begin_ns")
        .join_asof(
            passed, left_on="begin_ns", right_on="launch_ns", by="rank", check_sortedness=False
        )
        .with_columns(
            pl.col("phase").fill_null(-1),
            ns=ranks.lengths[:, 0][ranks.work.sort("begin_ns")["edge"]],
        )
    )
    sums = work.group_by("rank", "phase", "label").agg(pl.col("ns").sum())
    if change.rank is None:
        aim = sums.group_by("phase", "label").agg(aim=pl.col("ns").mean())
    else:
        others = sums.filter(pl.col("rank") != change.rank)
        aim = others.group_by("phase", "label").agg(aim=pl.col("ns").median())
        sums = sums.filter(pl.col("rank") == change.rank)
    factors = (
        sums.filter(pl.col("ns") > 0)
        .join(aim, on=["phase", "label"])
        .select("rank", "phase", "label", factor=pl.col("aim") / pl.col("ns"))
    )
    scaled = work.join(factors, on=["rank", "phase", "label"])
    lengths = ranks.lengths[:, 0].copy()
    lengths[scaled["edge"]] = scaled.select(
        (pl.col("ns") * pl.col("factor")).round().cast(pl.Int64)
    ).to_series()
    return lengths
