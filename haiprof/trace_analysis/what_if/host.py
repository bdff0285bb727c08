"""The host's part of a replay: threads as chains of launches, waits and work between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import covered_lengths, union
from haiprof.trace_analysis.what_if.loader import WORKERS_TID, Batches

DONE, MARK, LAUNCH, BLOCK_BEGIN, BLOCK_END = "done", "mark", "launch", "block_begin", "block_end"
_TIES = {BLOCK_END: 0, DONE: 1, MARK: 2, LAUNCH: 3, BLOCK_BEGIN: 4}
"""Order of points of one thread at one time: a wait ends before what follows it."""
AUTOGRAD = r"^autograd::engine|AccumulateGrad|Backward\d*$"
"""Spans of backward passes; before 2021 only the functions themselves were recorded."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handoffs:
    """Handoffs of the main thread to another: backward passes on autograd's thread."""

    tid: int
    left_ns: Ints
    """Last thing that the main thread does before."""
    begin_ns: Ints
    end_ns: Ints
    back_ns: Ints
    """Next thing that the main thread does."""


def host(
    spans: pl.DataFrame,
    calls: Calls,
    main_tid: int,
    *,
    window: tuple[int, int],
    batches: Batches | None = None,
) -> Host:
    """The host threads of a rank.

    Args:
        spans: Operators and runtime calls in the window: `name`, `tid`, `ts_ns`, `end_ns`.
        calls: The calls among them that matter.
        main_tid: The thread that trains.
        window: Start and end in ns.
        batches: Of a loader with workers, which make one after the other beside all threads.

    Returns:
        Chains of points, one per thread. While autograd's thread works and the main thread does
        nothing, the main thread waits for it: an arrow there and one back. Other threads that
        launch kernels run by themselves from where they begin: nothing in a trace says what they
        wait for. Threads that launch none, such as NCCL's watchdog, are left out.
    """
    handoffs = _handoffs(spans, main_tid)
    launching = calls.launches["tid"].unique().to_list()
    linked = [main_tid, *(found.tid for found in handoffs)]
    spans = spans.filter(pl.col("tid").is_in([*linked, *launching]))
    blocking = calls.blocking.filter(pl.col("tid").is_in(spans["tid"].implode()))
    calls = replace(calls, blocking=_with_batches(blocking, batches, main_tid))
    points = _points(spans, calls, handoffs, main_tid, window, batches)
    time, tid = points["time_ns"].to_numpy(), points["tid"].to_numpy()
    chained = np.flatnonzero(tid[1:] == tid[:-1])
    sources, targets = chained, chained + 1
    lengths = time[targets] - time[sources]
    is_work = np.ones(len(chained), dtype=bool)
    for found in handoffs:
        main, other = tid[sources] == main_tid, tid[sources] == found.tid
        gaps = (found.end_ns[:-1], found.begin_ns[1:])
        is_work &= ~(main & _inside(time[sources], time[targets], found.left_ns, found.back_ns))
        is_work &= ~(other & _inside(time[sources], time[targets], *gaps))
    waits = _is_wait(points, sources, targets)
    lengths[waits] = np.minimum(lengths[waits], _least_cost(points, calls, sources[waits]))
    lengths[~is_work] = 0
    there, back = _arrows(points, handoffs, main_tid)
    arrows = np.concatenate([there, back])
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


def _handoffs(spans: pl.DataFrame, main_tid: int) -> list[_Handoffs]:
    names = spans.filter(pl.col("name").str.contains(AUTOGRAD))
    main = _outside_autograd(spans.filter(pl.col("tid") == main_tid))
    stamps = np.unique(np.concatenate([main["ts_ns"].to_numpy(), main["end_ns"].to_numpy()]))
    return [
        _bursts(spans.filter(pl.col("tid") == tid).sort("ts_ns"), stamps, tid)
        for tid in names["tid"].unique().sort()
        if tid != main_tid
    ]


def _outside_autograd(spans: pl.DataFrame) -> pl.DataFrame:
    """A thread's spans without those of autograd, such as gradients on the CPU."""
    own = spans.filter(pl.col("name").str.contains(AUTOGRAD))
    backward = union(own["ts_ns"].to_numpy(), own["end_ns"].to_numpy())
    begins = spans["ts_ns"].to_numpy()
    return spans.filter(pl.Series(covered_lengths(backward, begins, begins + 1)) == 0)


def _bursts(spans: pl.DataFrame, stamps: Ints, tid: int) -> _Handoffs:
    """Runs of a thread's spans during which the main thread neither begins nor ends anything."""
    begin, end = spans["ts_ns"].to_numpy(), spans["end_ns"].to_numpy()
    at = np.searchsorted(stamps, begin, side="right")
    inner = (at > 0) & (at < len(stamps))
    begin, end, at = begin[inner], end[inner], at[inner]
    heads = np.flatnonzero(np.append(True, at[1:] != at[:-1])[: len(at)])
    back = stamps[at[heads]]
    last = np.maximum.reduceat(end, heads) if len(heads) else end
    return _Handoffs(
        tid=tid,
        left_ns=stamps[at[heads] - 1],
        begin_ns=begin[heads],
        end_ns=np.minimum(last, back),
        back_ns=back,
    )


def _points(
    spans: pl.DataFrame,
    calls: Calls,
    handoffs: list[_Handoffs],
    main_tid: int,
    window: tuple[int, int],
    batches: Batches | None,
) -> pl.DataFrame:
    """All points, by thread and time."""
    bounds = spans.group_by("tid").agg(first=pl.col("ts_ns").min(), last=pl.col("end_ns").max())
    marks = [(main_tid, MARK, list(window))]
    marks += [(tid, MARK, [first, last]) for tid, first, last in bounds.rows()]
    for found in handoffs:
        marks.append((main_tid, MARK, [*found.left_ns.tolist(), *found.back_ns.tolist()]))
        marks.append((found.tid, MARK, found.begin_ns.tolist()))
        marks.append((found.tid, DONE, found.end_ns.tolist()))
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
    rows = points.with_row_index("point").filter(
        ((pl.col("tid") == WORKERS_TID) & (pl.col("role") == MARK))
        | ((pl.col("tid") == main_tid) & (pl.col("role") == BLOCK_END))
    )
    columns = rows.select("tid", "role", "time_ns", "point").rows()
    place = {(tid, role, time): at for tid, role, time, at in columns}
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


def _arrows(points: pl.DataFrame, handoffs: list[_Handoffs], main_tid: int) -> tuple[Ints, Ints]:
    """Pairs of points: from the main thread to each burst, and from the burst back."""
    there, back = [np.empty((0, 2), dtype=np.int64)], [np.empty((0, 2), dtype=np.int64)]
    marks = points.with_row_index("point").filter(pl.col("role").is_in([MARK, DONE]))
    columns = ("tid", "role", "time_ns", "point")
    place = {(tid, role, time): at for tid, role, time, at in marks.select(*columns).rows()}
    for found in handoffs:
        main = [(main_tid, MARK, time) for time in found.left_ns.tolist()]
        begin = [(found.tid, MARK, time) for time in found.begin_ns.tolist()]
        end = [(found.tid, DONE, time) for time in found.end_ns.tolist()]
        again = [(main_tid, MARK, time) for time in found.back_ns.tolist()]
        there.append(_pairs(place, main, begin))
        back.append(_pairs(place, end, again))
    return np.concatenate(there), np.concatenate(back)


def _pairs(place: Mapping[_Key, int], earlier: Sequence[_Key], later: Sequence[_Key]) -> Ints:
    """Points by their keys, of the pairs that are both in the window."""
    both = zip(earlier, later, strict=True)
    found = [(place[a], place[b]) for a, b in both if a in place and b in place]
    return np.array(found, dtype=np.int64).reshape(-1, 2)
