"""What-if of one rank: changes, the window, and its graph of points in time, work and waiting."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.base.intervals import Bools, Ints, covered_lengths
from haiprof.trace_analysis import dependencies
from haiprof.trace_analysis.collectives import (
    CATEGORY,
    clock_base_ns,
    collective_waits,
    cpu_collectives,
)
from haiprof.trace_analysis.device_time import COMMUNICATION, step_marks, union_of, with_kind
from haiprof.trace_format.kineto.rank_trace import Trace

KERNEL, OPERATOR, LOADER, NETWORK, RANK = "kernel", "operator", "loader", "network", "rank"
LAUNCHES, COLLECTIVE, TOGETHER = "launches", "collective", "together"
LOADER_NAME = r"^enumerate\(DataLoader\)"
"""The annotation that PyTorch puts around a loader's `next`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing made faster; made by the functions below."""

    kind: str  # `kernel`, `operator`, `launches`, `loader`, `network`, `collective` or `rank`
    name: str = ""
    """Regular expression that names of kernels, operators or collectives must contain."""
    speedup: float = math.inf  # How many times as fast; infinite: it takes no time
    rank: int | None = None
    """Which rank becomes as fast as the others; None with kind `rank` evens out all of them."""
    shown: str = ""  # Shown in place of the expression
    parts: tuple[Change, ...] = ()  # Of kind `together`: all of them at once

    def __post_init__(self) -> None:
        """Checks what was asked for."""
        if not self.speedup > 0:  # NaN too
            raise UsageError(f"trace what-if: {self.speedup} times as fast is no speed-up")
        try:
            re.compile(self.name)
        except re.error as error:
            raise UsageError(
                f"trace what-if: {self.name!r}: no regular expression: {error}"
            ) from error

    def __str__(self) -> str:
        """Such as `kernel gemm 2x`."""
        if self.kind == TOGETHER:
            return " and ".join(map(str, self.parts))
        if self.kind == RANK:
            return "all ranks alike" if self.rank is None else f"rank {self.rank} as the others"
        times = "takes no time" if math.isinf(self.speedup) else f"{self.speedup:g}x"
        name = self.shown or ("" if self.kind == LOADER else self.name)
        return " ".join(part for part in (self.kind, name, times) if part)


def faster_kernel(name: str, speedup: float = math.inf) -> Change:
    """Kernels whose names contain an expression; of collectives the transfer, not the waiting."""
    return Change(kind=KERNEL, name=name, speedup=speedup)


def faster_operator(name: str, speedup: float = math.inf) -> Change:
    """Operators: their time on the CPU, operators inside included, and the kernels they launch."""
    return Change(kind=OPERATOR, name=name, speedup=speedup)


def faster_launches(speedup: float = math.inf) -> Change:
    """Calls that put work on a GPU: their time on the CPU, not what they launch."""
    return Change(kind=LAUNCHES, speedup=speedup)


def faster_loader(speedup: float = math.inf) -> Change:
    """What a PyTorch DataLoader does for a batch: the workers' work, or the main process's."""
    return Change(kind=LOADER, name=LOADER_NAME, speedup=speedup)


def faster_collective(name: str, speedup: float = math.inf) -> Change:
    """The transfer of collectives whose kind (`all_reduce`) or name contains an expression."""
    return Change(kind=COLLECTIVE, name=name, speedup=speedup)


def together(*changes: Change) -> Change:
    """Several changes at once, such as half the batch: the loader and all operators."""
    if any(change.kind == RANK for change in changes):
        raise UsageError("trace what-if: a rank like the others goes with no other change")
    return Change(kind=TOGETHER, parts=changes)


def faster_network(speedup: float) -> Change:
    """The transfer of collectives: from when the last rank has arrived."""
    return Change(kind=NETWORK, speedup=speedup)


def rank_as_others(rank: int | None = None) -> Change:
    """One rank computes, on CPU and GPU, as fast as the middle of the others; None: all alike."""
    return Change(kind=RANK, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayWindow:
    """The part of a rank's trace that is replayed."""

    main_tid: int  # the thread that trains
    bounds_ns: Ints
    """When each profiler step begins and the last one ends; of the whole window where there are
    none."""
    spans: pl.DataFrame
    """Operators and runtime calls that begin in it: `name`, `tid`, `ts_ns`, `end_ns` (at most the
    window's), `correlation` of calls."""
    handed: tuple[dependencies.HandOvers, ...]  # waits of its threads for each other

    @property
    def within(self) -> tuple[int, int]:
        """When it begins and ends."""
        return int(self.bounds_ns[0]), int(self.bounds_ns[-1])


def replay_window(trace: Trace, steps: tuple[int, int] | None) -> ReplayWindow:
    """The window of some steps."""
    end = (pl.col("ts_ns") + pl.col("dur_ns")).alias("end_ns")
    columns = (pl.col("name").cast(pl.String), "tid", "ts_ns", end)
    calls = trace.runtime.select(*columns, "correlation")
    both = pl.concat([trace.ops.select(*columns), calls], how="diagonal")
    spans = both.drop_nulls("tid").sort("ts_ns", maintain_order=True)
    if not spans.height:
        raise MissingDataError(
            f"{trace.path}: no operators or runtime calls to replay",
            hint="profile with ProfilerActivity.CPU",
        )
    host = dependencies.HostEvents(trace)
    marks = step_marks(trace, steps)
    every = marks if marks.height else spans.rename({"ts_ns": "start_ns"})
    begin, until = every.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    tid = marks["tid"][0] if marks.height else host.busiest_thread()[1]
    inside = spans.filter(pl.col("ts_ns").is_between(begin, until)).with_columns(
        end_ns=pl.min_horizontal("end_ns", pl.lit(until))
    )
    main = next(thread for thread in host.threads if thread[1] == tid)
    return ReplayWindow(
        main_tid=tid,
        bounds_ns=np.append(marks["start_ns"].sort().to_numpy() if marks.height else begin, until),
        spans=inside,
        handed=tuple(found.within(begin, until) for found in dependencies.hand_overs(host, main)),
    )


def with_cpu_collectives(
    kernels: dependencies.DeviceEvents, window: tuple[int, int]
) -> dependencies.DeviceEvents:
    """Adds the collectives of the CPU, on a stream of their own, where no GPU communicates."""
    if kernels.talks.any() or (with_kind(kernels.trace.gpu)["kind"] == COMMUNICATION).any():
        return kernels
    found = cpu_collectives(kernels.trace).filter(pl.col("launch_ns").is_between(*window))
    if found.is_empty():
        return kernels
    starts, none = found["ts_ns"].to_numpy(), np.full(len(found), -1, dtype=np.int64)
    shown = found.with_columns(kind=pl.lit(COMMUNICATION), category=pl.lit(CATEGORY))
    own = {
        "starts": starts, "ends": starts + found["dur_ns"].to_numpy(), "line": none,
        "device": none, "call": none, "launched": found["launch_ns"].to_numpy(),
        "known": none < 0, "talks": none < 0,
    }  # fmt: skip
    arrays: dict[str, Any] = {n: np.append(getattr(kernels, n), more) for n, more in own.items()}
    text = pl.col("name", "kind", "category").cast(pl.String)
    frames = [frame.with_columns(text) for frame in (kernels.frame, shown)]
    frame = pl.concat(frames, how="diagonal_relaxed").select(kernels.frame.columns)
    return replace(kernels, frame=frame, **arrays)


def stream_waits(kernels: dependencies.DeviceEvents) -> dependencies.Pairs:
    """Pairs (earlier, later) of kernels of different streams, where one stream waits for another.

    Exact where the profiler recorded synchronisations (`enable_cuda_sync_events`). Else each call
    of cudaStreamWaitEvent is taken to hold up the next kernel launched on its thread, until the
    kernel ended that was launched last before the call on another stream: for a collective on a
    computing stream, for other kernels on that stream whose last one ended latest; never on one
    that ended after the kernel began, which would contradict the trace.
    """
    if kernels.trace.sync["wait_on_stream"].is_not_null().any():
        first, second = dependencies.recorded_waits(kernels)
        possible = kernels.ends[first] <= kernels.starts[second]
        return first[possible], second[possible]
    waiting = kernels.calls.find(dependencies.WAIT_CALL)
    _, following = dependencies.launches_around(kernels, waiting)
    waits, later = kernels.calls.starts[waiting[following >= 0]], following[following >= 0]
    best = np.full(len(waits), -1)
    ends, talks = np.append(kernels.ends, dependencies.NEVER), np.append(kernels.talks, False)
    for own in kernels.lines():
        found = kernels.last_before(kernels.launch_order(own[kernels.known[own]]), waits)
        usable = (found >= 0) & (kernels.line[later] != kernels.line[own[0]])
        usable &= ends[found] <= kernels.starts[later]
        usable &= ~(talks[later] & talks[found])
        usable &= ends[found] > ends[best]
        best = np.where(usable, found, best)
    return best[best >= 0], later[best >= 0]


def blocking_calls(
    kernels: dependencies.DeviceEvents, window: tuple[int, int]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls in a window that wait for the GPU, and what each of them waits for."""
    calls, parts = kernels.calls, [np.empty((0, 2), dtype=np.int64)]
    for why, call, event, assumed in dependencies.host_waits(kernels):
        meant = (calls.starts[call] >= window[0]) & (calls.starts[call] <= window[1])
        if why in (dependencies.DEVICE, dependencies.STREAM):
            # Of the events launched last to each stream before a call, which ended last in it.
            best, ends = np.full(len(call), -1), np.append(kernels.ends, dependencies.NEVER)
            for line in kernels.lines():
                own = kernels.launch_order(line[kernels.known[line]])
                times = kernels.launched[own]
                before = np.searchsorted(times, calls.starts[call], side="right")
                last = np.append(own, -1)[before - 1]
                usable = (ends[last] <= calls.ends[call]) & (ends[last] > ends[best])
                best = np.where(usable, last, best)
            known = (why == dependencies.STREAM) & ~assumed
            event = np.where(known, event, best)
        if why not in (dependencies.SHORT_COPY, dependencies.MEMORY_FREE):
            parts.append(np.stack([call, event], axis=1)[meant])
    pairs = np.concatenate(parts)
    pairs = pairs[np.unique(pairs[:, 0], return_index=True)[1]]
    call, event = pairs[:, 0], pairs[:, 1]
    ends = np.minimum(calls.ends[call], window[1])
    found = calls.frame[call].select(
        pl.col("name").cast(pl.String), "tid", "ts_ns", end_ns=pl.Series(ends),
        call=pl.Series(call),
    )  # fmt: skip
    held = (event >= 0) & (kernels.ends[event] <= ends) if len(kernels.ends) else event >= 0
    waited = {"call": call[held], "begin_ns": calls.starts[call[held]], "kernel": event[held]}
    return found, pl.DataFrame(waited)


WORKERS_NAME = r"^enumerate\(DataLoader\)#_MultiProcessing"
"""The mark around `__next__` of a loader with workers; it makes no batch itself."""
WORKERS_TID = -2
"""Stands for the workers among the threads of a replay; threads of the system count from 0."""
WAITED_NS = 300_000
"""A batch that lies ready is out of the queue sooner: polling and unpickling take 50 to 200 us."""
WAITED_RATIO = 0.05
"""And a wait is at least this share of a step, and all waits of the window: on a busy machine
polling itself takes milliseconds, and workers that are ahead would be taken for the limit."""
BUSY_BATCHES = 8
"""Between two waits that are further apart the workers may have had nothing to do: their queue
holds prefetch_factor batches of each, by default 2, and a trace does not say of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Batches that the main process took from workers, in order; arrays of one length."""

    asked_ns: Ints  # when it asked for each
    taken_ns: Ints  # when it went on with it: the first operator inside of `__next__`, or its end
    ready_ns: Ints
    """When the workers had made it; of one that lay ready, as their usual pace has it."""
    waited: Bools  # whether it was not ready when it was asked for

    @property
    def bounds(self) -> Ints:
        """When each batch was taken that had been waited for: in between the workers were busy."""
        return self.taken_ns[self.waited]

    @property
    def waited_ns(self) -> int:
        """For batches that were not ready."""
        return int((self.taken_ns - self.asked_ns)[self.waited].sum())


def worker_batches(
    trace: Trace, window: tuple[int, int], main_tid: int
) -> tuple[Batches | None, bool]:
    """The batches that a rank's main thread took; None where it never waits for workers."""
    # The outermost marks of `__next__`; until 2022 they were operators.
    end = (pl.col("ts_ns") + pl.col("dur_ns")).alias("end_ns")
    parts = [table.select(pl.col("name").cast(pl.String), "tid", "ts_ns", end)
             for table in (trace.host_ranges, trace.ops)]  # fmt: skip
    marks = (
        pl.concat(parts)
        .filter(
            (pl.col("tid") == main_tid)
            & pl.col("name").str.contains(WORKERS_NAME)
            & pl.col("ts_ns").is_between(*window)
            & (pl.col("end_ns") <= window[1])
        )
        .sort("ts_ns")
    )
    asked, ends = marks["ts_ns"].to_numpy(), marks["end_ns"].to_numpy()
    # When the first operator inside of each mark began: it makes tensors of what has come.
    plain = ~pl.col("name").cast(pl.String).str.contains(WORKERS_NAME)
    begins = trace.ops.filter((pl.col("tid") == main_tid) & plain)["ts_ns"].sort().to_numpy()
    at = np.searchsorted(begins, asked, side="left")
    found = np.append(begins, np.iinfo(np.int64).max)[at]
    taken = np.where(found < ends, found, ends)
    step = float(np.median(np.diff(asked))) if len(asked) > 1 else 0.0
    waited = taken - asked > max(WAITED_NS, WAITED_RATIO * step)
    lost_ns = int((taken - asked)[waited].sum())
    ready = _ready(taken, waited)
    if ready is None or lost_ns < WAITED_RATIO * (window[1] - window[0]):
        return None, not marks.is_empty()
    return Batches(asked_ns=asked, taken_ns=taken, ready_ns=ready, waited=waited), True


def _ready(taken: Ints, waited: Bools) -> Ints | None:
    """When each was made: of those waited for as seen, else by the workers' pace; or None."""
    known = np.flatnonzero(waited)
    apart, took = np.diff(known), np.diff(taken[known])
    busy = apart <= BUSY_BATCHES
    if not busy.any():
        return None
    pace = float(np.median(took[busy] / apart[busy]))
    at = np.searchsorted(known, np.arange(len(taken)), side="right") - 1  # the wait before each
    paces = np.append(np.where(busy, took / np.maximum(apart, 1), pace), pace)
    since = np.arange(len(taken)) - known[at]
    ready = taken[known[at]] + since * np.where(at >= 0, paces[at], pace)
    first = np.arange(len(taken)) < known[0]
    ready[first] = taken[known[0]] - pace * (known[0] - np.flatnonzero(first))
    return np.minimum(np.rint(ready).astype(np.int64), taken)


WORKERS, HOST = "workers", "host"  # labels of the work of a loader's workers and of the CPU's


def change_lengths(trace: Trace, change: Change, lengths: Ints, edges: pl.DataFrame) -> Ints:
    """Lengths of all edges with a change; those that concern several ranks change nothing here."""
    for each in change.parts:
        lengths = change_lengths(trace, each, lengths, edges)
    is_work, of_kernel = edges["label"].is_not_null(), edges["event"].is_not_null()
    by_workers = is_work & (edges["tid"] == WORKERS_TID).fill_null(value=False)
    if change.kind == KERNEL or (change.kind == LOADER and by_workers.any()):
        these = by_workers
        if change.kind == KERNEL:
            names = edges.filter(is_work & of_kernel)["label"].unique()
            found = [name for name in names if re.search(change.name, name)]
            these = is_work & of_kernel & edges["label"].is_in(found)
        return np.where(these.to_numpy(), _divide(lengths, change.speedup), lengths)
    if change.kind in (OPERATOR, LOADER):
        columns = (pl.col("name").cast(pl.String), "tid", "ts_ns", "dur_ns")
        spans = pl.concat([table.select(*columns) for table in (trace.ops, trace.host_ranges)])
        found = [text for text in spans["name"].unique() if re.search(change.name, text)]
        spans = spans.filter(pl.col("name").is_in(found))
    elif change.kind == LAUNCHES:
        # Calls that put something on a GPU; one that waits for it is not work.
        spans = trace.runtime.join(trace.gpu, on="correlation", how="semi")
    else:
        return lengths
    on_host = is_work & ~of_kernel & ~by_workers
    changed = lengths.copy()
    begin, end = (edges[name].fill_null(0).to_numpy() for name in ("begin_ns", "end_ns"))
    for (tid,), rows in spans.drop_nulls("tid").group_by("tid"):
        ran, here = union_of(rows), (edges["tid"] == tid).fill_null(value=False)
        own = (here & on_host).to_numpy()
        part = covered_lengths(ran, begin[own], end[own])
        changed[own] -= part - _divide(part, change.speedup)
        if change.kind == OPERATOR:  # and what they launch
            own = (here & is_work & ~on_host).to_numpy()
            launched = covered_lengths(ran, begin[own], begin[own] + 1) > 0
            changed[own] = np.where(launched, _divide(lengths[own], change.speedup), lengths[own])
    return changed


def _divide(lengths: Ints, speedup: float) -> Ints:
    return np.rint(lengths / speedup).astype(np.int64)


DONE, MARK, LAUNCH, BLOCK_BEGIN, BLOCK_END = "done", "mark", "launch", "block_begin", "block_end"
_TIES = {BLOCK_END: 0, DONE: 1, MARK: 2, LAUNCH: 3, BLOCK_BEGIN: 4}
"""Order of points of one thread at one time: a wait ends before what follows it."""
_KEY = ["tid", "role", "time_ns"]
_POINTS = ("tid", "role", "time_ns", "correlation", "call")
_Key = tuple[int, str, Ints]  # a thread, the role of its points, and their times


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
    lengths: Ints  # ns of each edge as it was and with each change, shape (edges, 1 + changes)
    bounds_ns: Ints
    """When the host took each batch that it had waited for, where the loader's workers limit the
    step; else when each step began and the last one ended."""
    waited_ns: int  # for batches; 0 where the loader's workers do not limit the step
    begins_ns: int  # start of the window
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
    within = window.within
    gpu = dependencies.device_events(trace)
    when = np.where(gpu.known, gpu.launched, gpu.starts)
    kernels = gpu.take(np.flatnonzero((when >= within[0]) & (when <= within[1])))
    blocking, waited = blocking_calls(kernels, within)
    kernels = with_cpu_collectives(kernels, within)
    # Waits for collectives of the CPU are blocking calls, too.
    number = pl.int_range(pl.len(), dtype=pl.Int64)
    numbered = kernels.frame.with_columns(kernel=number)
    own = numbered.filter(pl.col("category").cast(pl.String) == CATEGORY)
    rows = collective_waits(window.spans, own).with_columns(call=-2 - number)
    blocking = pl.concat([blocking, rows.drop("kernel")], how="diagonal_relaxed")
    known = rows.select("call", "kernel", begin_ns="ts_ns")
    waited = pl.concat([waited, known], how="diagonal_relaxed")
    batches, has_workers = worker_batches(trace, within, window.main_tid)
    points, on_host, apart_count = _host(window, kernels, blocking, waited, batches)
    # The points of the host's threads, then the starts of the kernels, then their ends.
    times = np.concatenate([points["time_ns"].to_numpy(), kernels.starts, kernels.ends])
    launched = np.where(kernels.known, kernels.launched, kernels.starts)
    starts = points.height + np.arange(len(launched))
    on_gpu = kernels.frame.select(
        "event", tid="launch_tid",
        label=pl.when(~pl.Series(kernels.talks)).then(pl.col("name").cast(pl.String)),
        source=pl.Series(starts), target=pl.Series(starts + len(starts)),
        length=pl.Series(kernels.ends - kernels.starts), begin_ns=pl.Series(launched),
        end_ns=pl.Series(launched),
    )  # fmt: skip
    waits = _waiting(kernels, points, waited, times)
    edges = pl.concat([on_gpu, on_host, *waits], how="diagonal_relaxed")
    lengths = edges["length"].to_numpy()
    columns = [lengths, *(change_lengths(trace, change, lengths, edges) for change in changes)]
    base = clock_base_ns(trace)
    by_host = points.select(pl.when(pl.col("tid") != WORKERS_TID).then("time_ns")).to_series()
    caused = by_host.extend(pl.Series(np.tile(launched, 2)))
    return RankGraph(
        points=pl.DataFrame({"time_ns": times, "caused_ns": caused}).select(pl.all() + base),
        edges=edges.select("source", "target", "label", pl.col("begin_ns") + base, "event"),
        lengths=np.stack(columns, axis=1),
        bounds_ns=base + (window.bounds_ns if batches is None else batches.bounds),
        waited_ns=0 if batches is None else batches.waited_ns,
        begins_ns=within[0] + base,
        step_count=len(window.bounds_ns) - 1,
        apart_count=apart_count,
        workers_ahead=has_workers and batches is None,
    )


def _host(
    window: ReplayWindow, kernels: dependencies.DeviceEvents, blocking: pl.DataFrame,
    waited: pl.DataFrame, batches: Batches | None,
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
        calls = -2 - len(kernels.starts) - np.arange(len(batches.asked_ns))
        waits = pl.DataFrame({
            "call": calls, "ts_ns": batches.asked_ns, "end_ns": batches.taken_ns,
            "idle": ~batches.waited,
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
        marks.append((WORKERS_TID, MARK, [window.within[0], *batches.ready_ns.tolist()]))
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
        everything.filter(pl.col("time_ns").is_between(*window.within))
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
    took = (pl.col("end_ns") - pl.col("ts_ns")).filter("idle").min().over("name").fill_null(0)
    own = points[source[waits]].select("call")
    costs = own.join(blocking.select("call", took=took), on="call", maintain_order="left")["took"]
    length[waits] = np.minimum(length[waits], costs.to_numpy())
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
    kernels: dependencies.DeviceEvents, points: pl.DataFrame, waited: pl.DataFrame, times: Ints
) -> Iterator[pl.DataFrame]:
    """Launches, streams in order, streams that wait, and calls, whose waits are the usual."""
    # Events that follow each other on a stream, also where the later one begins a bit too early:
    # rounding, or programmatic dependent launch, where it begins earlier as the other one does.
    # Events of one launch that overlap are branches of a CUDA graph: they do not wait.
    earlier, later = dependencies.stream_order(kernels)
    overlaps = kernels.ends[earlier] - kernels.starts[later]
    launch = kernels.frame["correlation"].fill_null(-1).to_numpy()
    is_graph = (launch[earlier] == launch[later]) & (launch[earlier] > 0)
    is_short = 2 * overlaps < kernels.ends[earlier] - kernels.starts[earlier]
    follows = (overlaps <= dependencies.ROUNDING_NS) | (is_short & ~is_graph)
    earlier, later = earlier[follows], later[follows]
    first, second = stream_waits(kernels)
    # From a launch to the start of a computing kernel that nothing else on the GPU held up.
    before = np.full(len(kernels.starts), dependencies.NEVER)
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
    put = placed.filter(role=LAUNCH).join(numbered, on="correlation")
    held = placed.filter(role=BLOCK_END).select("point", "call").join(waited, on="call")
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
