"""What each node depends on in Chakra's sense: callers, order of threads and streams, waits."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints

THREAD, LAUNCH, STREAM, GAP, SYNC = "thread", "launch", "stream", "gap", "sync"
"""Why there is an edge: the operator before on the thread; the operator that launched it; the GPU
event before on the stream; another thread after a gap; a blocking call waited for the GPU."""
EDGE_SCHEMA = {"before": pl.Int64, "after": pl.Int64, "why": pl.String}


def data_dependencies(nodes: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Edges from nodes that must end first to nodes that depend on them.

    Source: Chakra's converter, which makes the order of calls the data dependency, with
    inter-thread and sync dependencies of the linker. Here the order is that of the timeline's
    threads where nodes have times (the observer notes asynchronous work of gloo on the thread
    that asked for it), and GPU events also follow the one before on their stream.
    """
    rows = nodes.with_row_index("place").select(
        pl.col("place").cast(pl.Int64), "node", "parent", "tid", "host_tid", "ts_ns", "category",
        "stream", "device", "thread_dependency", "sync_dependencies",
    )  # fmt: skip
    host, gpu = rows.filter(pl.col("category").is_null()), rows.drop_nulls("category")
    linked = host.drop_nulls("ts_ns").sort("ts_ns", "node")
    bare = host.filter(pl.col("ts_ns").is_null()).sort("node")
    parts = [
        _chain(linked, ["host_tid"], THREAD),
        _chain(bare, ["tid"], THREAD),
        _chain(gpu.sort("ts_ns", "node"), ["device", "stream"], STREAM),
        gpu.select(before="parent", after="node", why=pl.lit(LAUNCH)),
        _handed_over(linked),
        linked.select(before="thread_dependency", after="node", why=pl.lit(GAP)),
        linked.explode("sync_dependencies").select(
            before="sync_dependencies", after="node", why=pl.lit(SYNC)
        ),
    ]
    edges = pl.concat(parts).drop_nulls().unique(["before", "after"], maintain_order=True)
    known = edges.filter(pl.col("before").is_in(nodes["node"].implode()))
    kept = _acyclic(nodes, known)
    return kept, len(known) - len(kept)


def _chain(rows: pl.DataFrame, keys: list[str], why: str) -> pl.DataFrame:
    """Each of a thread or stream after the one before it."""
    before = pl.col("node").shift(1).over(keys)
    return rows.select(before=before, after="node", why=pl.lit(why))


def _handed_over(linked: pl.DataFrame) -> pl.DataFrame:
    """Operators that run on another thread than the one that asked for them."""
    callers = linked.select(parent="node", caller_tid="host_tid", caller_ns="ts_ns")
    found = linked.join(callers, on="parent", how="inner")
    other = (pl.col("caller_tid") != pl.col("host_tid")) & (pl.col("caller_ns") <= pl.col("ts_ns"))
    return found.filter(other).select(before="parent", after="node", why=pl.lit(LAUNCH))


def _acyclic(nodes: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Edges without those that close circles; the callers' tree stays."""
    numbers = nodes["node"].to_numpy()
    called = nodes.drop_nulls("parent")
    tree = (np.searchsorted(numbers, called["parent"]), np.searchsorted(numbers, called["node"]))
    for attempt in range(3):
        before = np.searchsorted(numbers, edges["before"].to_numpy())
        after = np.searchsorted(numbers, edges["after"].to_numpy())
        stuck = in_circles(
            len(numbers), np.concatenate([tree[0], before]), np.concatenate([tree[1], after])
        )
        if not stuck.any():
            break
        inside = stuck[before] & stuck[after]
        backward = (before >= after) if attempt == 0 else np.ones(len(before), dtype=np.bool_)
        edges = edges.filter(pl.Series(~(inside & backward), dtype=pl.Boolean))
    return edges


def in_circles(count: int, before: Ints, after: Ints) -> npt.NDArray[np.bool_]:
    """Nodes in circles, or behind one: a topological order never reaches them."""
    order = np.argsort(before, kind="stable")
    targets = after[order].tolist()
    first = np.searchsorted(before[order], np.arange(count + 1)).tolist()
    waiting = np.bincount(after, minlength=count).tolist()
    ready = deque(at for at in range(count) if not waiting[at])
    while ready:
        at = ready.popleft()
        for target in targets[first[at] : first[at + 1]]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return np.array(waiting, dtype=np.int64) > 0
