"""CUDA graphs joined with their capture: the calls that became the nodes which a launch runs."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import polars as pl

from haiprof.trace_format.checks.launches import BEGIN_CAPTURE, END_CAPTURE
from haiprof.trace_format.kineto.rank_trace import Trace

GRAPH_LAUNCH = "GraphLaunch"
"""In the names of the calls of CUDA and HIP that launch a graph."""
_NODES = {
    "kernel": r"Launch(?:Cooperative)?Kernel",
    "gpu_memcpy": r"Memcpy.*Async",
    "gpu_memset": r"Memset.*Async",
}
"""Categories of GPU events, and calls that make a node of that kind while a stream is captured."""
_CALL = ("pid", "tid", "ts_ns", "dur_ns")

CAPTURED_SCHEMA = {"event": pl.Int64, **{f"captured_{name}": pl.Int64 for name in _CALL}}


def captured_calls(trace: Trace, gpu: pl.DataFrame) -> pl.DataFrame:
    """The call that made the node of each GPU event of a CUDA graph.

    A graph and a capture belong together where both have the same kinds of nodes (kernels, copies,
    sets) in the same order, and where as many captures have that order as graphs: the first is the
    first then. Nodes are numbered as they are made; the numbers must also be the order on each
    stream, else nothing is said of that graph.

    `event`, and `captured_pid`, `captured_tid`, `captured_ts_ns`, `captured_dur_ns` of the
    call; no row where the capture is not in the trace, or which one it was is not known.

    Source: CUDA's graphs by stream capture; CUPTI's `graphNodeId` ("graph node id").
    """
    nodes = _nodes(gpu)
    captures = _captures(trace) if nodes.height else []
    by_kinds: dict[tuple[str, ...], list[pl.DataFrame]] = defaultdict(list)
    for calls in captures:
        by_kinds[tuple(calls["kind"])].append(calls)
    graphs: dict[tuple[str, ...], list[pl.DataFrame]] = defaultdict(list)
    for _, graph in sorted(nodes.group_by("graph"), key=lambda pair: pair[0]):
        graphs[tuple(graph["kind"])].append(graph)
    found = [
        pl.concat([graph.select("graph_node"), calls.drop("kind")], how="horizontal")
        for kinds, alike in graphs.items()
        if len(by_kinds[kinds]) == len(alike)
        for graph, calls in zip(alike, by_kinds[kinds], strict=True)
    ]
    if not found:
        return pl.DataFrame(schema=CAPTURED_SCHEMA)
    launched = gpu.filter(_of_graph()).select("event", "graph_node")
    return launched.join(pl.concat(found), on="graph_node").select(*CAPTURED_SCHEMA)


def _of_graph() -> pl.Expr:
    return pl.col("call").cast(pl.String).str.contains(GRAPH_LAUNCH).fill_null(value=False)


def _nodes(gpu: pl.DataFrame) -> pl.DataFrame:
    """Nodes of each graph as they were made: `graph` (its first node), `graph_node`, `kind`."""
    launched = gpu.filter(_of_graph() & pl.col("graph_node").is_not_null()).with_columns(
        graph=pl.col("graph_node").min().over("correlation"),
        size=pl.len().over("correlation"),
        kind=pl.col("category").cast(pl.String),
    )
    last = launched.filter(pl.col("size") == pl.col("size").max().over("graph"))
    whole = last.filter(pl.col("correlation") == pl.col("correlation").max().over("graph"))
    later = pl.col("graph_node").diff().over("graph", "stream", order_by=["ts_ns", "event"])
    in_order = ((later > 0).fill_null(value=True).all()).over("graph")
    known = whole.filter(in_order & pl.col("graph_node").is_unique())
    return known.sort("graph_node").select("graph", "graph_node", "kind")


def _captures(trace: Trace) -> list[pl.DataFrame]:
    """Calls of each capture as they were made, by its begin: `kind` and `captured_...`.

    Captures at the same time on several threads cannot be told apart, and are left out.
    """
    name = pl.col("name").cast(pl.String)
    calls = trace.runtime.sort("ts_ns")
    marks = calls.filter(name.str.contains(f"{BEGIN_CAPTURE}|{END_CAPTURE}")).select(
        "ts_ns", begins=name.str.contains(BEGIN_CAPTURE)
    )
    rows = marks.rows()
    spans = [
        (begin, end) for (begin, opens), (end, closes) in pairwise(rows) if opens and not closes
    ]
    if [opens for _, opens in rows] != [True, False] * len(spans):
        return []
    kind = pl.coalesce(
        pl.when(name.str.contains(text)).then(pl.lit(k)) for k, text in _NODES.items()
    )
    made = (
        calls.filter(pl.col("correlation") > 0)
        .unique("correlation", keep="first", maintain_order=True)
        .join(trace.gpu, on="correlation", how="anti", maintain_order="left")
        .select(kind=kind, **{f"captured_{column}": pl.col(column) for column in _CALL})
        .drop_nulls("kind")
    )
    within = pl.col("captured_ts_ns")
    return [made.filter(within.is_between(*span)) for span in spans]
