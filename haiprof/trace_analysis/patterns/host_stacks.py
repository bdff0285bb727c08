"""Call stacks of the host: Python functions and operators nested in each other, own time each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import Intervals, covered_lengths
from haiprof.trace_analysis.call_stacks import Stacks, levels, stack_texts, stacks, uncovered_starts
from haiprof.trace_analysis.call_tree import CallTree, nest
from haiprof.trace_analysis.own_frames import without_own_frames
from haiprof.trace_analysis.patterns.priority import PatternWindow
from haiprof.trace_format.kineto.rank_trace import Trace

_ADDRESS = " at 0x[0-9a-fA-F]+"
_STEP = "ProfilerStep#"
_COLUMNS = ("name", "ts_ns", "dur_ns", "pid", "tid")

STACKS_SCHEMA = {
    "name": pl.String,
    "count": pl.Int64,
    "total_ns": pl.Int64,
    "median_ns": pl.Float64,
    "covered_ns": pl.Int64,
    "bottleneck_ns": pl.Int64,
}


class HostCalls(NamedTuple):
    """Nested Python functions and operators."""

    tree: CallTree
    code: Ints
    """Of each call's name without addresses."""
    names: pl.Series
    """By code."""


def host_calls(trace: Trace) -> HostCalls | None:
    """Calls of Python functions and operators, nested by their times; None where there are none.

    An operator that a Python function calls is part of its stack, as in PerfTracker's report. A
    thread without an operator or a call of the runtime only waits (progress bars, queues): it is
    left out where others work.
    """
    parts = [without_own_frames(trace.python).select(_COLUMNS), trace.ops.select(_COLUMNS)]
    spans = pl.concat(part for part in parts if len(part)) if any(map(len, parts)) else parts[0]
    marks = [name for name in spans["name"].unique().cast(pl.String) if name.startswith(_STEP)]
    spans = spans.filter(~pl.col("name").is_in(marks)) if marks else spans
    works = pl.concat([trace.ops.select("pid", "tid"), trace.runtime.select("pid", "tid")]).unique()
    working = spans.join(works, on=["pid", "tid"], how="semi", maintain_order="left")
    spans = spans if working.is_empty() else working
    if spans.is_empty():
        return None
    tree = nest(spans)
    _, first, code = np.unique(
        tree.spans["name"].to_physical().to_numpy(), return_index=True, return_inverse=True
    )
    plain = (
        tree.spans["name"].gather(pl.Series(first)).cast(pl.String).str.replace_all(_ADDRESS, "")
    )
    names = plain.unique(maintain_order=True)
    of_plain = plain.replace_strict(names, np.arange(len(names)), return_dtype=pl.Int64).to_numpy()
    return HostCalls(tree, of_plain[code], names)


def stack_times(
    calls: HostCalls, window: PatternWindow, free: Intervals, *, least_ns: int
) -> pl.DataFrame:
    """Own time of each call stack, of all threads together."""
    tree = calls.tree
    starts = np.clip(tree.starts, window.start, window.end)
    ends = np.clip(tree.starts + tree.spans["dur_ns"].to_numpy(), window.start, window.end)
    begins = uncovered_starts(starts, ends, tree.parent)
    inner = np.flatnonzero(tree.parent >= 0)
    own, lone = ends - starts, covered_lengths(free, starts, ends)
    np.subtract.at(own, tree.parent[inner], (ends - begins)[inner])
    np.subtract.at(lone, tree.parent[inner], covered_lengths(free, begins, ends)[inner])
    found = _stacks(calls)
    late = tree.starts + tree.spans["dur_ns"].to_numpy() > window.start
    rows = pl.DataFrame(
        {"stack": found.of_call, "dur": ends - starts, "own": own, "lone": lone}
    ).filter(pl.Series(late & (tree.starts < window.end)))
    summed = rows.group_by("stack").agg(
        count=pl.len().cast(pl.Int64),
        total_ns=pl.col("dur").sum(),
        durations="dur",
        covered_ns=pl.col("own").sum(),
        bottleneck_ns=pl.col("lone").sum(),
    )
    return _by_text(summed, found, calls.names, least_ns)


def _stacks(calls: HostCalls) -> Stacks:
    spans = calls.tree.spans
    thread = spans.select(pl.struct("pid", "tid").rle_id()).to_series().cast(pl.Int64).to_numpy()
    by_level = levels(calls.tree.parent) or []
    return stacks(by_level, calls.tree.parent, calls.code, np.ascontiguousarray(thread))


def _by_text(summed: pl.DataFrame, found: Stacks, names: pl.Series, least_ns: int) -> pl.DataFrame:
    """By text: the same stack on two threads is one."""
    kept = summed.filter(pl.col("covered_ns") > 0).sort("stack")
    texts = stack_texts(found, names.str.replace_all("|", "/", literal=True))
    named = kept.with_columns(
        texts.gather(kept["stack"].cast(pl.UInt32)).str.replace_all(";", "|").alias("name")
    )
    return (
        named.group_by("name")
        .agg(
            pl.col("count", "total_ns", "covered_ns", "bottleneck_ns").sum(),
            median_ns=pl.col("durations").explode().median(),
        )
        .filter(pl.col("covered_ns") >= least_ns)
        .select(pl.col(name).cast(kind) for name, kind in STACKS_SCHEMA.items())
    )
