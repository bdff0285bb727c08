"""Python functions by call stack: time, own time, and the share without GPU work."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, covered_lengths, intersection, union
from haiprof.trace_analysis.call_stacks import (
    Stacks,
    is_outermost,
    levels,
    stack_texts,
    stacks,
    uncovered_starts,
)
from haiprof.trace_analysis.call_tree import nest
from haiprof.trace_analysis.own_frames import without_own_frames
from haiprof.trace_analysis.temporal import Steps, step_window, union_of
from haiprof.trace_format.kineto.rank_trace import Trace

_TIMES = ("total_ns", "self_ns", "non_overlapped_ns", "self_non_overlapped_ns")
_ADDRESS = " at 0x[0-9a-fA-F]+"  # of the object, another one in each call
FOLDED_VALUES = _TIMES[1::2]
"""Columns of which a flame graph can be drawn: own times, which add up along a stack."""


class _Calls(NamedTuple):
    """Python calls with their times, one row each."""

    frame: pl.DataFrame
    """`stack` (number), `begun` (0 or 1), and the times in ns."""
    stacks: Stacks
    names: pl.Series
    """Of each name's code."""
    threads: pl.DataFrame
    """`pid`, `tid` of each thread's code."""


def python_stacks(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Python calls by their call stack.

    Source: self and total time as in cProfile and in TensorBoard's operator view. HTA has no
    such question. Whose call a call is comes from `Python parent id`, or from the nesting of
    times where ids are missing or contradict the times.
    """
    calls = _calls(trace, steps)
    found = calls.frame.group_by("stack").agg(
        pl.col("begun").sum().alias("calls"), *(pl.col(name).sum() for name in _TIMES)
    )
    depth = np.repeat(np.arange(len(calls.stacks.level_starts) - 1),
                      np.diff(calls.stacks.level_starts))  # fmt: skip
    known = pl.DataFrame({
        "thread": calls.stacks.thread, "code": calls.stacks.name, "depth": depth,
    }).with_row_index("number").select(
        pl.col("number").cast(pl.Int64).alias("number"),
        *_threads(calls),
        stack_texts(calls.stacks, calls.names),
        calls.names.gather(pl.Series(calls.stacks.name, dtype=pl.UInt32)).alias("name"),
        pl.col("depth").cast(pl.Int64),
    )  # fmt: skip
    joined = known.join(found, left_on="number", right_on="stack").drop("number")
    return _add_ratios(joined, has_gpu=trace.gpu.height > 0)


def python_functions(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Python calls by function, whoever called them."""
    calls = _calls(trace, steps)
    per_stack = pl.DataFrame({
        "stack": np.arange(len(calls.stacks.name)), "thread": calls.stacks.thread,
        "code": calls.stacks.name, "outermost": is_outermost(calls.stacks),
    })  # fmt: skip
    first = pl.col("outermost")
    found = (
        calls.frame.join(per_stack, on="stack")
        .group_by("thread", "code")
        .agg(
            pl.col("begun").sum().alias("calls"),
            *(pl.col(name).filter(first).sum() for name in _TIMES[::2]),
            *(pl.col(name).sum() for name in _TIMES[1::2]),
        )
    )
    names = calls.names.gather(found["code"].cast(pl.UInt32)).alias("name")
    threads = calls._replace(stacks=calls.stacks._replace(thread=found["thread"].to_numpy()))
    named = found.select(*_threads(threads), names, "calls", *_TIMES)
    return _add_ratios(named, has_gpu=trace.gpu.height > 0)


def folded_stacks(stacks: pl.DataFrame, *, value: str = "self_ns") -> str:
    """Stacks as text for a flame graph, a line each: `root;...;leaf 123`.

    Source: https://github.com/brendangregg/FlameGraph, stackcollapse.
    """
    if value not in FOLDED_VALUES:
        raise ValueError(f"no flame graph of {value!r}: it is one of {', '.join(FOLDED_VALUES)}")
    if stacks[value].null_count():
        raise MissingDataError(
            "no GPU event was recorded: nobody knows what ran beside these functions",
            hint="profile with ProfilerActivity.CUDA",
        )
    rank = [pl.format("rank {}", "rank")] if "rank" in stacks.columns else []
    parts = [*rank, pl.format("thread {}", "tid"), pl.col("stack")]
    lines = stacks.filter(pl.col(value) > 0).select(
        pl.format("{} {}", pl.concat_str(parts, separator=";"), value)
    )
    return "".join(f"{line}\n" for line in lines.to_series())


def _calls(trace: Trace, steps: Steps) -> _Calls:
    python = without_own_frames(trace.python)
    if python.is_empty():
        raise MissingDataError(
            f"{trace.path}: no Python functions in it", hint="profile with with_stack=True"
        )
    spans = python.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    threads = spans.select("pid", "tid").unique(maintain_order=True)
    thread = spans.select(pl.struct("pid", "tid").rle_id()).to_series().cast(pl.Int64).to_numpy()
    starts = spans["ts_ns"].to_numpy()
    ends = starts + spans["dur_ns"].to_numpy()
    parent = _recorded_parents(spans, starts, ends, thread)
    by_level = None if parent is None else levels(parent)
    if parent is None or by_level is None:
        parent = nest(spans).parent
        by_level = levels(parent) or []
    code, names = _name_codes(spans["name"])
    found = stacks(by_level, parent, code, thread)
    frame = _times(starts, ends, parent, trace, steps)
    numbered = frame.with_columns(pl.Series("stack", found.of_call, dtype=pl.Int64))
    return _Calls(numbered, found, names, threads)


def _name_codes(names: pl.Series) -> tuple[Ints, pl.Series]:
    """A code for each name, and the name of each code; without addresses."""
    _, first, code = np.unique(
        names.to_physical().to_numpy(), return_index=True, return_inverse=True
    )
    plain = names.gather(pl.Series(first)).cast(pl.String).str.replace_all(_ADDRESS, "")
    distinct = plain.unique(maintain_order=True)
    of_plain = plain.replace_strict(distinct, np.arange(len(distinct)), return_dtype=pl.Int64)
    found: Ints = of_plain.to_numpy()[code]
    return found, distinct


def _recorded_parents(spans: pl.DataFrame, starts: Ints, ends: Ints, thread: Ints) -> Ints | None:
    """Row of each call's caller by `Python parent id`; None where the ids cannot be right."""
    ids = spans["python_id"]
    if ids.null_count() or ids.n_unique() < len(ids):
        return None
    rows = pl.DataFrame({"parent_id": ids, "row": np.arange(len(ids))})
    known = spans.select("parent_id").join(rows, on="parent_id", how="left", maintain_order="left")
    parent: Ints = known["row"].fill_null(-1).to_numpy().astype(np.int64)
    inner = np.flatnonzero(parent >= 0)
    above = parent[inner]
    fits = (thread[above] == thread[inner]) & (starts[above] <= starts[inner])
    return parent if (fits & (ends[inner] <= ends[above])).all() else None


def _times(starts: Ints, ends: Ints, parent: Ints, trace: Trace, steps: Steps) -> pl.DataFrame:
    """Of each call: total and own time, and the parts of them outside GPU work."""
    window = union(starts, ends)
    if steps is not None:
        first, last = step_window(trace, steps)
        window = Intervals(np.array([first]), np.array([last]))
    busy = intersection(union_of(trace.gpu), window)
    begun = (starts >= window.starts[0]) & (starts < window.ends[-1]) if steps is not None else None
    inner = np.flatnonzero(parent >= 0)
    begins = uncovered_starts(starts, ends, parent)[inner]
    columns: dict[str, Ints] = {
        "begun": np.ones(len(starts), dtype=np.int64) if begun is None else begun.astype(np.int64)
    }
    for total, own, active in (
        ("total_ns", "self_ns", None),
        ("non_overlapped_ns", "self_non_overlapped_ns", busy),
    ):
        columns[total] = _uncovered_ns(window, active, starts, ends)
        columns[own] = columns[total].copy()
        np.subtract.at(
            columns[own], parent[inner], _uncovered_ns(window, active, begins, ends[inner])
        )
    return pl.DataFrame(columns)


def _uncovered_ns(window: Intervals, busy: Intervals | None, starts: Ints, ends: Ints) -> Ints:
    """How much of each call lies in the window, and outside busy time where that is given."""
    inside = covered_lengths(window, starts, ends)
    return inside if busy is None else inside - covered_lengths(busy, starts, ends)


def _threads(calls: _Calls) -> list[pl.Series]:
    """`pid` and `tid` of each stack."""
    at = pl.Series(calls.stacks.thread, dtype=pl.UInt32)
    return [calls.threads["pid"].gather(at), calls.threads["tid"].gather(at)]


def _add_ratios(found: pl.DataFrame, *, has_gpu: bool) -> pl.DataFrame:
    """Adds the shares; without GPU events, what depends on them is null."""
    known = pl.lit(has_gpu)
    order = [name for name in ("stack", "name", "depth") if name in found.columns]
    seen = found.filter((pl.col("calls") > 0) | (pl.col("total_ns") > 0))
    return seen.select(
        "pid", "tid", *order,
        pl.col("calls"),
        "total_ns", "self_ns",
        *(pl.when(known).then(name).alias(name) for name in _TIMES[2:]),
        *(
            pl.when(known & (pl.col(whole) > 0))
            .then(pl.col(part) / pl.col(whole))
            .alias(part.replace("_ns", "_ratio"))
            for part, whole in zip(_TIMES[2:], _TIMES[:2], strict=True)
        ),
    ).sort("self_ns", "total_ns", "name", descending=[True, True, False])  # fmt: skip
