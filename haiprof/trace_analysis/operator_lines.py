"""Which line of the job called the operators of a window, and what their backward takes."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.call_tree import nest
from haiprof.trace_format.kineto.rank_trace import Trace

_NODE = "autograd::engine::evaluate_function"
_ENGINE = "^(torch::)?autograd::"
SCHEMA = {
    "file": pl.String, "line": pl.Int64, "function": pl.String, "step_count": pl.Int64,
    "operator_count": pl.Int64, "operator_ns": pl.Float64, "node_count": pl.Int64,
    "backward_ns": pl.Float64, "event_count": pl.Int64, "rest_ns": pl.Float64,
}  # fmt: skip


def operator_lines(trace: Trace) -> pl.DataFrame:
    """Lines of the job's code by the operators that they called in forward; a question for a pool.

    Needs a window with lines (`haiprof --explain`). A node of autograd's graph has the sequence
    number of its forward operator, and the window noted the number at which each line began. A
    node's time is that of its operators and of the engine around them; what is more than usual
    around them is a hook or a function in Python, which has lines of its own.

    Returns:
        One row per line, in all steps of the window together: `file`, `line`, `function`,
        `step_count`, `operator_count`, `operator_ns` (the median of the outermost operators),
        `node_count`, `backward_ns`, `event_count` (recorded in backward), `rest_ns` (the engine's
        usual time per node). Of nodes whose forward is not known (the sums of gradients) `file` is
        null.

    Raises:
        MissingDataError: The trace has no lines.
    """
    own = trace.metadata.get("haiprof")
    noted = own.get("lines") if isinstance(own, dict) else None
    if not isinstance(noted, dict) or trace.steps.is_empty():
        raise MissingDataError(
            f"{trace.path}: no lines of operators in it", hint="record with haiprof --explain"
        )
    try:
        places = pl.DataFrame(noted["places"], schema=dict(list(SCHEMA.items())[:3]), orient="row")
        begins = np.array(noted["at"], dtype=np.int64).reshape(-1, 2)
        if begins.size and not 0 <= begins[:, 1].min() <= begins[:, 1].max() < places.height:
            raise ValueError("a place that is not there")
    except (KeyError, TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise MissingDataError(f"{trace.path}: its lines of operators are damaged") from error
    tree = nest(trace.ops)
    name = tree.spans["name"].cast(pl.String)
    is_node = name.str.starts_with(_NODE).to_numpy()
    is_operator = (name.str.contains("::") & ~name.str.contains(_ENGINE)).to_numpy()
    number = tree.spans["sequence_number"].fill_null(-1).to_numpy()
    ahead = (tree.spans["forward_tid"].fill_null(0) == 0).to_numpy() & ~is_node & (number >= 0)
    ahead &= (tree.spans["tid"] == trace.steps["tid"][0]).to_numpy()
    length = tree.ends - tree.starts
    node_of = tree.climb(np.arange(len(length)), is_node)

    nodes = np.flatnonzero(is_node)
    inner = np.flatnonzero((node_of >= 0) & is_operator)
    inner = inner[tree.climb(tree.parent[inner], is_operator) < 0]
    operators = np.bincount(node_of[inner], length[inner], minlength=len(length))[nodes]
    around = tree.climb(tree.parent[nodes], is_node)
    nested = around >= 0
    below = np.bincount(around[nested], length[nodes[nested]], minlength=len(length))[nodes]
    rest = np.maximum(length[nodes] - below - operators, 0)
    usual = float(np.median(rest)) if len(rest) else 0.0
    events = np.bincount(node_of[node_of >= 0], minlength=len(length))[nodes]

    order = np.searchsorted(begins[:, 0], number, side="right") - 1
    place = np.where(order >= 0, begins[order, 1], -1) if len(begins) else np.full(len(number), -1)
    of_node = np.where(np.isin(number[nodes], number[ahead]), place[nodes], -1)
    called = np.flatnonzero(ahead & (tree.parent < 0) & (place >= 0))
    called = called[place[called] >= 0]
    forward = pl.DataFrame({"place": place[called], "operator_ns": length[called]})
    backward = pl.DataFrame({
        "place": of_node, "backward_ns": operators + np.minimum(rest, usual), "event_count": events,
    })  # fmt: skip
    found = (
        forward.group_by("place")
        .agg(operator_count=pl.len(), operator_ns=pl.col("operator_ns").median())
        .join(
            backward.group_by("place").agg(
                pl.col("backward_ns", "event_count").sum(), node_count=pl.len()
            ),
            on="place", how="full", coalesce=True,
        )
        .join(places.with_row_index("place").cast({"place": pl.Int64}), on="place", how="left")
        .with_columns(step_count=pl.lit(trace.steps.height), rest_ns=pl.lit(usual))
    )  # fmt: skip
    numbers = pl.col(list(SCHEMA)[4:9]).fill_null(0)
    ordered = found.with_columns(numbers).sort("backward_ns", "place", descending=[True, False])
    return ordered.select(pl.col(column).cast(dtype) for column, dtype in SCHEMA.items())
