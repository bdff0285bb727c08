"""The call tree of each thread: parent, depth and own time of spans, from their nesting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.tables import OPS, PYTHON

_TABLES = {OPS: "operators", PYTHON: "Python functions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTree:
    """Spans of threads with their nesting; a row number refers to `spans`."""

    spans: pl.DataFrame
    """By thread (`pid`, `tid`), then start; a parent before its children."""
    starts: Ints
    """ns."""
    ends: Ints
    """ns; at least 1 ns after the start, so that spans without duration nest too."""
    parent: Ints
    """Row of the innermost span around; -1 at the top."""
    depth: Ints
    """Number of enclosing spans."""

    def climb(self, rows: Ints, wanted: npt.NDArray[np.bool_]) -> Ints:
        """The innermost wanted span at or around each row; -1 where there is none."""
        rows = rows.copy()
        active = np.flatnonzero(rows >= 0)
        while len(active):
            active = active[~wanted[rows[active]]]
            rows[active] = self.parent[rows[active]]
            active = active[rows[active] >= 0]
        return rows


def nest(spans: pl.DataFrame) -> CallTree:
    """Resolves the nesting of spans; O(n log n) without a loop over them."""
    spans = spans.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    starts = spans["ts_ns"].to_numpy()
    ends = np.maximum(starts + spans["dur_ns"].to_numpy(), starts + 1)
    thread = spans.select(pl.struct("pid", "tid").rle_id()).to_series().to_numpy()
    parent = _enclosing(ends, thread.astype(np.int64))
    return CallTree(spans=spans, starts=starts, ends=ends, parent=parent, depth=_depth(parent))


def _enclosing(ends: Ints, thread: Ints) -> Ints:
    """Row of the last earlier span of the thread that ends no earlier; rows are by start.

    A candidate that ends too early is replaced by its own candidate: everything in between ends
    earlier still. All rows advance at once, as in pointer jumping, so the chains shorten.
    """
    found = np.arange(-1, len(ends) - 1, dtype=np.int64)
    found[:1] = -1
    found[1:][thread[1:] != thread[:-1]] = -1
    active = np.flatnonzero(found >= 0)
    while len(active):
        candidate = found[active]
        short = ends[candidate] < ends[active]
        active, candidate = active[short], candidate[short]
        found[active] = found[candidate]
        active = active[found[active] >= 0]
    return found


def _depth(parent: Ints) -> Ints:
    """How many spans enclose each one; the stride doubles with each pass."""
    depth = (parent >= 0).astype(np.int64)
    above = parent.copy()
    active = np.flatnonzero(above >= 0)
    while len(active):
        depth_above, next_above = depth[above[active]], above[above[active]]
        depth[active] += depth_above
        above[active] = next_above
        active = active[next_above >= 0]
    return depth


def roots(parent: Ints) -> Ints:
    """Row of the outermost span around each row; its own at the top."""
    top = np.where(parent < 0, np.arange(len(parent)), parent)
    while True:
        higher = top[top]
        if (higher == top).all():
            return top
        top = higher


def own_ns(tree: CallTree) -> Ints:
    """Duration of each span without what the spans directly inside it cover, in ns."""
    rows = pl.DataFrame(
        {"parent": tree.parent, "start": tree.starts, "dur": tree.spans["dur_ns"]}
    ).with_columns(end=pl.col("start") + pl.col("dur"))
    inner = rows.filter(pl.col("parent") >= 0)
    reached = pl.col("end").cum_max().shift(1).over("parent")
    begin = pl.max_horizontal("start", reached)  # overlapping children are not counted twice
    covered = inner.select("parent", covered=(pl.col("end") - begin).clip(0))
    own: Ints = rows["dur"].to_numpy().copy()
    np.subtract.at(own, covered["parent"].to_numpy(), covered["covered"].to_numpy())
    return own


def innermost(tree: CallTree, calls: pl.DataFrame) -> Ints:
    """The innermost span around each call, on its thread."""
    starts = calls["ts_ns"].to_numpy()
    ends = np.maximum(starts + calls["dur_ns"].to_numpy(), starts + 1)
    found = _last_begun(tree, calls, starts)
    active = np.flatnonzero(found >= 0)
    while len(active):
        active = active[tree.ends[found[active]] < ends[active]]
        found[active] = tree.parent[found[active]]
        active = active[found[active] >= 0]
    return found


def _last_begun(tree: CallTree, calls: pl.DataFrame, starts: Ints) -> Ints:
    """Row of the last span that began at or before each call on its thread; -1 without one."""
    found = np.full(len(starts), -1, dtype=np.int64)
    threads = tree.spans.with_row_index("row").group_by("pid", "tid", maintain_order=True)
    first = {key: (int(rows["row"][0]), len(rows)) for key, rows in threads}
    for key, rows in calls.select("pid", "tid").with_row_index("row").group_by("pid", "tid"):
        if key not in first:
            continue
        at, count = first[key]
        place = rows["row"].to_numpy()
        begun = np.searchsorted(tree.starts[at : at + count], starts[place], side="right")
        found[place] = np.where(begun > 0, at + begun - 1, -1)
    return found


def call_tree(trace: Trace, *, table: str = OPS) -> pl.DataFrame:
    """Each operator or Python function with its caller and its own time.

    Source: nesting as in HTA's CallStackGraph, which HTA builds twice and event by event
    (HTA issue 141).
    """
    if table not in _TABLES:
        raise ValueError(f"no call tree of {table!r}: it is one of {', '.join(_TABLES)}")
    spans = trace.ops if table == OPS else trace.python
    tree = nest(spans)
    events = tree.spans["event"]
    parent = pl.Series(tree.parent, dtype=pl.Int64)
    parent = parent.set(parent < 0, None)
    return tree.spans.select(
        "event",
        pl.col("name").cast(pl.String),
        "pid",
        "tid",
        "ts_ns",
        "dur_ns",
        pl.Series("self_ns", own_ns(tree), dtype=pl.Int64),
        events.gather(parent).alias("parent_event"),
        pl.Series("depth", tree.depth, dtype=pl.Int64),
    )
