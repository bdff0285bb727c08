"""One rank's steps as a graph: host threads, launches, kernels on streams, and their waits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.intervals import Ints
from haiprof.trace_analysis.collectives import CATEGORY, clock_base_ns, collective_waits
from haiprof.trace_analysis.device_dependencies import (
    NEVER,
    DeviceEvents,
    RuntimeCalls,
    runtime_calls,
)
from haiprof.trace_analysis.host_dependencies import HandOvers
from haiprof.trace_analysis.what_if.replay_parts import (
    HOST,
    WORKERS,
    WORKERS_TID,
    Batches,
    Change,
    ReplayWindow,
    Work,
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
    role, call = points["role"].to_numpy(), points["call"].fill_null(-1).to_numpy()
    waits: Bools = (role[sources] == BLOCK_BEGIN) & (call[sources] == call[targets])
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


NEVER_CAUSED_NS = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGraph:
    """One rank's points in time and the edges between them; small enough to be sent."""

    times: Ints
    """When each point was reached, ns since 1970 on the rank's clock, shape (points,)."""
    caused_ns: Ints
    """When the host came to each point, or launched the kernel that begins or ends there, shape
    (points,); of a loader's workers, which are ahead of it, `NEVER_CAUSED_NS`."""
    bounds_ns: Ints
    """When the host took each batch that it had waited for, where the loader's workers limit the
    step; else when each step began and the last one ended."""
    waited_ns: int
    """For batches; 0 where the loader's workers do not limit the step."""
    sources: Ints
    targets: Ints
    """Ends of each edge, shape (edges,); the work of kernels comes first, by kernel."""
    lengths: Ints
    """ns of each edge as it was and with each change, shape (edges, 1 + changes)."""
    begin_ns: Ints
    """When the CPU began or launched the work along each edge, shape (edges,)."""
    label: Ints
    """Whose work it is, as a place in `labels`; -1 of waiting and of collectives."""
    labels: tuple[str, ...]
    """Names of kernels, `workers` of the loader, and `host`."""
    events: Ints
    """`event` in `Trace.gpu` of each kernel, shape (kernels,)."""
    begins_ns: int
    """Start of the window."""
    step_count: int
    apart_count: int
    """Threads that launch kernels and that nothing in the trace starts: they keep their times."""
    contradicted_count: int
    """Waits that the trace's own times contradict, left out."""
    workers_ahead: bool
    """Whether the loader's workers always had a batch ready: their pace is not in the trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """The inputs of a rank's graph."""

    window: ReplayWindow
    kernels: DeviceEvents
    runtime: RuntimeCalls
    threads: Host
    waited: pl.DataFrame
    """From `blocking_calls`."""
    batches: Batches | None
    workers_ahead: bool
    times: Ints
    """Of the hosts' points, then of the kernels' starts, then of their ends."""

    @property
    def starts(self) -> Ints:
        """The point at which each kernel starts."""
        return self.threads.points.height + np.arange(len(self.kernels.starts))

    @property
    def ends(self) -> Ints:
        """The point at which each kernel ends."""
        return self.starts + len(self.kernels.starts)

    @property
    def launched(self) -> Ints:
        """When each kernel was launched; its start where that is not known."""
        kernels = self.kernels
        found: Ints = np.where(kernels.known, kernels.launched, kernels.starts)
        return found

    @property
    def caused(self) -> Ints:
        """When the host caused each point to be reached."""
        points = self.threads.points
        made = points["tid"].to_numpy() == WORKERS_TID
        host = np.where(made, NEVER_CAUSED_NS, points["time_ns"].to_numpy())
        return np.concatenate([host, self.launched, self.launched])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edges:
    """Some edges of one kind."""

    sources: Ints
    targets: Ints
    lengths: Ints
    contradicted_count: int = 0


def rank_graph(
    trace: Trace, *, steps: tuple[int, int] | None = None, changes: Sequence[Change] = ()
) -> RankGraph:
    """The graph of one rank.

    Source: replay of a dependency graph as in Zhu et al., "Daydream" (ATC 2020), with the
    transfer of collectives as in Lin et al. (OSDI 2025).
    """
    rank = _rank(trace, steps)
    threads, kernels = rank.threads, rank.kernels
    parts = [
        _Edges(sources=rank.starts, targets=rank.ends, lengths=kernels.ends - kernels.starts),
        _Edges(sources=threads.sources, targets=threads.targets, lengths=threads.lengths),
        *_waiting(trace, rank),
    ]
    lengths = np.concatenate([part.lengths for part in parts])
    work = _work(rank, parts, len(lengths))
    columns = [lengths, *(change_lengths(trace, change, lengths, work) for change in changes)]
    base, caused = clock_base_ns(trace), rank.caused
    return RankGraph(
        times=rank.times + base,
        caused_ns=np.where(caused < NEVER_CAUSED_NS, caused + base, caused),
        bounds_ns=base + (rank.window.bounds_ns if rank.batches is None else rank.batches.bounds),
        waited_ns=0 if rank.batches is None else rank.batches.waited_ns,
        sources=np.concatenate([part.sources for part in parts]),
        targets=np.concatenate([part.targets for part in parts]),
        lengths=np.stack(columns, axis=1),
        begin_ns=work.begin_ns + base,
        label=work.label,
        labels=work.labels,
        events=rank.kernels.frame["event"].to_numpy(),
        begins_ns=rank.window.begin_ns + base,
        step_count=rank.window.step_count,
        apart_count=rank.threads.apart_count,
        contradicted_count=sum(part.contradicted_count for part in parts),
        workers_ahead=rank.workers_ahead,
    )


def _rank(trace: Trace, steps: tuple[int, int] | None) -> _Rank:
    window = replay_window(trace, steps)
    bounds = (window.begin_ns, window.end_ns)
    runtime = runtime_calls(trace)
    kernels = kernels_of(trace, runtime, bounds)
    blocking, waited = blocking_calls(trace, kernels, runtime, bounds)
    kernels = with_cpu_collectives(trace, kernels, bounds)
    blocking, waited = _with_waits_for_collectives(window, kernels, blocking, waited)
    busy = waited.filter(pl.Series(kernels.ends[waited["kernel"]]) > pl.col("begin_ns"))
    known = np.flatnonzero(kernels.known)
    frame = kernels.frame[known].select("correlation", tid="launch_tid")
    launches = frame.with_columns(ts_ns=pl.Series(kernels.launched[known]))
    calls = Calls(
        launches=launches.unique("correlation", keep="first", maintain_order=True),
        blocking=blocking.with_columns(idle=~pl.col("call").is_in(busy["call"].implode())),
    )
    batches, has_workers = worker_batches(trace, bounds, window.main_tid)
    threads = host(
        window.spans,
        calls,
        window.main_tid,
        bounds_ns=window.bounds_ns,
        handed=window.handed,
        batches=batches,
    )
    times = [threads.points["time_ns"].to_numpy(), kernels.starts, kernels.ends]
    return _Rank(
        window=window,
        kernels=kernels,
        batches=batches,
        workers_ahead=has_workers and batches is None,
        runtime=runtime,
        threads=threads,
        waited=waited,
        times=np.concatenate(times),
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
    first = int(blocking["call"].max() or -1) + 1 if blocking.height else 0  # type: ignore[arg-type]
    rows = waits.with_columns(call=pl.int_range(pl.len(), dtype=pl.Int64) + first)
    return (
        pl.concat([blocking, rows.drop("kernel")], how="diagonal_relaxed"),
        pl.concat(
            [waited, rows.select("call", "kernel", begin_ns="ts_ns")], how="diagonal_relaxed"
        ),
    )


def _waiting(trace: Trace, rank: _Rank) -> Iterator[_Edges]:
    """Launches, streams in order, streams that wait for each other, and calls that wait.

    A wait gets the usual length of such waits, or its own where that was shorter; the rest remains
    unexplained.
    """
    kernels = rank.kernels
    earlier, later = ordered_pairs(kernels)
    first, second = stream_waits(trace, kernels, rank.runtime)
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
    points, launches = _launches(rank)
    yield _wait(rank, points, rank.starts[launches], usual_latency)
    overlap = int(gap.min(initial=0))
    yield _wait(rank, rank.ends[earlier], rank.starts[later], usual_gap, least_ns=overlap)
    yield _wait(rank, rank.ends[first], rank.starts[second], usual_gap)
    yield _blocking_edges(rank)


def _launches(rank: _Rank) -> tuple[Ints, Ints]:
    """Points of launches and the kernels that they put on a stream."""
    points = rank.threads.points.with_row_index("point").filter(pl.col("role") == LAUNCH)
    numbered = rank.kernels.frame.select("correlation").with_row_index("kernel")
    pairs = points.select("point", "correlation").join(numbered, on="correlation")
    return pairs["point"].cast(pl.Int64).to_numpy(), pairs["kernel"].cast(pl.Int64).to_numpy()


def _blocking_edges(rank: _Rank) -> _Edges:
    """From what a call waits for to the end of the call."""
    ends = rank.threads.points.with_row_index("point").filter(pl.col("role") == BLOCK_END)
    waits = ends.select("point", "call").join(rank.waited, on="call")
    points, kernels = (waits[name].cast(pl.Int64).to_numpy() for name in ("point", "kernel"))
    after = rank.times[points] - rank.kernels.ends[kernels]
    during = rank.kernels.ends[kernels] > waits["begin_ns"].to_numpy()
    return _wait(rank, rank.ends[kernels], points, _usual(after[during], otherwise=0))


def _wait(rank: _Rank, sources: Ints, targets: Ints, usual_ns: int, *, least_ns: int = 0) -> _Edges:
    """Edges of waiting; what ends more than `-least_ns` after it was waited for is left out."""
    seen = rank.times[targets] - rank.times[sources]
    kept = seen >= least_ns
    return _Edges(
        sources=sources[kept],
        targets=targets[kept],
        lengths=np.minimum(seen[kept], usual_ns),
        contradicted_count=int((~kept).sum()),
    )


def _usual(found: Ints, *, otherwise: int) -> int:
    """The lower median, which one cold call of two does not move; `otherwise` without any value."""
    return int(np.quantile(found, 0.5, method="lower")) if len(found) else otherwise


def _work(rank: _Rank, parts: Sequence[_Edges], edges: int) -> Work:
    """What runs along each edge: kernels first, then the CPU, then nothing."""
    kernels, threads = rank.kernels, rank.threads
    names, places = np.unique(kernels.frame["name"].to_numpy().astype(str), return_inverse=True)
    label, begin = np.full(edges, -1), np.zeros(edges, dtype=np.int64)
    count, host_count = len(kernels.starts), len(threads.sources)
    label[:count] = np.where(kernels.talks, -1, places)
    made = threads.points["tid"].to_numpy()[threads.targets] == WORKERS_TID
    place = np.where(made, len(names), len(names) + 1)
    label[count : count + host_count] = np.where(threads.is_work, place, -1)
    begin[:count] = rank.launched
    begin[count : count + host_count] = rank.times[threads.sources]
    end = begin.copy()
    end[count : count + host_count] = rank.times[threads.targets]
    tid = np.full(edges, -1)
    tid[:count] = kernels.frame["launch_tid"].fill_null(-1).to_numpy()
    tid[count : count + host_count] = rank.threads.points["tid"].to_numpy()[threads.targets]
    return Work(
        label=label, labels=(*names.tolist(), WORKERS, HOST), begin_ns=begin, end_ns=end, tid=tid
    )
