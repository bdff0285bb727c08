"""The host's part of a replay: threads as chains of launches, waits and work between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.dependencies.thread_handovers import HandOvers
from haiprof.trace_analysis.what_if.loader import WORKERS_TID, Batches

DONE, MARK, LAUNCH, BLOCK_BEGIN, BLOCK_END = "done", "mark", "launch", "block_begin", "block_end"
_TIES = {BLOCK_END: 0, DONE: 1, MARK: 2, LAUNCH: 3, BLOCK_BEGIN: 4}
"""Order of points of one thread at one time: a wait ends before what follows it."""
Bools = npt.NDArray[np.bool_]
_Key = tuple[int, str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of a rank that matter to a replay, on its host threads."""

    launches: pl.DataFrame
    """`correlation`, `tid`, `ts_ns`: calls that put something on a GPU."""
    blocking: pl.DataFrame
    """`call`, `correlation`, `name`, `tid`, `ts_ns`, `end_ns`: calls that wait for the GPU; `idle`,
    whether the GPU was done before the call began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Points of all host threads of a rank, and the work between them."""

    points: pl.DataFrame
    """`time_ns`, `tid`, `role`, `correlation` of a launch, `call` of a wait; by thread and time."""
    sources: Ints
    targets: Ints
    lengths: Ints
    """ns of each edge."""
    is_work: Bools
    """Whether the CPU works along the edge; else the later point only comes after the earlier."""
    apart_count: int
    """Threads that launch kernels and that nothing in the trace starts: they keep their times."""


def host(
    spans: pl.DataFrame,
    calls: Calls,
    main_tid: int,
    *,
    bounds_ns: Ints,
    handed: Sequence[HandOvers] = (),
    batches: Batches | None = None,
) -> Host:
    """The host threads of a rank."""
    launching = calls.launches["tid"].unique().to_list()
    linked = [main_tid, *(found.working[1] for found in handed)]
    spans = spans.filter(pl.col("tid").is_in([*linked, *launching]))
    blocking = calls.blocking.filter(pl.col("tid").is_in(spans["tid"].implode()))
    calls = replace(calls, blocking=_with_batches(blocking, batches, main_tid))
    points = _points(spans, calls, handed, main_tid, bounds_ns, batches)
    time, tid = points["time_ns"].to_numpy(), points["tid"].to_numpy()
    chained = np.flatnonzero(tid[1:] == tid[:-1])
    sources, targets = chained, chained + 1
    lengths = time[targets] - time[sources]
    is_work = np.ones(len(chained), dtype=bool)
    for found in handed:
        waiting, working = (tid[sources] == of[1] for of in (found.waiting, found.working))
        is_work &= ~(waiting & _inside(time[sources], time[targets], found.left, found.back))
        idle = (found.rested[found.was_idle], found.began[found.was_idle])
        is_work &= ~(working & _inside(time[sources], time[targets], *idle))
    waits = _is_wait(points, sources, targets)
    lengths[waits] = np.minimum(lengths[waits], _least_cost(points, calls, sources[waits]))
    lengths[~is_work] = 0
    arrows = _arrows(points, handed)
    ready = _ready_arrows(points, batches, main_tid)
    return Host(
        points=points,
        sources=np.concatenate([sources, arrows[:, 0], ready[:, 0]]),
        targets=np.concatenate([targets, arrows[:, 1], ready[:, 1]]),
        lengths=np.concatenate(
            [lengths, time[arrows[:, 1]] - time[arrows[:, 0]], np.zeros(len(ready), dtype=np.int64)]
        ),
        is_work=np.concatenate(
            [is_work & ~waits, np.ones(len(arrows), dtype=bool), np.zeros(len(ready), dtype=bool)]
        ),
        apart_count=len(set(launching) - set(linked)),
    )


def _points(
    spans: pl.DataFrame,
    calls: Calls,
    handed: Sequence[HandOvers],
    main_tid: int,
    bounds_ns: Ints,
    batches: Batches | None,
) -> pl.DataFrame:
    """All points, by thread and time."""
    window = int(bounds_ns[0]), int(bounds_ns[-1])
    bounds = spans.group_by("tid").agg(first=pl.col("ts_ns").min(), last=pl.col("end_ns").max())
    marks = [(main_tid, MARK, bounds_ns.tolist())]
    marks += [(tid, MARK, [first, last]) for tid, first, last in bounds.rows()]
    for found in handed:
        marks.append((found.waiting[1], MARK, [*found.left.tolist(), *found.back.tolist()]))
        marks.append((found.working[1], MARK, found.began[found.was_idle].tolist()))
        rested = found.rested[found.was_idle].tolist()
        marks.append((found.working[1], DONE, [*rested, *found.ended.tolist()]))
    if batches is not None:
        # They worked on the first batch from before the window on.
        marks.append((WORKERS_TID, MARK, [window[0], *batches.ready_ns.tolist()]))
    marked = (
        pl.DataFrame(marks, schema=["tid", "role", "time_ns"], orient="row")
        .explode("time_ns")
        .drop_nulls()
    )
    blocked = calls.blocking.select("tid", "call", "ts_ns", "end_ns")
    parts = [
        marked.unique(),
        calls.launches.select("tid", "correlation", time_ns="ts_ns", role=pl.lit(LAUNCH)),
        blocked.select("tid", "call", time_ns="ts_ns", role=pl.lit(BLOCK_BEGIN)),
        blocked.select("tid", "call", time_ns="end_ns", role=pl.lit(BLOCK_END)),
    ]
    empty = pl.DataFrame(schema={"correlation": pl.Int64, "call": pl.Int64})
    everything = pl.concat([*parts, empty], how="diagonal").filter(
        pl.col("time_ns").is_between(*window)
    )
    tie = pl.col("role").replace_strict(_TIES, return_dtype=pl.Int64)
    # A wait of no length begins before it ends.
    instant = (pl.col("role") == BLOCK_END) & pl.col("call").is_duplicated()
    short = instant & pl.struct("call", "time_ns").is_duplicated()
    return everything.with_columns(tie=pl.when(short).then(5).otherwise(tie)).sort(
        "tid", "time_ns", "tie", "call", maintain_order=True
    )


def _with_batches(blocking: pl.DataFrame, batches: Batches | None, main_tid: int) -> pl.DataFrame:
    """Blocking calls, and the waits for batches among them."""
    if batches is None:
        return blocking
    first = int(blocking["call"].max() or -1) + 1 if blocking.height else 0  # type: ignore[arg-type]
    waits = pl.DataFrame({
        "call": np.arange(len(batches.asked_ns)) + first,
        "ts_ns": batches.asked_ns,
        "end_ns": batches.taken_ns,
        "idle": ~batches.waited,
    }).with_columns(name=pl.lit("wait for workers"), tid=pl.lit(main_tid, pl.Int64))  # fmt: skip
    return pl.concat([blocking, waits], how="diagonal")


def _ready_arrows(points: pl.DataFrame, batches: Batches | None, main_tid: int) -> Ints:
    """Pairs of points: from when a batch was made to where the main thread goes on with it."""
    if batches is None:
        return np.empty((0, 2), dtype=np.int64)
    place = _places(points)
    made = [(WORKERS_TID, MARK, time) for time in batches.ready_ns.tolist()]
    taken = [(main_tid, BLOCK_END, time) for time in batches.taken_ns.tolist()]
    return _pairs(place, made, taken)


def _inside(begins: Ints, ends: Ints, starts: Ints, stops: Ints) -> Bools:
    """Whether each interval lies in one of some disjoint ones, given in order."""
    if not len(starts):
        return np.zeros(len(begins), dtype=bool)
    at = np.searchsorted(starts, begins, side="right") - 1
    found: Bools = (at >= 0) & (begins >= starts[at]) & (ends <= stops[at])
    return found


def _is_wait(points: pl.DataFrame, sources: Ints, targets: Ints) -> Bools:
    role, call = points["role"].to_numpy(), points["call"].fill_null(-1).to_numpy()
    found: Bools = (role[sources] == BLOCK_BEGIN) & (call[sources] == call[targets])
    return found


def _least_cost(points: pl.DataFrame, calls: Calls, begins: Ints) -> Ints:
    """What each wait takes if the GPU is done: the shortest such call of its name, else nothing."""
    took = (
        calls.blocking.filter("idle")
        .group_by("name")
        .agg(least=(pl.col("end_ns") - pl.col("ts_ns")).min())
    )
    named = calls.blocking.select("call", "name").join(took, on="name", how="left")
    found = points[begins].select("call").join(named, on="call", how="left", maintain_order="left")
    return found["least"].fill_null(0).to_numpy()


def _arrows(points: pl.DataFrame, handed: Sequence[HandOvers]) -> Ints:
    """Pairs of points: from a thread that waits to the one that works for it, and back."""
    found = [np.empty((0, 2), dtype=np.int64)]
    place = _places(points)
    for each in handed:
        (_, waiting), (_, working) = each.waiting, each.working
        for earlier, later in (
            ((waiting, MARK, each.left[each.was_idle]), (working, MARK, each.began[each.was_idle])),
            ((working, DONE, each.ended), (waiting, MARK, each.back)),
        ):
            keys = ([(tid, role, time) for time in times.tolist()]
                    for tid, role, times in (earlier, later))  # fmt: skip
            found.append(_pairs(place, *keys))
    return np.concatenate(found)


def _places(points: pl.DataFrame) -> Mapping[_Key, int]:
    """The last point of each thread, role and time."""
    rows = points.select("tid", "role", "time_ns").rows()
    return {key: at for at, key in enumerate(rows)}


def _pairs(place: Mapping[_Key, int], earlier: Sequence[_Key], later: Sequence[_Key]) -> Ints:
    """Points by their keys, of the pairs that are both in the window."""
    both = zip(earlier, later, strict=True)
    found = [(place[a], place[b]) for a, b in both if a in place and b in place]
    return np.array(found, dtype=np.int64).reshape(-1, 2)
