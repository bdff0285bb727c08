"""An execution graph small enough to look at: one step, deep operators folded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Ints
from haiprof.trace_analysis.call_tree import climb, depths
from haiprof.trace_analysis.chakra import ChakraGraph
from haiprof.trace_format.chakra import COMMUNICATION, COMP, NODE_TYPES

_ROOT = "[pytorch|profiler|"
_STEP = "ProfilerStep#"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDrawing:
    """What a picture shows."""

    nodes: pl.DataFrame
    """`node`, `name`, `type` (as Chakra names it), `gpu`, `folded_count` (nodes that stand behind
    it, itself not counted), `self_ns` of all of them (null where none is linked), `bytes`
    and `collective_kind` of communication."""
    edges: pl.DataFrame
    """`before`, `after`, `why`: `call`, or what `chakra` says of data dependencies."""
    notes: tuple[str, ...]


def draw_graph(
    graph: ChakraGraph, *, max_nodes: int, step: int | None = None, depth: int | None = None
) -> GraphDrawing:
    """Selects the part of a graph that fits a picture."""
    nodes, left_out = _of_step(graph.nodes, step), 0
    nodes = nodes.filter(~pl.col("name").str.starts_with(_ROOT)).sort("node")
    place = {number: at for at, number in enumerate(nodes["node"].to_list())}
    parent = np.array([place.get(number, -1) for number in nodes["parent"].to_list()], np.int64)
    apart = nodes.select(
        pl.col("category").is_not_null() & pl.col("type").is_in(COMMUNICATION)
    ).to_series().to_numpy()  # fmt: skip
    deep = depths(parent)
    assert deep is not None, "callers are resolved where an execution trace is read"
    deepest = int(deep.max(initial=0)) + 1
    fewer = np.cumsum(np.bincount(deep[~apart], minlength=deepest)) + int(apart.sum())
    levels = min(depth or max(1, int(np.sum(fewer <= max_nodes))), deepest)
    # Each node is drawn as itself, or as its innermost caller that is shown.
    is_shown = (deep < levels) | apart
    shown = climb(np.arange(len(parent)), parent, lambda _, row: is_shown[row])
    representative = nodes["node"].to_numpy()[shown] if len(nodes) else shown
    grouped = nodes.with_columns(of=pl.Series(representative)).group_by("of").agg(
        folded_count=pl.len().cast(pl.Int64) - 1,
        self_ns=pl.when(pl.col("self_ns").is_not_null().any()).then(pl.col("self_ns").sum()),
        has_gpu=(pl.col("category").is_not_null() & (pl.col("type") == COMP)).any(),
    )  # fmt: skip
    own = nodes.select(
        "node", "name", "type", "category", "ts_ns", "collective_kind", bytes="comm_bytes"
    )
    found = own.join(grouped, left_on="node", right_on="of", how="inner").sort("node")
    kind = pl.col("type").replace_strict(NODE_TYPES, return_dtype=pl.String)
    of_gpu = (pl.col("category").is_not_null() | pl.col("has_gpu")).alias("gpu")
    rest = ("folded_count", "self_ns", "bytes", "collective_kind", "ts_ns")
    table = found.select("node", "name", kind, of_gpu, *rest)
    if len(table) > max_nodes:
        left_out = len(table) - max_nodes
        table = table.sort(pl.col("ts_ns").fill_null(0), "node").head(max_nodes)
    edges = _edges(graph, nodes, representative, table["node"])
    folded = f"{levels} of {deepest} levels of operators: deeper ones are folded"
    cut = f"{left_out} later nodes are left out: --max-nodes, --depth or --steps shows others"
    reasons = ((folded, levels < deepest), (cut, left_out > 0))
    return GraphDrawing(
        nodes=table, edges=edges, notes=tuple(note for note, is_so in reasons if is_so)
    )


def _of_step(nodes: pl.DataFrame, step: int | None) -> pl.DataFrame:
    if step is None:
        return nodes
    marks = nodes.filter(pl.col("name").str.starts_with(_STEP)).drop_nulls("ts_ns")
    mark = marks.filter(pl.col("name") == f"{_STEP}{step}")
    if mark.is_empty():
        known = ", ".join(marks["name"].str.strip_prefix(_STEP).to_list()) or "none"
        raise MissingDataError(f"no profiler step {step} among the linked nodes; there is: {known}")
    start, end = mark["ts_ns"][0], mark["ts_ns"][0] + mark["dur_ns"][0]
    host = pl.col("category").is_null() & pl.col("ts_ns").is_between(start, end, closed="left")
    inside = nodes.filter(host)["node"]
    of_gpu = pl.col("category").is_not_null() & pl.col("parent").is_in(inside.implode())
    return nodes.filter(host | of_gpu)


def _edges(
    graph: ChakraGraph, nodes: pl.DataFrame, representative: Ints, shown: pl.Series
) -> pl.DataFrame:
    known = pl.DataFrame({"number": nodes["node"], "of": representative})
    # A step's mark calls everything: arrows that say nothing, over the whole picture.
    marks = nodes.filter(pl.col("name").str.starts_with(_STEP))["node"]
    called = nodes.drop_nulls("parent").filter(~pl.col("parent").is_in(marks.implode()))
    calls = called.select(before="parent", after="node", why=pl.lit("call"))
    both = pl.concat([calls, graph.edges])
    found = both.join(known, left_on="before", right_on="number").join(
        known, left_on="after", right_on="number", suffix="_after"
    )
    plain = found.select(before="of", after="of_after", why="why")
    seen = pl.col("before", "after").is_in(shown.implode())
    plain = plain.filter(pl.col("before") != pl.col("after"), pl.all_horizontal(seen))
    return plain.unique(["before", "after"], keep="first", maintain_order=True).sort(
        "before", "after"
    )
