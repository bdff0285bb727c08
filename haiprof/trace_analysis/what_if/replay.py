"""One rank's steps as a graph: host threads, launches, kernels on streams, and their waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints
from haiprof.trace_analysis.collectives import CATEGORY, clock_base_ns, collective_waits
from haiprof.trace_analysis.dependencies import NEVER, DeviceEvents
from haiprof.trace_analysis.what_if.replay_parts import (
    HOST,
    WORKERS,
    WORKERS_TID,
    Batches,
    Change,
    ReplayWindow,
    blocking_calls,
    change_lengths,
    kernels_of,
    ordered_pairs,
    replay_window,
    stream_waits,
    with_cpu_collectives,
    worker_batches,
)
from haiprof.trace_format.kineto.rank_trace import Trace

DONE, MARK, LAUNCH, BLOCK_BEGIN, BLOCK_END = "done", "mark", "launch", "block_begin", "block_end"
_TIES = {BLOCK_END: 0, DONE: 1, MARK: 2, LAUNCH: 3, BLOCK_BEGIN: 4}
"""Order of points of one thread at one time: a wait ends before what follows it."""
_KEY = ["tid", "role", "time_ns"]
_POINTS = ("tid", "role", "time_ns", "correlation", "call")
_Key = tuple[int, str, Ints]
"""A thread, the role of its points, and their times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGraph:
    """One rank's points in time and the edges between them; small enough to be sent."""

    points: pl.DataFrame
    """`time_ns` at which each was reached, since 1970 on the rank's clock; `caused_ns` at which the
    host came there, or launched the kernel that begins or ends there; null of a loader's workers,
    which are ahead of it."""
    edges: pl.DataFrame
    """`source` and `target`, rows of `points`; of work its `label` (a kernel's name, `workers` or
    `host`; null of waiting and of collectives) and `begin_ns`, when the CPU began or launched it;
    `event` in `Trace.gpu` of a kernel."""
    lengths: Ints
    """ns of each edge as it was and with each change, shape (edges, 1 + changes)."""
    bounds_ns: Ints
    """When the host took each batch that it had waited for, where the loader's workers limit the
    step; else when each step began and the last one ended."""
    waited_ns: int
    """For batches; 0 where the loader's workers do not limit the step."""
    begins_ns: int
    """Start of the window."""
    step_count: int
    apart_count: int
    """Threads that launch kernels and that nothing in the trace starts: they keep their times."""
    workers_ahead: bool
    """Whether the loader's workers always had a batch ready: their pace is not in the trace."""


def rank_graph(
    trace: Trace, *, steps: tuple[int, int] | None = None, changes: Sequence[Change] = ()
) -> RankGraph:
    """The graph of one rank.

    Source: replay of a dependency graph as in Zhu et al., "Daydream" (ATC 2020), with the
    transfer of collectives as in Lin et al. (OSDI 2025).
    """
    window = replay_window(trace, steps)
    within = (window.begin_ns, window.end_ns)
    kernels = kernels_of(trace, within)
    blocking, waited = blocking_calls(kernels, within)
    kernels = with_cpu_collectives(kernels, within)
    blocking, waited = _with_waits_for_collectives(window, kernels, blocking, waited)
    batches, has_workers = worker_batches(trace, within, window.main_tid)
    points, on_host, apart_count = _host(window, kernels, blocking, waited, batches)
    # The points of the host's threads, then the starts of the kernels, then their ends.
    times = np.concatenate([points["time_ns"].to_numpy(), kernels.starts, kernels.ends])
    launched = np.where(kernels.known, kernels.launched, kernels.starts)
    starts = points.height + np.arange(len(launched))
    on_gpu = kernels.frame.select(
        "event",
        tid="launch_tid",
        label=pl.when(~pl.Series(kernels.talks)).then(pl.col("name").cast(pl.String)),
        source=pl.Series(starts),
        target=pl.Series(starts + len(starts)),
        length=pl.Series(kernels.ends - kernels.starts),
        begin_ns=pl.Series(launched),
        end_ns=pl.Series(launched),
    )
    waits = _waiting(kernels, points, waited, times)
    edges = pl.concat([on_gpu, on_host, *waits], how="diagonal_relaxed")
    lengths = edges["length"].to_numpy()
    columns = [lengths, *(change_lengths(trace, change, lengths, edges) for change in changes)]
    base = clock_base_ns(trace)
    caused = np.concatenate([points["time_ns"].to_numpy(), launched, launched])
    by_host = np.ones(len(times), dtype=np.bool_)
    by_host[: points.height] = points["tid"].to_numpy() != WORKERS_TID
    return RankGraph(
        points=pl.DataFrame({"time_ns": times, "caused_ns": caused}).select(
            pl.col("time_ns") + base,
            pl.when(pl.Series(by_host)).then(pl.col("caused_ns") + base).alias("caused_ns"),
        ),
        edges=edges.select("source", "target", "label", pl.col("begin_ns") + base, "event"),
        lengths=np.stack(columns, axis=1),
        bounds_ns=base + (window.bounds_ns if batches is None else batches.bounds),
        waited_ns=0 if batches is None else batches.waited_ns,
        begins_ns=window.begin_ns + base,
        step_count=window.step_count,
        apart_count=apart_count,
        workers_ahead=has_workers and batches is None,
    )


def _with_waits_for_collectives(
    window: ReplayWindow, kernels: DeviceEvents, blocking: pl.DataFrame, waited: pl.DataFrame
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Blocking calls and what they wait for, with the waits for collectives of the CPU."""
    numbered = kernels.frame.with_columns(
        kernel=pl.int_range(pl.len(), dtype=pl.Int64),
        ts_ns=pl.Series(kernels.starts),
        dur_ns=pl.Series(kernels.ends - kernels.starts),
    )
    own = pl.col("category").cast(pl.String) == CATEGORY
    waits = collective_waits(window.spans, numbered.filter(own))
    rows = waits.with_columns(call=pl.int_range(pl.len(), dtype=pl.Int64) + _next_call(blocking))
    known = rows.select("call", "kernel", begin_ns="ts_ns")
    return (
        pl.concat([blocking, rows.drop("kernel")], how="diagonal_relaxed"),
        pl.concat([waited, known], how="diagonal_relaxed"),
    )


def _next_call(blocking: pl.DataFrame) -> int:
    """The first number that no call has."""
    return int(blocking["call"].max() or -1) + 1 if blocking.height else 0  # type: ignore[arg-type]


def _host(
    window: ReplayWindow, kernels: DeviceEvents, blocking: pl.DataFrame, waited: pl.DataFrame,
    batches: Batches | None,
) -> tuple[pl.DataFrame, pl.DataFrame, int]:  # fmt: skip
    """Points of the host's threads, edges between them, and the number of threads on their own."""
    known = np.flatnonzero(kernels.known)
    launches = (
        kernels.frame[known]
        .select("correlation", tid="launch_tid", time_ns=pl.Series(kernels.launched[known]))
        .unique("correlation", keep="first", maintain_order=True)
    )
    launching = launches["tid"].unique().to_list()
    linked = [window.main_tid, *(found.working[1] for found in window.handed)]
    spans = window.spans.filter(pl.col("tid").is_in([*linked, *launching]))
    # `idle`: whether the GPU was done before the call began.
    busy = waited.filter(pl.Series(kernels.ends[waited["kernel"]]) > pl.col("begin_ns"))["call"]
    blocking = blocking.with_columns(idle=~pl.col("call").is_in(busy.implode())).filter(
        pl.col("tid").is_in(spans["tid"].implode())
    )
    if batches is not None:
        first = _next_call(blocking)
        waits = pl.DataFrame({
            "call": np.arange(len(batches.asked_ns)) + first, "ts_ns": batches.asked_ns,
            "end_ns": batches.taken_ns, "idle": ~batches.waited,
        })  # fmt: skip
        named = {"name": pl.lit("wait for workers"), "tid": pl.lit(window.main_tid, pl.Int64)}
        blocking = pl.concat([blocking, waits.with_columns(**named)], how="diagonal")
    points = _points(spans, launches, blocking, window, batches)
    edges = _host_edges(points, blocking, window, batches)
    return points, edges, len(set(launching) - set(linked))


def _points(
    spans: pl.DataFrame, launches: pl.DataFrame, blocking: pl.DataFrame, window: ReplayWindow,
    batches: Batches | None,
) -> pl.DataFrame:  # fmt: skip
    """Columns `_POINTS`, by thread and time; `correlation` of a launch, `call` of a wait."""
    within = int(window.bounds_ns[0]), int(window.bounds_ns[-1])
    bounds = spans.group_by("tid").agg(first=pl.col("ts_ns").min(), last=pl.col("end_ns").max())
    marks = [(window.main_tid, MARK, window.bounds_ns.tolist())]
    marks += [(tid, MARK, [first, last]) for tid, first, last in bounds.rows()]
    for found in window.handed:
        marks.append((found.waiting[1], MARK, [*found.left.tolist(), *found.back.tolist()]))
        marks.append((found.working[1], MARK, found.began[found.was_idle].tolist()))
        rested = found.rested[found.was_idle].tolist()
        marks.append((found.working[1], DONE, [*rested, *found.ended.tolist()]))
    if batches is not None:
        # They worked on the first batch from before the window on.
        marks.append((WORKERS_TID, MARK, [within[0], *batches.ready_ns.tolist()]))
    marked = pl.DataFrame(marks, schema=_KEY, orient="row").explode("time_ns").drop_nulls()
    parts = [
        marked.unique(),
        launches.with_columns(role=pl.lit(LAUNCH)),
        blocking.select("tid", "call", time_ns="ts_ns", role=pl.lit(BLOCK_BEGIN)),
        blocking.select("tid", "call", time_ns="end_ns", role=pl.lit(BLOCK_END)),
    ]
    everything = pl.concat(parts, how="diagonal")
    tie = pl.col("role").replace_strict(_TIES, return_dtype=pl.Int64)
    # A wait of no length begins before it ends.
    instant = (pl.col("role") == BLOCK_END) & pl.col("call").is_duplicated()
    short = instant & pl.struct("call", "time_ns").is_duplicated()
    return (
        everything.filter(pl.col("time_ns").is_between(*within))
        .with_columns(tie=pl.when(short).then(5).otherwise(tie))
        .sort("tid", "time_ns", "tie", "call", maintain_order=True)
        .select(_POINTS)
    )


def _host_edges(
    points: pl.DataFrame, blocking: pl.DataFrame, window: ReplayWindow, batches: Batches | None
) -> pl.DataFrame:
    """From each point of a thread to the next, and between threads that wait for each other."""
    time, tid = points["time_ns"].to_numpy(), points["tid"].to_numpy()
    source = np.flatnonzero(tid[1:] == tid[:-1])
    target = source + 1
    length, works = time[target] - time[source], np.ones(len(source), dtype=bool)
    arrows = []
    for found in window.handed:
        (_, waiting), (_, working) = found.waiting, found.working
        left, began = found.left[found.was_idle], found.began[found.was_idle]
        paused = _inside(time[source], time[target], found.left, found.back)
        idle = _inside(time[source], time[target], found.rested[found.was_idle], began)
        works &= ~((tid[source] == waiting) & paused) & ~((tid[source] == working) & idle)
        arrows += [
            _arrows(points, (waiting, MARK, left), (working, MARK, began)),
            _arrows(points, (working, DONE, found.ended), (waiting, MARK, found.back)),
        ]
    call, begins = points["call"].fill_null(-1).to_numpy(), points["role"].to_numpy() == BLOCK_BEGIN
    waits: Bools = begins[source] & (call[source] == call[target])
    # What each wait takes if the GPU is done: the shortest such call of its name, else nothing.
    took = blocking.filter("idle").group_by("name").agg(
        least=(pl.col("end_ns") - pl.col("ts_ns")).min()
    )  # fmt: skip
    least = (
        blocking.select("call", "name").join(took, on="name", how="left").select("call", "least")
    )
    costs = points[source[waits]].select("call").join(
        least, on="call", how="left", maintain_order="left"
    )["least"]  # fmt: skip
    length[waits] = np.minimum(length[waits], costs.fill_null(0).to_numpy())
    length[~works] = 0
    chained = {"source": source, "target": target, "length": length, "works": works & ~waits}
    parts = [pl.DataFrame(chained)]
    for pairs in arrows:
        ns = time[pairs["target"].to_numpy()] - time[pairs["source"].to_numpy()]
        parts.append(pairs.with_columns(length=pl.Series(ns, dtype=pl.Int64), works=True))
    if batches is not None:
        # From when a batch was made to where the main thread goes on with it.
        made = (WORKERS_TID, MARK, batches.ready_ns)
        ready = _arrows(points, made, (window.main_tid, BLOCK_END, batches.taken_ns))
        parts.append(ready.with_columns(length=pl.lit(0, pl.Int64), works=False))
    edges = pl.concat(parts)
    source, target = edges["source"].to_numpy(), edges["target"].to_numpy()
    by_workers = pl.when(pl.col("tid") == WORKERS_TID).then(pl.lit(WORKERS)).otherwise(pl.lit(HOST))
    return edges.with_columns(
        begin_ns=pl.Series(time[source]), end_ns=pl.Series(time[target]), tid=pl.Series(tid[target])
    ).select(pl.exclude("works"), label=pl.when("works").then(by_workers))


def _inside(begins: Ints, ends: Ints, starts: Ints, stops: Ints) -> Bools:
    """Whether each interval lies in one of some disjoint ones, given in order."""
    if not len(starts):
        return np.zeros(len(begins), dtype=bool)
    at = np.searchsorted(starts, begins, side="right") - 1
    return (at >= 0) & (begins >= starts[at]) & (ends <= stops[at])


def _arrows(points: pl.DataFrame, earlier: _Key, later: _Key) -> pl.DataFrame:
    """`source`, `target`: the last points of each pair of times, where both are in the window."""
    last = points.select(_KEY).with_row_index("row").unique(_KEY, keep="last")
    ends = [
        pl.DataFrame({"time_ns": times}, schema={"time_ns": pl.Int64})
        .with_columns(tid=pl.lit(tid, pl.Int64), role=pl.lit(role))
        .join(last, on=_KEY, how="left", maintain_order="left")["row"]
        for tid, role, times in (earlier, later)
    ]
    pairs = pl.DataFrame({"source": ends[0], "target": ends[1]})
    return pairs.drop_nulls().cast(pl.Int64)


def _waiting(
    kernels: DeviceEvents, points: pl.DataFrame, waited: pl.DataFrame, times: Ints
) -> Iterator[pl.DataFrame]:
    """Launches, streams in order, streams that wait, and calls, whose waits are the usual."""
    earlier, later = ordered_pairs(kernels)
    first, second = stream_waits(kernels)
    # From a launch to the start of a computing kernel that nothing else on the GPU held up.
    before = np.full(len(kernels.starts), NEVER)
    before[later] = kernels.ends[earlier]
    latency = kernels.starts - kernels.launched
    launched = kernels.known & (latency >= 0)
    free = launched & (before <= kernels.launched) & ~kernels.talks
    free[second] = False
    known = latency[launched]
    usual_latency = _usual(latency[free], otherwise=int(known.min()) if len(known) else 0)
    gap = kernels.starts[later] - kernels.ends[earlier]
    queued = kernels.known[later] & (
        kernels.launched[later] + usual_latency <= kernels.ends[earlier]
    )
    usual_gap = _usual(gap[queued & ~np.isin(later, second)], otherwise=0)
    starts = points.height + np.arange(len(kernels.starts))
    ends = starts + len(starts)
    placed = points.with_row_index("point")
    numbered = kernels.frame.select("correlation").with_row_index("kernel")
    put = placed.filter(pl.col("role") == LAUNCH).join(numbered, on="correlation")
    held = (
        placed.filter(pl.col("role") == BLOCK_END).select("point", "call").join(waited, on="call")
    )
    (putting, kernel), (point, awaited) = (
        [frame[name].cast(pl.Int64).to_numpy() for name in ("point", "kernel")]
        for frame in (put, held)
    )
    yield _wait(times, putting, starts[kernel], usual_latency)
    overlap = int(gap.min(initial=0))
    yield _wait(times, ends[earlier], starts[later], usual_gap, least_ns=overlap)
    yield _wait(times, ends[first], starts[second], usual_gap)
    # From what a call waits for to the end of the call.
    after = times[point] - kernels.ends[awaited]
    during = kernels.ends[awaited] > held["begin_ns"].to_numpy()
    yield _wait(times, ends[awaited], point, _usual(after[during], otherwise=0))


def _wait(
    times: Ints, sources: Ints, targets: Ints, usual_ns: int, *, least_ns: int = 0
) -> pl.DataFrame:
    """Edges of waiting, without those that the trace's own times contradict."""
    seen = times[targets] - times[sources]
    kept = seen >= least_ns
    length = np.minimum(seen[kept], usual_ns)
    return pl.DataFrame({"source": sources[kept], "target": targets[kept], "length": length})


def _usual(found: Ints, *, otherwise: int) -> int:
    """The lower median, which one cold call of two does not move; `otherwise` without any value."""
    return int(np.quantile(found, 0.5, method="lower")) if len(found) else otherwise
