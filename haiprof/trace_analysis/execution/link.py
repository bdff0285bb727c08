"""An execution trace joined with its timeline: times, GPU work and waits of each node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.trace_analysis.attribution import with_operator
from haiprof.trace_analysis.call_tree import CallTree, nest, own_ns
from haiprof.trace_analysis.execution.identify import Identified, identify
from haiprof.trace_analysis.execution.pairs import Pair
from haiprof.trace_analysis.execution.waits import sync_dependencies, thread_dependencies
from haiprof.trace_format.execution.trace import NODE_SCHEMA
from haiprof.trace_format.kineto.rank_trace import Trace

_SPAN = (
    "event", "name", "pid", "tid", "ts_ns", "dur_ns", "external_id", "record_function_id",
)  # fmt: skip
_EXAMPLES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkShare:
    """How much of one rank was linked, and why not the rest."""

    rank: int
    trace: str
    execution_trace: str
    linked_by: str | None
    """`record_function_id`, `external_id` or `order` (of begin, and name, in each thread)."""
    node_count: int
    linkable_count: int
    """Nodes that a timeline shows: neither roots nor the observer's note of process groups."""
    linked_count: int
    linked_ratio: float | None
    """Of the linkable; null where there is none."""
    operator_count: int
    """Operators and record_function ranges of the timeline."""
    operator_linked_count: int
    operator_linked_ratio: float | None
    kernel_count: int
    """GPU events: kernels, copies, sets."""
    kernel_linked_count: int
    kernel_linked_ratio: float | None
    """Attributed to a node; null where the GPU was not recorded."""
    not_linked: dict[str, int]
    """Reason, and how many nodes, operators or kernels."""
    nodes_not_linked: dict[str, int]
    """Names of nodes without an operator, the most frequent first."""
    operators_not_linked: dict[str, int]
    """Names of operators without a node."""
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """One rank's execution trace with times and GPU work."""

    pair: Pair
    nodes: pl.DataFrame
    """`NODE_SCHEMA`, by number: the nodes as they were, and one per GPU event behind them, whose
    parent is the node that launched it."""
    share: LinkShare


def link(pair: Pair) -> Linked:
    """Links one rank's execution trace to its timeline.

    Each node with `ts_ns`, `dur_ns` and `self_ns` of its operator on the trace's clock,
    `linked_by`, and what it waited for; null where it was not linked. GPU events are nodes of
    their own with `category`, `stream`, `device`, `bytes`.

    Source: the fields of Chakra's trace_linker (mlcommons/chakra 1.0.0). It takes an equal id
    for a link whatever the names say, and sorts the whole file once more for each GPU event.
    """
    nodes = pair.execution.nodes.filter(pl.col("category").is_null())
    tree = nest(_spans(pair.trace))
    found = identify(nodes, tree)
    timed = _add_times(nodes, tree, found)
    gpu, numbers, reasons = _gpu_nodes(pair.trace, timed, tree, found)
    joined = pl.concat([timed, gpu]) if len(gpu) else timed
    joined = joined.with_columns(
        sync_dependencies=sync_dependencies(pair.trace, joined, numbers, tree, found.row)
    )
    return Linked(pair=pair, nodes=joined, share=_share(pair, tree, found, gpu, reasons))


def _spans(trace: Trace) -> pl.DataFrame:
    """Operators and record_function ranges on the CPU, in the file's order."""
    ranges = trace.annotations.filter(pl.col("category").cast(pl.String) != "gpu_user_annotation")
    return pl.concat([ranges.select(_SPAN), trace.ops.select(_SPAN)]).sort("event")


def _add_times(nodes: pl.DataFrame, tree: CallTree, found: Identified) -> pl.DataFrame:
    rows = pl.Series(found.row, dtype=pl.Int64)
    rows = rows.set(rows < 0, None)
    own = pl.Series("self_ns", own_ns(tree), dtype=pl.Int64)
    times = pl.DataFrame({
        "ts_ns": tree.spans["ts_ns"].gather(rows),
        "dur_ns": tree.spans["dur_ns"].gather(rows),
        "self_ns": own.gather(rows),
        "host_tid": tree.spans["tid"].gather(rows),
    })  # fmt: skip
    timed = nodes.with_columns(
        times,
        linked_by=pl.when(rows.is_not_null()).then(pl.lit(found.by, dtype=pl.String)),
    )
    return timed.with_columns(thread_dependency=thread_dependencies(timed, tree, found.row))


def _gpu_nodes(
    trace: Trace, nodes: pl.DataFrame, tree: CallTree, found: Identified
) -> tuple[pl.DataFrame, pl.DataFrame, dict[str, int]]:
    """GPU events as nodes, by their launch, `event` and `node` of each, and why some are not."""
    owned = with_operator(trace, annotations=True)
    gpu, row = owned.gpu, owned.row
    place_of_row = np.full(len(tree.parent) + 1, -1, dtype=np.int64)
    linked = np.flatnonzero(found.row >= 0)
    place_of_row[found.row[linked]] = linked
    row_of_event = dict(zip(tree.spans["event"].to_list(), range(len(tree.parent)), strict=True))
    events = owned.tree.spans["event"].to_numpy()
    inside = np.array(
        [row_of_event[int(events[at])] if at >= 0 else -1 for at in row.tolist()], dtype=np.int64
    )
    holder = place_of_row[tree.climb(inside, place_of_row >= 0)]
    launch = gpu["call_ts_ns"].is_not_null().to_numpy()
    reasons = {
        "GPU events whose launch is not in the trace": int(np.sum((row < 0) & ~launch)),
        "GPU events launched outside of operators": int(np.sum((row < 0) & launch)),
        "GPU events of operators that are not linked": int(np.sum((row >= 0) & (holder < 0))),
    }
    kept = np.flatnonzero(holder >= 0)
    ordered = gpu[kept].with_columns(at=pl.Series(holder[kept])).sort("ts_ns", "event")
    made = _as_nodes(ordered, nodes)
    return made, pl.DataFrame([ordered["event"], made["node"]]), reasons


def _as_nodes(ordered: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Copies of the nodes that launched, with what the GPU did."""
    first = int(nodes["node"].max() or 0) + 1  # type: ignore[arg-type]
    around = nodes[ordered["at"].to_numpy()]
    group = pl.coalesce(pl.Series(ordered["process_group"].cast(pl.String)), "process_group")
    return around.with_columns(
        parent=pl.col("node"),
        node=pl.Series(range(first, first + len(ordered)), dtype=pl.Int64),
        name=ordered["name"].cast(pl.String),
        ts_ns=ordered["ts_ns"],
        dur_ns=ordered["dur_ns"],
        self_ns=ordered["dur_ns"],
        host_tid=ordered["tid"],
        linked_by=pl.lit("correlation"),
        category=ordered["category"].cast(pl.String),
        process_group=pl.when(group != "").then(group),
        thread_dependency=pl.lit(None, dtype=pl.Int64),
        **{name: ordered[name] for name in ("stream", "device", "bytes")},
    ).select(pl.col(name).cast(kind) for name, kind in NODE_SCHEMA.items())


def _share(
    pair: Pair, tree: CallTree, found: Identified, gpu: pl.DataFrame, reasons: dict[str, int]
) -> LinkShare:
    nodes = pair.execution.nodes.filter(pl.col("category").is_null())
    linked = found.row >= 0
    linkable, count = int(found.linkable.sum()), int(linked.sum())
    free = np.setdiff1d(np.arange(len(tree.parent)), found.row)
    kernels = len(gpu) + sum(reasons.values())
    missing = nodes.filter(pl.Series(found.linkable & ~linked, dtype=pl.Boolean))["name"]
    not_linked = {f"nodes: {reason}": number for reason, number in found.refused.items()}
    rest = linkable - count - sum(found.refused.values())
    not_linked |= {f"nodes: not in the timeline by {found.by or 'anything'}": rest}
    not_linked |= {"operators that are not in the execution trace": len(free)} | reasons
    outside = (f"{found.outside_count} linked nodes do not begin within the operator of their "
               "parent: the observer noted another parent",)  # fmt: skip
    return LinkShare(
        rank=pair.rank,
        trace=str(pair.trace.path),
        execution_trace=str(pair.execution.path),
        linked_by=found.by,
        node_count=len(nodes),
        linkable_count=linkable,
        linked_count=count,
        linked_ratio=count / linkable if linkable else None,
        operator_count=len(tree.parent),
        operator_linked_count=count,
        operator_linked_ratio=count / len(tree.parent) if len(tree.parent) else None,
        kernel_count=kernels,
        kernel_linked_count=len(gpu),
        kernel_linked_ratio=len(gpu) / kernels if kernels else None,
        not_linked={reason: number for reason, number in not_linked.items() if number > 0},
        nodes_not_linked=_names(missing),
        operators_not_linked=_names(tree.spans["name"].cast(pl.String)[free]),
        notes=(*pair.execution.report.notes, *pair.trace.report.notes, *found.notes,
               *(outside if found.outside_count else ())),
    )  # fmt: skip


def _names(names: pl.Series) -> dict[str, int]:
    counted = names.alias("name").value_counts().sort(["count", "name"], descending=[True, False])
    return dict(counted.head(_EXAMPLES).iter_rows())
