"""Evidence for rules from one rank's trace: waits for the GPU, slow copies, short kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, covered_lengths, total
from haiprof.run_analysis.records import median
from haiprof.trace_analysis.classify import COMPUTATION, with_kind
from haiprof.trace_analysis.launches import launch_statistics, with_call
from haiprof.trace_analysis.patterns.call_sites import CallSites, call_sites
from haiprof.trace_analysis.patterns.priority import PatternWindow
from haiprof.trace_analysis.patterns.tensor_cores import is_matrix_work, uses_tensor_cores
from haiprof.trace_analysis.temporal import gpu_events, union_of
from haiprof.trace_format.blocking_calls import BLOCKING, FREE
from haiprof.trace_format.kineto.rank_trace import Trace

_LOADER = "enumerate(DataLoader)#"
_PAGEABLE = "Pageable -> Device"
_WHERE = ("operator", "module", "line")
DISPATCH_NS = 20_000
"""An operator takes some us in the dispatcher and as much again to be recorded: most of the time
of one that is shorter than this. Own choice."""
BETWEEN_NS = 100_000
"""A larger gap is something else: I/O, sleep, a garbage collection. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """Operators on the CPU."""

    count: int
    """Those that call no others."""
    median_ns: float | None
    """Of the same."""
    dispatch_ratio: float
    """Share of the window in which a thread is in an operator shorter than `DISPATCH_NS`, or
    between two that are no further apart than `BETWEEN_NS`: Python and the dispatcher at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Counts and times of one rank's window."""

    gpu_idle_ratio: float | None
    """Share of the window in which no GPU event ran; null without any."""
    kernel_count: int
    """Computing kernels."""
    kernel_median_ns: float | None
    launch_count: int | None
    """Launches of kernels; null where calls were not recorded."""
    short_count: int | None
    """Of them, those whose call took longer than what it launched (HTA's short kernels)."""
    launch_median_ns: float | None
    short: pl.DataFrame
    """Where short kernels are launched: `operator`, `module`, `line`, `count`, `time_ns`."""
    waits: pl.DataFrame
    """Synchronising calls: `call` and as `short`; `time_ns` in the call; `idle_ns`, in which
    no GPU event ran, from its beginning to the first GPU event after it or the next such call,
    without waits for the DataLoader."""
    pageable: pl.DataFrame
    """Copies from pageable memory: as `short`, and `bytes`."""
    matrix: pl.DataFrame
    """Matrix products and convolutions: `kernel`, `tensor_cores`, and as `short`."""
    compute_capability: tuple[int, int] | None
    """Of the first GPU, as the profiler saw it."""
    operators: Operators
    """What the CPU did in operators."""


def collect_evidence(trace: Trace, window: PatternWindow) -> Evidence:
    """Collects the evidence of one rank."""
    gpu = with_kind(_events_begun_in(gpu_events(trace, None), window))
    sites = call_sites(trace)
    called = with_call(gpu, trace.runtime)
    compute = called.filter(pl.col("kind") == COMPUTATION)
    launches = _launches(trace, window)
    busy = union_of(trace.gpu)
    whole = Intervals(np.array([window.start]), np.array([window.end]))
    idle = None
    if len(trace.gpu):
        idle = 1 - covered_lengths(busy, whole.starts, whole.ends).sum() / total(whole)
    return Evidence(
        gpu_idle_ratio=idle,
        kernel_count=len(compute),
        kernel_median_ns=median(compute["dur_ns"]),
        launch_count=None if launches is None else len(launches),
        short_count=None if launches is None else int(launches["is_short"].sum()),
        launch_median_ns=None if launches is None else median(launches["cpu_duration_ns"]),
        short=_short(compute, launches, sites),
        waits=_waits(trace, window, busy, sites),
        pageable=_pageable(called, sites),
        matrix=_matrix(compute, sites),
        compute_capability=_capability(trace),
        operators=_operators(trace, window),
    )


def _operators(trace: Trace, window: PatternWindow) -> Operators:
    thread = ("pid", "tid")
    ops = _events_begun_in(trace.ops, window).sort(*thread, "ts_ns", maintain_order=True)
    end = pl.col("ts_ns") + pl.col("dur_ns")
    timed = ops.select(
        "ts_ns",
        "dur_ns",
        before=end.cum_max().shift(1).over(thread),
        following=pl.col("ts_ns").shift(-1).over(thread),
    )
    gap = pl.col("ts_ns") - pl.col("before")
    between = timed.filter(gap.is_between(1, BETWEEN_NS)).select(ts_ns="before", dur_ns=gap)
    small = timed.filter(pl.col("dur_ns") < DISPATCH_NS).select("ts_ns", "dur_ns")
    own = timed.filter(pl.col("following").is_null() | (pl.col("following") >= end))
    busy = union_of(pl.concat([small, between]).sort("ts_ns"))
    whole = Intervals(np.array([window.start]), np.array([window.end]))
    inside = (
        float(covered_lengths(busy, whole.starts, whole.ends).sum()) if len(busy.starts) else 0.0
    )
    return Operators(
        count=len(own),
        median_ns=median(own["dur_ns"]),
        dispatch_ratio=inside / max(total(whole), 1),
    )


def _events_begun_in(events: pl.DataFrame, window: PatternWindow) -> pl.DataFrame:
    return events.filter(pl.col("ts_ns").is_between(window.start, window.end, closed="left"))


def _launches(trace: Trace, window: PatternWindow) -> pl.DataFrame | None:
    """Kernel launches of the window; None where no launch of an event was recorded."""
    if trace.gpu.is_empty():
        return None
    try:
        found = launch_statistics(trace, include_memory_events=False)
    except MissingDataError:
        return None
    return _events_begun_in(found, window)


def _calls(called: pl.DataFrame) -> pl.DataFrame:
    return called.select("pid", "tid", ts_ns="call_ts_ns", dur_ns="call_dur_ns")


def _by_call_site(events: pl.DataFrame, keys: tuple[str, ...], *sums: str) -> pl.DataFrame:
    """Events by place, the longest first; `time_ns` and the given columns as sums."""
    found = events.group_by(*keys, *_WHERE).agg(
        pl.len().cast(pl.Int64).alias("count"), pl.col("time_ns", *sums).sum()
    )
    return found.sort(-pl.col("time_ns"), *keys, *_WHERE, nulls_last=True)


def _short(compute: pl.DataFrame, launches: pl.DataFrame | None, sites: CallSites) -> pl.DataFrame:
    known = compute.clear()
    if launches is not None:
        known = compute.join(launches.filter("is_short"), on="correlation", how="semi")
    return _by_call_site(
        sites.around(_calls(known)).with_columns(known["dur_ns"].alias("time_ns")), ()
    )


def _waits(trace: Trace, window: PatternWindow, busy: Intervals, sites: CallSites) -> pl.DataFrame:
    """Synchronising calls by name and place."""
    names = trace.runtime["name"].unique().cast(pl.String)
    wanted = names.filter(names.str.contains(f"{BLOCKING}|{FREE}")).to_list()
    calls = _events_begun_in(trace.runtime.filter(pl.col("name").is_in(wanted)), window)
    found = sites.around(calls).with_columns(
        call=calls["name"].cast(pl.String),
        time_ns=calls["dur_ns"],
        idle_ns=pl.Series(_idle_around(trace, calls, busy), dtype=pl.Int64),
    )
    return _by_call_site(found, ("call",), "idle_ns").sort(
        -pl.col("idle_ns"), -pl.col("time_ns"), "call", *_WHERE, nulls_last=True
    )


def _idle_around(trace: Trace, calls: pl.DataFrame, busy: Intervals) -> Ints:
    """GPU idle time from each call's beginning to the next GPU event or the next such call."""
    starts = calls["ts_ns"].to_numpy()
    ends = starts + calls["dur_ns"].to_numpy()
    if not len(ends) or not len(busy.starts):
        return np.zeros(len(ends), dtype=np.int64)
    at = np.searchsorted(busy.ends, ends, side="right")  # the first that is not over yet
    following = np.append(busy.starts, 0)[at]  # nothing waits after the last GPU event
    until = np.minimum(following, np.append(starts[1:], np.iinfo(np.int64).max))
    until = np.maximum(until, ends)
    excused = union_of(pl.concat([_loader(trace), trace.gpu.select("ts_ns", "dur_ns")]))
    found: Ints = until - starts - covered_lengths(excused, starts, until)
    return found


def _loader(trace: Trace) -> pl.DataFrame:
    """Waits for a DataLoader's batch."""
    spans = [table.select("name", "ts_ns", "dur_ns") for table in (trace.annotations, trace.ops)]
    found = pl.concat(part for part in spans if len(part)) if any(map(len, spans)) else spans[0]
    names = found["name"].unique().cast(pl.String)
    wanted = names.filter(names.str.starts_with(_LOADER)).to_list()
    return found.filter(pl.col("name").is_in(wanted)).select("ts_ns", "dur_ns")


def _pageable(called: pl.DataFrame, sites: CallSites) -> pl.DataFrame:
    names = called["name"].unique().cast(pl.String)
    wanted = names.filter(names.str.contains(_PAGEABLE, literal=True)).to_list()
    copies = called.filter(pl.col("name").is_in(wanted))
    found = sites.around(_calls(copies)).with_columns(
        copies["bytes"], copies["dur_ns"].alias("time_ns")
    )
    return _by_call_site(found, (), "bytes")


def _matrix(compute: pl.DataFrame, sites: CallSites) -> pl.DataFrame:
    names = compute["name"].unique().cast(pl.String)
    wanted = [name for name in names if is_matrix_work(name)]
    kernels = compute.filter(pl.col("name").is_in(wanted))
    found = sites.around(_calls(kernels)).with_columns(
        kernel=kernels["name"].cast(pl.String), time_ns=kernels["dur_ns"]
    )
    flags = {name: uses_tensor_cores(name) for name in wanted}
    return _by_call_site(found, ("kernel",)).with_columns(
        tensor_cores=pl.col("kernel").replace_strict(flags, default=None, return_dtype=pl.Boolean)
    )


def _capability(trace: Trace) -> tuple[int, int] | None:
    devices = trace.metadata.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    if not isinstance(first, dict):
        return None
    major, minor = first.get("computeMajor"), first.get("computeMinor")
    is_cuda = "amd" not in str(first.get("name", "")).lower()
    return (major, minor) if is_cuda and type(major) is int and type(minor) is int else None
