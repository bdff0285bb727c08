"""Time per name and profiler step of one trace: the samples of a trace diff."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats, Ints
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import union
from haiprof.trace_analysis.call_stacks import uncovered_starts
from haiprof.trace_analysis.call_tree import nest
from haiprof.trace_analysis.kernel_names import FULL, name_normalizer
from haiprof.trace_analysis.launch_geometry import split_geometry, with_geometry
from haiprof.trace_analysis.temporal import Steps, step_window, with_launch
from haiprof.trace_format.kineto.rank_trace import STEP, Trace

KERNEL, OPERATOR, RUNTIME, ANNOTATION = "kernel", "operator", "runtime", "annotation"
EVERYTHING = (KERNEL, OPERATOR, RUNTIME, ANNOTATION)
STEP_ROW, UNLAUNCHED = "step", "unlaunched"
NOTHING = {KERNEL: "(GPU idle)", OPERATOR: "(no operator)"}
"""The name of the time in a step in which none of them ran."""

SAMPLE_SCHEMA = {
    "step": pl.Int64,
    "of": pl.String,
    "name": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "share_ns": pl.Float64,
}


class _StepWindow(NamedTuple):
    """A profiler step, or all of a trace without steps."""

    step: int | None
    start_ns: int
    end_ns: int


def step_samples(
    trace: Trace,
    *,
    of: tuple[str, ...] = (KERNEL, OPERATOR),
    names: str = FULL,
    geometry: bool = False,
    steps: Steps = None,
    by_step: bool = True,
) -> pl.DataFrame:
    """Count and time of each name in each profiler step.

    An operator belongs to the step in which it began, a kernel to that of its launch. A kernel
    whose launch is not in the trace (it came before, or its record is lost) is in no step:
    rows of `unlaunched` count them. Where the whole trace is one window, and in a trace
    without launches, such kernels count by their own start.
    """
    unknown = set(of) - set(EVERYTHING)
    if unknown:
        raise ValueError(f"no events {sorted(unknown)}: they are of {', '.join(EVERYTHING)}")
    windows = _windows(trace, steps, by_step=by_step)
    parts = [_step_rows(windows)]
    for kind in of:
        is_kernel = kind == KERNEL
        gpu = with_geometry(trace.gpu) if is_kernel and geometry else trace.gpu
        events = _events(trace, kind, gpu, by_launch=windows[0].step is not None)
        rename = name_normalizer(names, is_kernel=is_kernel)
        events = _compared_names(events, _keeping_geometry(rename) if geometry else rename)
        if kind == KERNEL:
            parts.append(_without_launch(events))
        parts.append(_per_window(events, windows, kind))
    typed = [pl.col(name).cast(dtype) for name, dtype in SAMPLE_SCHEMA.items()]
    return pl.concat([part.select(typed) for part in parts])


def _windows(trace: Trace, steps: Steps, *, by_step: bool) -> list[_StepWindow]:
    if steps is not None and not by_step:
        return [_StepWindow(None, *step_window(trace, steps))]
    marks = trace.steps.unique("step", keep="first", maintain_order=True)
    if steps is not None:
        step_window(trace, steps)  # raises for steps that are not recorded
        marks = marks.filter(pl.col("step").is_between(*steps, closed="left"))
    rows = [_StepWindow(*row) for row in marks.select("step", "start_ns", "end_ns").iter_rows()]
    return rows if rows and by_step else [_whole(trace)]


def _whole(trace: Trace) -> _StepWindow:
    ranges = [
        (table["ts_ns"].min(), (table["ts_ns"] + table["dur_ns"]).max())
        for table in (trace.gpu, trace.ops, trace.runtime)
        if not table.is_empty()
    ]
    if not ranges:
        raise MissingDataError(f"{trace.path}: neither operators nor GPU events in it")
    starts, ends = zip(*ranges, strict=True)
    return _StepWindow(None, min(starts), max(ends) + 1)


def _step_rows(windows: list[_StepWindow]) -> pl.DataFrame:
    rows = [(w.step, STEP_ROW, STEP_ROW, 1, w.end_ns - w.start_ns, None) for w in windows]
    return pl.DataFrame(rows, schema=SAMPLE_SCHEMA, orient="row")


def _keeping_geometry(rename: Callable[[str], str]) -> Callable[[str], str]:
    def rename_kernel(name: str) -> str:
        plain, geometry = split_geometry(name)
        return rename(plain) + geometry

    return rename_kernel


def _events(trace: Trace, kind: str, gpu: pl.DataFrame, *, by_launch: bool) -> pl.DataFrame:
    """`name`, `pid`, `tid`, `ts_ns`, `dur_ns`, and `when_ns`, which decides on the step."""
    columns = ["name", "pid", "tid", "ts_ns", "dur_ns"]
    if kind == KERNEL:
        known = with_launch(gpu, trace.runtime)
        no_launches = known["launch_ns"].null_count() == len(known)
        own = not by_launch or no_launches
        when = pl.coalesce("launch_ns", "ts_ns") if own else pl.col("launch_ns")
        return known.select(*columns, when.alias("when_ns"))
    table = {OPERATOR: trace.ops, RUNTIME: trace.runtime}.get(kind)
    if table is None:
        table = trace.annotations.filter(pl.col("category") != "gpu_user_annotation")
    names = table["name"].unique()
    marks = [name for name in names.cast(pl.String) if STEP.match(name)]
    events = table.filter(~pl.col("name").is_in(marks))
    return events.select(*columns, pl.col("ts_ns").alias("when_ns"))


def _compared_names(events: pl.DataFrame, rename: Callable[[str], str]) -> pl.DataFrame:
    """With the names that are compared, as codes of an Enum."""
    recorded = events["name"].unique()
    texts = recorded.cast(pl.String)
    kept = [rename(text) for text in texts]
    enum = pl.Enum(sorted(set(kept)))
    table = pl.DataFrame({"name": recorded, "kept": pl.Series(kept, dtype=enum)})
    return events.join(table, on="name", how="left", maintain_order="left").drop("name").rename(
        {"kept": "name"}
    )  # fmt: skip


def _without_launch(events: pl.DataFrame) -> pl.DataFrame:
    lost = events.filter(pl.col("when_ns").is_null())
    return lost.group_by(pl.lit(None, pl.Int64).alias("step")).agg(
        pl.lit(UNLAUNCHED).alias("of"), pl.lit(UNLAUNCHED).alias("name"),
        pl.len().alias("count"), pl.col("dur_ns").sum().alias("total_ns"),
        pl.lit(None, pl.Float64).alias("share_ns"),
    )  # fmt: skip


def _per_window(events: pl.DataFrame, windows: list[_StepWindow], kind: str) -> pl.DataFrame:
    """Count, time and share of each name in each window."""
    spans = events.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    parts = []
    shares = _Shares(spans, kind) if kind in NOTHING else None
    for window in windows:
        inside = pl.col("when_ns").is_between(window.start_ns, window.end_ns, closed="left")
        found = spans.filter(inside).group_by("name").agg(
            pl.len().cast(pl.Int64).alias("count"), pl.col("dur_ns").sum().alias("total_ns")
        ).with_columns(pl.col("name").cast(pl.String))  # fmt: skip
        if shares is None:
            found = found.with_columns(share_ns=pl.lit(None, pl.Float64))
        else:
            own = shares.of(window)
            found = found.join(own, on="name", how="full", coalesce=True).with_columns(
                pl.col("share_ns").fill_null(0),
                # events that only reach into this window have no count in it
                pl.when(pl.col("name") != NOTHING[kind]).then(
                    pl.col("count", "total_ns").fill_null(0)
                ),
            )
        parts.append(found.with_columns(step=pl.lit(window.step, pl.Int64), of=pl.lit(kind)))
    return pl.concat(parts)


class _Shares:
    """Divides the time of windows among the names that are active in it."""

    def __init__(self, spans: pl.DataFrame, kind: str) -> None:
        self._kind = kind
        self._spans = spans
        self._starts = spans["ts_ns"].to_numpy()
        self._ends = self._starts + spans["dur_ns"].to_numpy()
        if kind == KERNEL:
            self._parent = np.full(len(spans), -1, dtype=np.int64)
            active = (self._starts, self._ends)
        else:
            self._parent = nest(spans).parent
            active = _active_threads(spans)
        self._begins = uncovered_starts(self._starts, self._ends, self._parent)
        self._moments, self._passed = _divide_time(*active)

    def of(self, window: _StepWindow) -> pl.DataFrame:
        """`name` and `share_ns`; with the rest of the window under `NOTHING`."""
        share = self._part(self._starts, self._ends, window)
        inner = np.flatnonzero(self._parent >= 0)
        held = self._part(self._begins[inner], self._ends[inner], window)
        np.subtract.at(share, self._parent[inner], held)
        names = self._spans.select(pl.col("name"), share_ns=pl.Series(share, dtype=pl.Float64))
        found = names.group_by("name").agg(pl.col("share_ns").sum())
        found = found.filter(pl.col("share_ns") != 0).with_columns(pl.col("name").cast(pl.String))
        rest = window.end_ns - window.start_ns - float(found["share_ns"].sum())
        nothing = pl.DataFrame({"name": [NOTHING[self._kind]], "share_ns": [max(rest, 0.0)]})
        return pl.concat([found, nothing])

    def _part(self, starts: Ints, ends: Ints, window: _StepWindow) -> Floats:
        """How much of the divided time falls into each span within the window."""
        first = np.clip(starts, window.start_ns, window.end_ns)
        last = np.maximum(np.clip(ends, window.start_ns, window.end_ns), first)
        return self._at(last) - self._at(first)

    def _at(self, times: Ints) -> Floats:
        if not len(self._moments):
            return np.zeros(len(times))
        base = self._moments[0]  # floats hold ns only near 0
        found: Floats = np.interp(times - base, self._moments - base, self._passed)
        return found


def _active_threads(spans: pl.DataFrame) -> tuple[Ints, Ints]:
    """When each thread is in any operator."""
    starts, ends = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for _, rows in spans.group_by("pid", "tid"):
        begin = rows["ts_ns"].to_numpy()
        active = union(begin, begin + rows["dur_ns"].to_numpy())
        starts.append(active.starts)
        ends.append(active.ends)
    return np.concatenate(starts), np.concatenate(ends)


def _divide_time(starts: Ints, ends: Ints) -> tuple[Ints, Floats]:
    """Times, and the cumulative time until each if k concurrent spans get 1/k each."""
    moments, place = np.unique(np.concatenate([starts, ends]), return_inverse=True)
    change = np.repeat([1.0, -1.0], len(starts))
    running = np.cumsum(np.bincount(place, weights=change, minlength=len(moments)))[:-1]
    rate = np.divide(1.0, running, out=np.zeros(len(running)), where=running > 0)
    passed = np.append(0.0, np.cumsum(np.diff(moments) * rate))
    return moments, passed
