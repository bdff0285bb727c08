"""What a node waited for: another thread after a gap, or the GPU at a blocking call."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_analysis.call_tree import CallTree
from haiprof.trace_analysis.dependencies.device_events import (
    RuntimeCalls,
    device_events,
    runtime_calls,
)
from haiprof.trace_analysis.dependencies.host_events import LONG_GAP_NS
from haiprof.trace_analysis.dependencies.host_waits import COPY, DEVICE, STREAM, host_waits
from haiprof.trace_format.blocking_calls import BLOCKING
from haiprof.trace_format.kineto.rank_trace import Trace

_LISTS = pl.List(pl.Int64)


def thread_dependencies(nodes: pl.DataFrame, tree: CallTree, row: Ints) -> pl.Series:
    """The node of another thread that the first node after a gap in its own thread waited for."""
    linked = np.flatnonzero(row >= 0)
    threads = tree.spans.select(pl.struct("pid", "tid").rle_id()).to_series()
    begun = pl.DataFrame({
        "place": linked,
        "node": nodes["node"].gather(linked),
        "thread": threads.gather(row[linked]).cast(pl.Int64),
        "start": tree.starts[row[linked]],
        "end": tree.ends[row[linked]],
    }).sort("start", "place")  # fmt: skip
    gap = pl.col("start") - pl.col("end").shift(1).over("thread")
    first = begun.filter(gap.is_null() | (gap > LONG_GAP_NS))
    found = np.full(len(nodes), None, dtype=object)
    for key, group in first.group_by("thread"):
        others = begun.filter(pl.col("thread") != key[0])
        at = np.searchsorted(others["start"].to_numpy(), group["start"].to_numpy(), "left") - 1
        for place, before in zip(group["place"].to_list(), at.tolist(), strict=True):
            found[place] = others["node"][before] if before >= 0 else None
    return pl.Series("thread_dependency", found.tolist(), dtype=pl.Int64)


def sync_dependencies(
    trace: Trace, nodes: pl.DataFrame, numbers: pl.DataFrame, tree: CallTree, row: Ints
) -> pl.Series:
    """GPU nodes that a node's thread waited for in a blocking call right before it.

    Source: as Chakra's sync_dep. It takes them from HTA's critical path, which fails with
    today's pandas (chakra#217).
    """
    found: list[list[int]] = [[] for _ in range(len(nodes))]
    calls = runtime_calls(trace)
    if not len(numbers) or not len(calls.find(BLOCKING)):
        return pl.Series("sync_dependencies", found, dtype=_LISTS)
    held = _waits(trace, calls).join(numbers, on="event").sort("after")
    begun = _begins(tree, row)
    after = held.join_asof(
        begun, left_on="after", right_on="start", by=["pid", "tid"], strategy="forward",
        check_sortedness=False,
    )  # fmt: skip
    for place, node in after.drop_nulls("place").select("place", "node").unique().iter_rows():
        found[place].append(node)
    return pl.Series("sync_dependencies", [sorted(each) for each in found], dtype=_LISTS)


def _waits(trace: Trace, calls: RuntimeCalls) -> pl.DataFrame:
    """`pid`, `tid`, `after` (the end) of calls that waited, and the GPU `event`."""
    gpu = device_events(trace, calls)
    parts = [np.empty((0, 2), dtype=np.int64)]
    for why, call, event, _ in host_waits(trace, gpu, calls):
        if why in (COPY, DEVICE, STREAM):
            waited = (event >= 0) & (gpu.ends[event] > calls.starts[call])
            parts.append(np.stack([call, event], axis=1)[waited])
    pairs: Ints = np.concatenate(parts)
    ended = calls.frame.select("pid", "tid", after=pl.col("ts_ns") + pl.col("dur_ns"))
    events = gpu.frame["event"].gather(pairs[:, 1])
    return ended[pairs[:, 0]].with_columns(event=events)


def _begins(tree: CallTree, row: Ints) -> pl.DataFrame:
    """`pid`, `tid`, `start` and `place` of linked nodes, by start."""
    linked = np.flatnonzero(row >= 0)
    spans = tree.spans.select("pid", "tid")[row[linked]]
    return spans.with_columns(
        start=pl.Series(tree.starts[row[linked]]), place=pl.Series(linked)
    ).sort("start", "place")
