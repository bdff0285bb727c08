"""The parts of a replay: changes, the window, kernels, batches, and what a change shortens."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, UsageError
from haiprof.base.intervals import Bools, Ints, covered_lengths
from haiprof.trace_analysis.collectives import CATEGORY, cpu_collectives
from haiprof.trace_analysis.dependencies import (
    DEVICE,
    MEMORY_FREE,
    NEVER,
    ROUNDING_NS,
    SHORT_COPY,
    STREAM,
    WAIT_CALL,
    DeviceEvents,
    HandOvers,
    HostEvents,
    Pairs,
    device_events,
    hand_overs,
    host_waits,
    launches_around,
    recorded_waits,
    stream_order,
)
from haiprof.trace_analysis.device_time import COMMUNICATION, union_of, with_kind
from haiprof.trace_format.kineto.rank_trace import Trace

KERNEL, OPERATOR, LOADER, NETWORK, RANK = "kernel", "operator", "loader", "network", "rank"
LAUNCHES, COLLECTIVE, TOGETHER = "launches", "collective", "together"
LOADER_NAME = r"^enumerate\(DataLoader\)"
"""The annotation that PyTorch puts around a loader's `next`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing made faster; made by the functions below."""

    kind: str
    """`kernel`, `operator`, `launches`, `loader`, `network`, `collective` or `rank`."""
    name: str = ""
    """Regular expression that names of kernels, operators or collectives must contain."""
    speedup: float = math.inf
    """How many times as fast; infinite: it takes no time."""
    rank: int | None = None
    """Which rank becomes as fast as the others; None with kind `rank` evens out all of them."""
    shown: str = ""
    """Shown in place of the expression."""
    parts: tuple[Change, ...] = ()
    """Of kind `together`: all of them at once."""

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

    begin_ns: int
    end_ns: int
    main_tid: int
    """The thread that trains."""
    bounds_ns: Ints
    """When each profiler step begins and the last one ends; of the whole window where there are
    none."""
    spans: pl.DataFrame
    """Operators and runtime calls that begin in it: `name`, `tid`, `ts_ns`, `end_ns` (at most the
    window's), `correlation` of calls."""
    handed: tuple[HandOvers, ...]
    """Waits of its threads for each other."""

    @property
    def step_count(self) -> int:
        """Profiler steps in it; 1 where there are none."""
        return len(self.bounds_ns) - 1


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
    host = HostEvents(trace)
    marks = trace.steps
    if steps is not None:
        marks = marks.filter(pl.col("step").is_between(*steps, closed="left"))
        if not marks.height:
            raise MissingDataError(f"{trace.path}: no profiler step from {steps[0]} to {steps[1]}")
    every = marks if marks.height else spans.rename({"ts_ns": "start_ns"})
    begin, until = every.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    tid = marks["tid"][0] if marks.height else host.busiest_thread()[1]
    inside = spans.filter(pl.col("ts_ns").is_between(begin, until)).with_columns(
        end_ns=pl.min_horizontal("end_ns", pl.lit(until))
    )
    main = next(thread for thread in host.threads if thread[1] == tid)
    return ReplayWindow(
        begin_ns=begin,
        end_ns=until,
        main_tid=tid,
        bounds_ns=np.append(marks["start_ns"].sort().to_numpy() if marks.height else begin, until),
        spans=inside,
        handed=tuple(found.within(begin, until) for found in hand_overs(host, main)),
    )


def kernels_of(trace: Trace, window: tuple[int, int]) -> DeviceEvents:
    """The GPU events that were launched in a window, or began in it without a launch on record."""
    gpu = device_events(trace)
    when = np.where(gpu.known, gpu.launched, gpu.starts)
    return gpu.take(np.flatnonzero((when >= window[0]) & (when <= window[1])))


def with_cpu_collectives(kernels: DeviceEvents, window: tuple[int, int]) -> DeviceEvents:
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


def ordered_pairs(kernels: DeviceEvents) -> Pairs:
    """Events that follow each other on a stream, also where the later one begins a bit too early.

    That is rounding, or programmatic dependent launch, which lets a kernel begin shortly before the
    one before it ends: it begins earlier as that one does. Events of one launch that overlap are
    branches of a CUDA graph, and do not wait for each other.
    """
    first, second = stream_order(kernels)
    overlap = kernels.ends[first] - kernels.starts[second]
    launch = kernels.frame["correlation"].fill_null(-1).to_numpy()
    same = (launch[first] == launch[second]) & (launch[first] > 0)
    short = 2 * overlap < kernels.ends[first] - kernels.starts[first]
    follows = (overlap <= ROUNDING_NS) | (short & ~same)
    return first[follows], second[follows]


def stream_waits(kernels: DeviceEvents) -> Pairs:
    """Pairs (earlier, later) of kernels of different streams, where one stream waits for another.

    Exact where the profiler recorded synchronisations (`enable_cuda_sync_events`). Else each call
    of cudaStreamWaitEvent is taken to hold up the next kernel launched on its thread, until the
    kernel ended that was launched last before the call on another stream: for a collective on a
    computing stream, for other kernels on that stream whose last one ended latest; never on one
    that ended after the kernel began, which would contradict the trace.
    """
    if kernels.trace.sync["wait_on_stream"].is_not_null().any():
        first, second = recorded_waits(kernels)
        possible = kernels.ends[first] <= kernels.starts[second]
        return first[possible], second[possible]
    waiting = kernels.calls.find(WAIT_CALL)
    _, following = launches_around(kernels, waiting)
    waits, later = kernels.calls.starts[waiting[following >= 0]], following[following >= 0]
    best = np.full(len(waits), -1)
    ends, talks = np.append(kernels.ends, NEVER), np.append(kernels.talks, False)
    for own in kernels.lines():
        found = kernels.last_before(kernels.launch_order(own[kernels.known[own]]), waits)
        usable = (found >= 0) & (kernels.line[later] != kernels.line[own[0]])
        usable &= ends[found] <= kernels.starts[later]
        usable &= ~(talks[later] & talks[found])
        usable &= ends[found] > ends[best]
        best = np.where(usable, found, best)
    return best[best >= 0], later[best >= 0]


def blocking_calls(
    kernels: DeviceEvents, window: tuple[int, int]
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls in a window that wait for the GPU, and what each of them waits for."""
    calls, parts = kernels.calls, [np.empty((0, 2), dtype=np.int64)]
    for why, call, event, assumed in host_waits(kernels):
        meant = (calls.starts[call] >= window[0]) & (calls.starts[call] <= window[1])
        if why in (DEVICE, STREAM):
            known = (why == STREAM) & ~assumed
            event = np.where(known, event, _last_done(kernels, call))
        if why not in (SHORT_COPY, MEMORY_FREE):
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


def _last_done(kernels: DeviceEvents, call: Ints) -> Ints:
    """Of the events launched last to each stream before a call, the one that ended last in it."""
    calls, best = kernels.calls, np.full(len(call), -1)
    ends = np.append(kernels.ends, NEVER)
    for line in kernels.lines():
        own = kernels.launch_order(line[kernels.known[line]])
        before = np.searchsorted(kernels.launched[own], calls.starts[call], side="right")
        found = np.append(own, -1)[before - 1]
        usable = (ends[found] <= calls.ends[call]) & (ends[found] > ends[best])
        best = np.where(usable, found, best)
    return best


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

    asked_ns: Ints
    """When it asked for each."""
    taken_ns: Ints
    """When it went on with it: the first operator inside of `__next__`, or its end."""
    ready_ns: Ints
    """When the workers had made it; of one that lay ready, as their usual pace has it."""
    waited: Bools
    """Whether it was not ready when it was asked for."""

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


WORKERS, HOST = "workers", "host"
"""Labels of the work of a loader's workers and of the CPU's."""


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
