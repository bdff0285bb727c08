"""Bottleneck ratios, call sites, and evidence for rules: waits, slow copies, short kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, Ints, covered_lengths, difference, total, union
from haiprof.run_analysis.run_files import median
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest
from haiprof.trace_analysis.device_time import (
    COMPUTATION,
    Steps,
    gpu_events,
    step_window,
    union_of,
    with_kind,
)
from haiprof.trace_analysis.kernel_names import is_matrix_work, uses_tensor_cores
from haiprof.trace_analysis.launches import launch_statistics, with_call
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BLOCKING, FREE


class PatternWindow(NamedTuple):
    """The window of function patterns, in ns on the trace's clock."""

    start: int
    end: int


class Spans(NamedTuple):
    """Calls of one kind inside a window."""

    code: Ints
    """Of the function, from 0; shape (n,)."""
    starts: Ints
    """ns, not before the window."""
    ends: Ints
    """ns, not after the window."""


def pattern_window(trace: Trace, steps: Steps) -> PatternWindow:
    """The profiler steps that were asked for, or everything from the first to the last event."""
    if steps is not None:
        return PatternWindow(*step_window(trace, steps))
    tables = (trace.gpu, trace.runtime, trace.ops, trace.python, trace.annotations)
    ends = [(table["ts_ns"] + table["dur_ns"]).to_numpy().max() for table in tables if len(table)]
    if not ends:
        raise MissingDataError(f"{trace.path}: no event with a time in it")
    return PatternWindow(min(int(table["ts_ns"].to_numpy()[0]) for table in tables if len(table)),
                  int(max(ends)))  # fmt: skip


def inside(events: pl.DataFrame, code: Ints, window: PatternWindow) -> Spans:
    """Events cut to a window; those outside of it are left out."""
    starts = events["ts_ns"].to_numpy()
    ends = np.minimum(starts + events["dur_ns"].to_numpy(), window.end)
    starts = np.maximum(starts, window.start)
    real = ends > starts
    return Spans(code[real], starts[real], ends[real])


def busy(spans: Spans) -> Intervals:
    """When any of them ran."""
    return union(spans.starts, spans.ends)


def free_below(window: PatternWindow, higher: Intervals) -> Intervals:
    """The part of a window that is left for the kinds below."""
    whole = Intervals(np.array([window.start]), np.array([window.end]))
    return difference(whole, higher)


def join_spans(left: Intervals, right: Intervals) -> Intervals:
    """The time that either covers."""
    return union(np.append(left.starts, right.starts), np.append(left.ends, right.ends))


def function_times(spans: Spans, free: Intervals, count: int) -> tuple[Ints, Ints]:
    """How long each function ran, and how long with no kind above it.

    `covered_ns` and `bottleneck_ns`, shape (count,). Calls of one function at the same time
    count once; of two functions of one kind at the same time, both count.
    """
    length, own = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    if not len(spans.starts):
        return length, own
    base = int(spans.starts.min())
    stride = int(spans.ends.max()) - base + 1  # a lane of its own for each function
    lane = spans.code * stride
    merged = union(spans.starts - base + lane, spans.ends - base + lane)
    code = merged.starts // stride
    starts, ends = merged.starts - code * stride + base, merged.ends - code * stride + base
    np.add.at(length, code, ends - starts)
    np.add.at(own, code, covered_lengths(free, starts, ends))
    return length, own


def kind_ns(spans: Intervals, free: Intervals) -> int:
    """How long a whole kind ran with nothing above it."""
    return int(covered_lengths(free, spans.starts, spans.ends).sum()) if len(spans.starts) else 0


_MODULE = "nn.Module: "
_ATEN = "aten::"
_LINE = r"\.py\(\d+\): "
# Python files that are not the user's: installed packages, the standard library, built-ins.
_LIBRARY = (
    r"^(?:torch|torchvision|numpy|transformers|accelerate|lightning|pytorch_lightning|apex|"
    r"deepspeed|triton|contextlib|threading|multiprocessing|concurrent|importlib|typing|"
    r"functools|queue|_weakrefset|weakref|enum|abc|copy|collections|runpy|logging|"
    r"haiprof)[/\\.]|site-packages|dist-packages|[/\\]lib[/\\]python\d|^<"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSites:
    """The operators and Python functions of a trace, indexed to look up call sites."""

    operators: CallTree
    is_aten: npt.NDArray[np.bool_]
    python: CallTree
    is_module: npt.NDArray[np.bool_]
    is_line: npt.NDArray[np.bool_]

    def around(self, calls: pl.DataFrame) -> pl.DataFrame:
        """The call site of each call.

        One row per call, in the same order: `operator`, the outermost of the `aten::` ones
        directly around each other; `module`, the innermost nn.Module; `line`, the innermost
        Python function of the user's (`train.py(45): step`). Null where there is none or no
        stacks were recorded.
        """
        known = calls.select("pid", "tid", "ts_ns", "dur_ns").with_row_index("at").drop_nulls()
        at = known["at"].to_numpy()
        operator = self._outermost_aten(innermost(self.operators, known))
        inner = innermost(self.python, known)
        module = self.python.climb(inner, self.is_module)
        line = self.python.climb(inner, self.is_line)
        return pl.DataFrame({
            "operator": _names(self.operators, operator, at, len(calls)),
            "module": _names(self.python, module, at, len(calls)).str.strip_prefix(_MODULE),
            "line": _names(self.python, line, at, len(calls)),
        })  # fmt: skip

    def _outermost_aten(self, rows: Ints) -> Ints:
        rows = rows.copy()
        active = np.flatnonzero(rows >= 0)
        while len(active):
            above = self.operators.parent[rows[active]]
            higher = (above >= 0) & self.is_aten[above]
            active = active[higher]
            rows[active] = above[higher]
        return rows


def call_sites(trace: Trace) -> CallSites:
    """Operators and Python functions of one rank."""
    operators, python = nest(trace.ops), nest(trace.python)
    return CallSites(
        operators=operators,
        is_aten=_matching(operators, f"^{_ATEN}"),
        python=python,
        is_module=_matching(python, f"^{_MODULE}"),
        is_line=_matching(python, _LINE) & ~_matching(python, _LIBRARY),
    )


def _matching(tree: CallTree, pattern: str) -> npt.NDArray[np.bool_]:
    """Which spans have such a name; the pattern is tried once per name."""
    names = tree.spans["name"].unique()
    wanted = names.filter(names.cast(pl.String).str.contains(pattern))
    found: npt.NDArray[np.bool_] = tree.spans["name"].is_in(wanted.implode()).to_numpy()
    return found


def _names(tree: CallTree, rows: Ints, at: Ints, count: int) -> pl.Series:
    """Names of some rows at some of the places; null elsewhere."""
    found = np.full(count, -1, dtype=np.int64)
    found[at] = rows
    places = pl.Series(found)
    known = pl.select(pl.when(places >= 0).then(places)).to_series()
    return tree.spans["name"].gather(known).cast(pl.String)


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
    names = called["name"].unique().cast(pl.String)
    wanted = names.filter(names.str.contains(_PAGEABLE, literal=True)).to_list()
    copies = called.filter(pl.col("name").is_in(wanted))
    found = sites.around(_calls(copies)).with_columns(
        copies["bytes"], copies["dur_ns"].alias("time_ns")
    )
    return Evidence(
        gpu_idle_ratio=idle,
        kernel_count=len(compute),
        kernel_median_ns=median(compute["dur_ns"]),
        launch_count=None if launches is None else len(launches),
        short_count=None if launches is None else int(launches["is_short"].sum()),
        launch_median_ns=None if launches is None else median(launches["cpu_duration_ns"]),
        short=_short(compute, launches, sites),
        waits=_waits(trace, window, busy, sites),
        pageable=_by_call_site(found, (), "bytes"),
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
