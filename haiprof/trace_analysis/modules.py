"""Modules: the time of each nn.Module on host and GPU, forward and backward, as a tree."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.attribution import with_operator
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest, own_ns
from haiprof.trace_analysis.captures import GRAPH_LAUNCH
from haiprof.trace_analysis.temporal import Steps, step_window
from haiprof.trace_format.kineto.rank_trace import Trace

MODULE, ANNOTATION, FUNCTION = "module", "annotation", "function"
_MODULE = "nn.Module: "
_FORWARD = r"\.py\(\d+\): forward$"
_BACKWARD = "autograd::engine::evaluate_function"
# Ranges that hold whole steps, or a single collective.
_NO_PART = r"^(?:ProfilerStep|nccl:|gloo:|mpi:|ucc:|record_param_comms)"

SCHEMA = {
    "path": pl.String, "name": pl.String, "kind": pl.String, "depth": pl.Int64,
    "call_count": pl.Int64, "host_self_ns": pl.Int64, "host_ns": pl.Int64,
    "backward_host_ns": pl.Int64, "kernel_count": pl.Int64, "device_self_ns": pl.Int64,
    "device_ns": pl.Int64, "backward_device_self_ns": pl.Int64, "backward_device_ns": pl.Int64,
    "graph_kernel_count": pl.Int64, "graph_device_self_ns": pl.Int64,
}  # fmt: skip


def module_times(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Modules and annotated ranges by where they are called, with their time.

    A part is an nn.Module (recorded with `with_modules` or `with_stack`), or a record_function
    range; where no module was recorded, also a Python function `forward` of the call stacks.

    Source: autograd joins an operator with its node by a sequence number: the node's forward
    operator is the last one begun before with that number (torch.autograd.profiler).
    """
    tree = part_tree(trace)
    paths = _paths(tree)
    launched = _launched_work(trace, tree, steps)
    nodes = _autograd_nodes(trace, tree, steps)
    found = _host_times(tree, paths, step_window(trace, steps) if steps else None)
    for column, rows, values, is_total in (
        ("kernel_count", launched, pl.lit(1, pl.Int64), False),
        ("device_self_ns", launched.filter(~pl.col("is_backward")), pl.col("dur_ns"), False),
        ("device_ns", launched.filter(~pl.col("is_backward")), pl.col("dur_ns"), True),
        ("backward_device_self_ns", launched.filter("is_backward"), pl.col("dur_ns"), False),
        ("backward_device_ns", launched.filter("is_backward"), pl.col("dur_ns"), True),
        ("backward_host_ns", nodes, pl.col("dur_ns"), True),
        ("graph_kernel_count", launched.filter("of_graph"), pl.lit(1, pl.Int64), False),
        ("graph_device_self_ns", launched.filter("of_graph"), pl.col("dur_ns"), False),
    ):
        own = _by_path(tree, paths, rows, values.alias(column), with_outer=is_total)
        found = found.join(own, on="path", how="full", coalesce=True, nulls_equal=True)
    numbers = [name for name, dtype in SCHEMA.items() if dtype == pl.Int64 and name != "depth"]
    order = pl.col("first_ns").fill_null(np.iinfo(np.int64).max)
    return (
        found.with_columns(pl.col(numbers).fill_null(0))
        .filter(pl.col("call_count") + pl.col("kernel_count") > 0)
        .sort(order, "depth", "path", nulls_last=True)
        .select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())
    )


def part_tree(trace: Trace) -> CallTree:
    """Modules and annotated ranges with their nesting."""
    tree = nest(_module_calls(trace))
    if tree.spans.is_empty():
        raise MissingDataError(
            f"{trace.path}: no module, annotated range or call stack in it",
            hint="profile with with_modules=True or with_stack=True, or put record_function "
            "around parts of the model",
        )
    return tree


def _module_calls(trace: Trace) -> pl.DataFrame:
    """Calls of modules and ranges on the host: `name`, `kind`, `pid`, `tid`, `ts_ns`, `dur_ns`."""
    name = pl.col("name").cast(pl.String)
    columns = ("pid", "tid", "ts_ns", "dur_ns")
    python = trace.python.select(name, *columns)
    modules = python.filter(name.str.starts_with(_MODULE)).with_columns(
        name.str.strip_prefix(_MODULE), kind=pl.lit(MODULE)
    )
    if modules.is_empty():
        modules = python.filter(name.str.contains(_FORWARD)).with_columns(kind=pl.lit(FUNCTION))
    ranges = trace.annotations.filter(pl.col("category") != "gpu_user_annotation")
    named = ranges.select(name, *columns).filter(~name.str.contains(_NO_PART))
    return pl.concat([named.with_columns(kind=pl.lit(ANNOTATION)), modules])


def _paths(tree: CallTree) -> pl.Series:
    """The names around each span and its own, from the outermost."""
    own = tree.spans["name"]
    paths = own.clone()
    for depth in range(1, int(tree.depth.max(initial=0)) + 1):
        rows = np.flatnonzero(tree.depth == depth)
        joined = paths.gather(tree.parent[rows]) + "/" + own.gather(rows)
        paths = paths.scatter(rows, joined)
    return paths.alias("path")


def _host_times(tree: CallTree, paths: pl.Series, window: tuple[int, int] | None) -> pl.DataFrame:
    calls = tree.spans.select(
        "ts_ns", "dur_ns", "name", "kind", paths,
        own=pl.Series(own_ns(tree), dtype=pl.Int64), depth=pl.Series(tree.depth),
    )  # fmt: skip
    begun = pl.lit(True) if window is None else pl.col("ts_ns").is_between(*window, closed="left")
    return calls.group_by("path").agg(
        pl.col("name", "kind", "depth").first(),
        first_ns=pl.col("ts_ns").min(),
        call_count=begun.sum() if window else pl.len(),
        host_self_ns=pl.col("own").filter(begun).sum(),
        host_ns=pl.col("dur_ns").filter(begun).sum(),
    )


def _launched_work(trace: Trace, tree: CallTree, steps: Steps) -> pl.DataFrame:
    """GPU events: `dur_ns`, `row` of the part that launched them, `is_backward`, `of_graph`."""
    owned = with_operator(trace, steps, captures=True)
    is_node = owned.tree.spans["name"].cast(pl.String).str.starts_with(_BACKWARD)
    node = owned.tree.climb(owned.row, is_node.to_numpy())  # the autograd node at or around each
    calls = owned.made_by
    known = calls.with_row_index("at").drop_nulls("ts_ns")
    row = np.full(len(calls), -1, dtype=np.int64)
    row[known["at"].to_numpy()] = innermost(tree, known)
    inside = node >= 0
    row[inside] = _forward_part(trace, tree, owned.tree.spans, node[inside])
    return owned.gpu.select(
        "dur_ns",
        row=pl.Series(row),
        is_backward=pl.Series(inside),
        of_graph=pl.col("call").cast(pl.String).str.contains(GRAPH_LAUNCH).fill_null(value=False)
        & ~owned.captured,
    )


def _autograd_nodes(trace: Trace, tree: CallTree, steps: Steps) -> pl.DataFrame:
    """Autograd nodes on the host: `dur_ns`, and the `row` of the part of their forward."""
    name = pl.col("name").cast(pl.String)
    nodes = trace.ops.filter(name.str.starts_with(_BACKWARD))
    if steps is not None:
        nodes = nodes.filter(pl.col("ts_ns").is_between(*step_window(trace, steps), closed="left"))
    row = _forward_part(trace, tree, nodes, np.arange(len(nodes)))
    return nodes.select("dur_ns", row=pl.Series(row))


def _forward_part(trace: Trace, tree: CallTree, spans: pl.DataFrame, rows: Ints) -> Ints:
    """The part in which the forward operator of each autograd node ran; -1 where not known."""
    found = np.full(len(rows), -1, dtype=np.int64)
    nodes = spans.select("sequence_number", "ts_ns")[rows].with_row_index("at")
    nodes = nodes.drop_nulls("sequence_number").sort("ts_ns")
    name = pl.col("name").cast(pl.String)
    forward = (
        trace.ops.filter(
            pl.col("sequence_number").is_not_null()
            & (pl.col("forward_tid").fill_null(0) == 0)
            & ~name.str.starts_with(_BACKWARD)
        )
        .select("sequence_number", "pid", "tid", "ts_ns", "dur_ns", begun_ns="ts_ns")
        .sort("ts_ns")
    )
    joined = nodes.join_asof(
        forward.drop("ts_ns").with_columns(ts_ns=pl.col("begun_ns")).sort("ts_ns"),
        on="ts_ns", by="sequence_number", check_sortedness=False,
    ).drop_nulls("begun_ns")  # fmt: skip
    calls = joined.select("pid", "tid", "dur_ns", ts_ns="begun_ns")
    found[joined["at"].to_numpy()] = innermost(tree, calls)
    return found


def _by_path(
    tree: CallTree, paths: pl.Series, rows: pl.DataFrame, value: pl.Expr, *, with_outer: bool
) -> pl.DataFrame:
    """Sums by path; with those of the parts around as well, or of the innermost part alone."""
    values = (
        rows.select(value).to_series()
        if rows.height
        else pl.Series(value.meta.output_name(), [], dtype=pl.Int64)
    )
    if len(values) != rows.height:  # a literal
        values = values.new_from_index(0, rows.height)
    part = rows["row"].to_numpy().copy()
    levels, place = [], np.arange(rows.height)
    known = pl.Series(part, dtype=pl.Int64)
    own = paths.gather(pl.select(pl.when(known >= 0).then(known)).to_series())
    levels.append(pl.DataFrame([own.alias("path"), values]))
    while with_outer and len(place):
        outside = part[place] < 0
        place = place[~outside]
        above = tree.parent[part[place]]
        place, above = place[above >= 0], above[above >= 0]
        part[place] = above
        levels.append(pl.DataFrame([paths.gather(above).alias("path"), values.gather(place)]))
    return pl.concat(levels).group_by("path").agg(pl.all().sum())
