"""What launched each GPU event: operator, module and annotation; kernels that follow each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.intervals import Ints
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest, own_ns, roots, take
from haiprof.trace_analysis.device_time import Steps, gpu_events, step_window
from haiprof.trace_analysis.launches import with_call
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.launch_checks import BEGIN_CAPTURE, END_CAPTURE

_NODES = {
    "kernel": r"Launch(?:Cooperative)?Kernel",
    "gpu_memcpy": r"Memcpy.*Async",
    "gpu_memset": r"Memset.*Async",
}
"""Categories of GPU events, and calls that make a node of that kind while a stream is captured."""
_CALL = ("pid", "tid", "ts_ns", "dur_ns")

CAPTURED_SCHEMA = {"event": pl.Int64, **{f"captured_{name}": pl.Int64 for name in _CALL}}


def captured_calls(trace: Trace, gpu: pl.DataFrame) -> pl.DataFrame:
    """The call that made the node of each GPU event of a CUDA graph, where it is known.

    A graph and a capture belong together where both have the same kinds of nodes (kernels, copies,
    sets) in the same order, and where as many captures have that order as graphs: the first is the
    first then. Nodes are numbered as they are made; the numbers must also be the order on each
    stream, else nothing is said of that graph.

    Source: CUDA's graphs by stream capture; CUPTI's `graphNodeId` ("graph node id").
    """
    # Nodes of each graph as they were made: `graph` (its first node), `graph_node`, `kind`.
    launched = gpu.filter(of_graph(), pl.col("graph_node").is_not_null()).with_columns(
        graph=pl.col("graph_node").min().over("correlation"),
        size=pl.len().over("correlation"),
        kind=pl.col("category").cast(pl.String),
    )
    last = launched.filter(pl.col("size") == pl.col("size").max().over("graph"))
    whole = last.filter(pl.col("correlation") == pl.col("correlation").max().over("graph"))
    later = pl.col("graph_node").diff().over("graph", "stream", order_by=["ts_ns", "event"])
    in_order = ((later > 0).fill_null(value=True).all()).over("graph")
    known = whole.filter(in_order & pl.col("graph_node").is_unique())
    nodes = known.sort("graph_node").select("graph", "graph_node", "kind")
    graphs = [graph for _, graph in sorted(nodes.group_by("graph"), key=lambda pair: pair[0])]
    alike: dict[tuple[str, ...], tuple[list[pl.DataFrame], list[pl.DataFrame]]] = {}
    for place, frames in enumerate((graphs, _captures(trace) if graphs else [])):
        for frame in frames:
            alike.setdefault(tuple(frame["kind"]), ([], []))[place].append(frame)
    found = [pl.concat([graph.select("graph_node"), calls.drop("kind")], how="horizontal")
             for same, captures in alike.values() if len(same) == len(captures)
             for graph, calls in zip(same, captures, strict=True)]  # fmt: skip
    if not found:
        return pl.DataFrame(schema=CAPTURED_SCHEMA)
    events = gpu.filter(of_graph()).select("event", "graph_node")
    return events.join(pl.concat(found), on="graph_node").select(*CAPTURED_SCHEMA)


def of_graph() -> pl.Expr:
    """Whether the call that launched a GPU event launches a graph, of CUDA or HIP."""
    return pl.col("call").cast(pl.String).str.contains("GraphLaunch").fill_null(value=False)


def _captures(trace: Trace) -> list[pl.DataFrame]:
    """Calls of each capture as they were made; of captures at the same time none."""
    name = pl.col("name").cast(pl.String)
    calls = trace.runtime.sort("ts_ns")
    marks = calls.filter(name.str.contains(f"{BEGIN_CAPTURE}|{END_CAPTURE}"))
    begins, times = marks.select(name.str.contains(BEGIN_CAPTURE))["name"], marks["ts_ns"]
    if begins.to_list() != [True, False] * (len(marks) // 2):
        return []
    kind = pl.coalesce(
        pl.when(name.str.contains(text)).then(pl.lit(k)) for k, text in _NODES.items()
    )
    first = calls.filter(pl.col("correlation") > 0).unique(
        "correlation", keep="first", maintain_order=True
    )
    alone = first.join(trace.gpu, on="correlation", how="anti", maintain_order="left")
    made = alone.select(kind=kind, **{f"captured_{column}": pl.col(column) for column in _CALL})
    within, spans = pl.col("captured_ts_ns"), zip(times[::2], times[1::2], strict=True)
    return [made.drop_nulls("kind").filter(within.is_between(*span)) for span in spans]


NESTING, EXTERNAL_ID, CAPTURE = "nesting", "external_id", "capture"
_MODULE = "nn.Module: "
_STEP = "ProfilerStep#"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLaunches:
    """GPU events and the operators that launched them."""

    tree: CallTree  # of the CPU operators
    gpu: pl.DataFrame
    """Columns of `launches.with_call`, and `launch_delay_ns`: from the call's end to the event's
    own start, 0 where it began before."""
    row: Ints  # row of the tree of each GPU event's innermost operator; -1 where there is none
    by_id: pl.Series
    """Whether that row was found by the external id, as no operator encloses the call."""
    captured: pl.Series
    """Whether it is the operator whose call was captured into the CUDA graph that was launched."""
    made_by: pl.DataFrame
    """`pid`, `tid`, `ts_ns`, `dur_ns` of each GPU event's launch, or of the call that was captured;
    null where it is not in the trace."""


def with_operator(
    trace: Trace, steps: Steps = None, *, annotations: bool = False, captures: bool = False
) -> GpuLaunches:
    """GPU events with the innermost operator around their launch."""
    spans = _without_steps(trace.ops)
    if annotations:
        ranges = _without_steps(trace.host_ranges)
        spans = pl.concat([ranges, spans.select(ranges.columns)])
    tree = nest(spans)
    gpu = with_call(gpu_events(trace, steps), trace.runtime)
    known = captured_calls(trace, gpu) if captures else pl.DataFrame(schema=CAPTURED_SCHEMA)
    made_by = gpu.join(known, on="event", how="left", maintain_order="left").select(
        pid=pl.coalesce("captured_pid", "pid"),
        tid=pl.coalesce("captured_tid", "tid"),
        ts_ns=pl.coalesce("captured_ts_ns", "call_ts_ns"),
        dur_ns=pl.coalesce("captured_dur_ns", "call_dur_ns"),
        captured=pl.col("captured_ts_ns").is_not_null(),
    )
    row = rows_around(tree, made_by)
    said = np.where(row < 0, _by_external_id(tree, gpu, row), -1)
    end = pl.col("call_ts_ns") + pl.col("call_dur_ns")
    return GpuLaunches(
        tree=tree, gpu=gpu.with_columns(launch_delay_ns=(pl.col("ts_ns") - end).clip(0)),
        row=np.maximum(row, said), by_id=pl.Series(said >= 0), captured=made_by["captured"],
        made_by=made_by.drop("captured"),
    )  # fmt: skip


def kernel_operators(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Each GPU event with the operators, the module and the annotation that launched it.

    Returns:
        One row per GPU event: `event`, `name`, `category`, `device`, `stream`, `ts_ns`, `dur_ns`,
        `correlation`, `call`, `launch_delay_ns`, `operator`, `operator_event`, `top_operator`,
        `matched_by`, `module`, `annotation`.

    Source: nesting is what Kineto and HTA's call stacks go by. External ids are taken only
    where they are ids of operators: Kineto of 2022 and 2023 wrote the correlation there.
    """
    owned = with_operator(trace, steps, captures=True)
    tree, row = owned.tree, owned.row
    matched_by = (
        pl.when(owned.by_id).then(pl.lit(EXTERNAL_ID))
        .when(owned.captured).then(pl.lit(CAPTURE))
        .otherwise(pl.lit(NESTING))
    )  # fmt: skip
    top = np.where(row < 0, -1, roots(tree.parent)[row]) if len(tree.parent) else row
    is_module = pl.col("name").cast(pl.String).str.starts_with(_MODULE)
    modules = _name_around(trace.python.filter(is_module), owned.made_by)
    return owned.gpu.select(
        "event",
        pl.col("name", "category").cast(pl.String),
        *("device", "stream", "ts_ns", "dur_ns", "correlation"),
        pl.col("call").cast(pl.String),
        "launch_delay_ns",
        tree.names_at(row).alias("operator"),
        take(tree.spans["event"], row).alias("operator_event"),
        tree.names_at(top).alias("top_operator"),
        pl.when(pl.Series(row >= 0)).then(matched_by).alias("matched_by"),
        modules.str.strip_prefix(_MODULE).alias("module"),
        _name_around(_without_steps(trace.host_ranges), owned.made_by).alias("annotation"),
    )


def operator_kernels(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Operators by name: what they launched themselves, and what in all.

    Returns:
        One row per operator: `operator`, `call_count`, `cpu_self_ns`, `cpu_total_ns`,
        `kernel_count`, `gpu_self_ns`, `kernel_total_count`, `gpu_total_ns`, `launch_delay_mean_ns`,
        `launch_delay_max_ns`. A row with `operator` null is of GPU events without one.
    """
    owned = with_operator(trace, steps, captures=True)
    name = owned.tree.names_at(owned.row).alias("operator")
    kernels = owned.gpu.select("dur_ns", "launch_delay_ns", name)
    delay = pl.col("launch_delay_ns")
    own = kernels.group_by("operator").agg(
        kernel_count=pl.len().cast(pl.Int64), gpu_self_ns=pl.col("dur_ns").sum(),
        launch_delay_mean_ns=delay.mean(), launch_delay_max_ns=delay.max(),
    )  # fmt: skip
    cpu = _cpu_time(owned.tree, step_window(trace, steps) if steps else None)
    pairs = owned.tree.names_around(owned.row)
    timed = pairs.with_columns(owned.gpu["dur_ns"].gather(pairs["place"]))
    totals = timed.group_by(operator="name").agg(
        kernel_total_count=pl.len().cast(pl.Int64), gpu_total_ns=pl.col("dur_ns").sum()
    )
    named = cpu.join(totals, on="operator", how="full", coalesce=True)
    known = named.join(own.drop_nulls("operator"), on="operator", how="left")
    counts = ("kernel_count", "gpu_self_ns", "kernel_total_count", "gpu_total_ns")
    known = known.with_columns(pl.col(*counts, "call_count").fill_null(0))
    nobody = own.filter(pl.col("operator").is_null())
    found = pl.concat([known, nobody], how="diagonal")
    return found.select(
        *("operator", "call_count", "cpu_self_ns", "cpu_total_ns", *counts),
        *("launch_delay_mean_ns", "launch_delay_max_ns"),
    ).sort("gpu_total_ns", "operator", descending=[True, False], nulls_last=True)


def host_operators(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Operators by name and shapes in a trace without a GPU, where they do the work themselves.

    Returns:
        One row per operator and shapes: `operator`, `shapes`, `call_count`, `cpu_self_ns`,
        `cpu_total_ns`; none of a rank with GPU events.
    """
    tree = nest(trace.ops.clear() if len(trace.gpu) else _without_steps(trace.ops))
    shapes = tree.spans["input_dims"].cast(pl.String)
    some = shapes.is_not_null() & (shapes.str.replace_all(r"[\[\], ]", "") != "")
    named = pl.DataFrame({"operator": tree.spans["name"].cast(pl.String), "shapes": shapes})
    key = named.select(pl.struct("operator", "shapes").rank("dense")).to_series()
    window = step_window(trace, steps) if steps else None
    found = _cpu_time(replace(tree, spans=tree.spans.with_columns(name=key.cast(pl.Int64))), window)
    names = named.with_columns(
        pl.when(pl.Series(some)).then("shapes").alias("shapes"), key=key.cast(pl.String)
    ).unique("key")
    return (
        found.rename({"operator": "key"})
        .join(names, on="key", how="left")
        .select("operator", "shapes", "call_count", "cpu_self_ns", "cpu_total_ns")
        .sort(-pl.col("cpu_self_ns"), "operator", "shapes", nulls_last=True)
    )


def _cpu_time(tree: CallTree, window: tuple[int, int] | None) -> pl.DataFrame:
    """`operator`, `call_count`, `cpu_self_ns`, `cpu_total_ns` of what began in the window."""
    names = tree.spans["name"].to_physical().to_numpy()
    inner = np.zeros(len(names), dtype=np.bool_)
    for at, row in tree.outwards(tree.parent):
        inner[at] |= names[at] == names[row]
    calls = tree.spans.select(
        "ts_ns", "dur_ns", operator=pl.col("name").cast(pl.String),
        own=pl.Series(own_ns(tree), dtype=pl.Int64), inner=pl.Series(inner),
    )  # fmt: skip
    if window is not None:
        calls = calls.filter(pl.col("ts_ns").is_between(*window, closed="left"))
    return calls.group_by("operator").agg(
        call_count=pl.len().cast(pl.Int64),
        cpu_self_ns=pl.col("own").sum(),
        cpu_total_ns=pl.col("dur_ns").filter(~pl.col("inner")).sum(),
    )


def _by_external_id(tree: CallTree, gpu: pl.DataFrame, around: Ints) -> Ints:
    """Row of the operator with each GPU event's external id; -1 where there is none.

    Kineto of 2022 and 2023 wrote the call's number there, so most ids must be of operators around.
    """
    nothing = np.full(len(gpu), -1, dtype=np.int64)
    noted = gpu.select("correlation", "ts_ns", id=pl.coalesce("external_id", "gpu_external_id"))
    same = noted.filter(pl.col("id") == pl.col("correlation"))
    if 2 * len(same) > noted["id"].count():
        return nothing
    rows = tree.spans.select(id="external_id", begin="ts_ns").with_row_index("row").drop_nulls("id")
    rows = rows.unique("id", keep="none")
    places = noted.with_row_index("place").join(rows, on="id", how="left").sort("place")
    begun = pl.when(pl.col("begin") <= pl.col("ts_ns")).then(pl.col("row").cast(pl.Int64))
    found: Ints = places.select(begun.fill_null(-1)).to_series().to_numpy()
    compared = np.flatnonzero((around >= 0) & noted["id"].is_not_null().to_numpy())
    wanted = np.zeros(len(tree.parent), dtype=np.bool_)
    wanted[found[compared][found[compared] >= 0]] = True
    agree = (tree.climb(around[compared], wanted) == found[compared]) & (found[compared] >= 0)
    return found if 2 * int(agree.sum()) >= len(compared) else nothing


def rows_around(tree: CallTree, calls: pl.DataFrame) -> Ints:
    """Row of the innermost span that encloses each call; -1 where there is none."""
    known = calls.with_row_index("at").drop_nulls("ts_ns")
    found = np.full(len(calls), -1, dtype=np.int64)
    found[known["at"].to_numpy()] = innermost(tree, known)
    return found


def _name_around(spans: pl.DataFrame, calls: pl.DataFrame) -> pl.Series:
    tree = nest(spans)
    return tree.names_at(rows_around(tree, calls))


def _without_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Drops the marks of profiler steps, which are operators in traces from before 2022."""
    return spans.filter(~pl.col("name").cast(pl.String).str.starts_with(_STEP))


MIN_PATTERN_LENGTH = 3
TOP_K = 5  # HTA's defaults for get_frequent_cuda_kernel_sequences


def kernel_sequences(
    trace: Trace, operator: str, steps: Steps = None, *,
    min_pattern_length: int = MIN_PATTERN_LENGTH, top_k: int = TOP_K,
) -> pl.DataFrame:  # fmt: skip
    """The most frequent sequences of kernels under an operator.

    Args:
        trace: Of one rank.
        operator: Part of its name.
        steps: First profiler step and the one after the last; None takes all.
        min_pattern_length: Calls with fewer kernels are left out.
        top_k: How many sequences of each rank are wanted.

    Returns:
        One row per sequence: `pattern`, `count`, `kernel_count`, `gpu_duration_ns`,
        `cpu_duration_ns`.

    Source: HTA get_frequent_cuda_kernel_sequences: whole sequences of calls are counted, no
    parts of them. HTA looks only at matching operators of the least depth in the trace, and
    so misses those that stand deeper elsewhere.
    """
    owned = with_operator(trace, steps, annotations=True)
    spans = owned.tree.spans
    matching = spans["name"].cast(pl.String).str.contains(operator, literal=True).to_numpy()
    # The outermost matching row at or above each row; -1 where none matches.
    row = np.full(len(owned.row), -1, dtype=np.int64)
    for place, around in owned.tree.outwards(owned.row):
        row[place[matching[around]]] = around[matching[around]]
    kernels = owned.gpu.with_columns(operator_row=pl.Series(row)).filter(pl.Series(row >= 0))
    # A row per outermost matching call with kernels, these in the order of their start.
    calls = kernels.group_by("operator_row", maintain_order=True).agg(
        kernels=pl.col("name").cast(pl.String), gpu_duration_ns=pl.col("dur_ns").sum()
    )
    called = spans[calls["operator_row"]]
    calls = calls.with_columns(
        operator=called["name"].cast(pl.String), cpu_duration_ns=called["dur_ns"]
    )
    long_enough = calls.filter(pl.col("kernels").list.len() >= min_pattern_length)
    pattern = pl.concat_list("operator", "kernels").list.join("|")
    found = long_enough.group_by(pattern=pattern).agg(
        count=pl.len().cast(pl.Int64),
        kernel_count=pl.col("kernels").first().list.len().cast(pl.Int64),
        gpu_duration_ns=pl.col("gpu_duration_ns").sum(),
        cpu_duration_ns=pl.col("cpu_duration_ns").sum(),
    )
    return found.sort("count", "pattern", descending=[True, False]).head(top_k)


def operator_sequences(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """What each operator launches itself, and how long that takes to be launched and to begin.

    Returns:
        One row per operator and sequence: `operator`, `kernel_sequence`, `count`,
        `operator_delay_mean_ns`, `runtime_delay_mean_ns`.

    Source: HTA get_aten_op_kernels_and_delay, for all operators and not only those of ATen;
    HTA adds the rows of earlier ranks to those of later ones (D15).
    """
    owned = with_operator(trace, steps)
    known = (owned.row >= 0) & ~owned.by_id.to_numpy()
    row = owned.row[known]
    launched = owned.gpu.filter(pl.Series(known)).with_columns(
        operator=owned.tree.names_at(row), operator_row=pl.Series(row),
        began_ns=owned.tree.spans["ts_ns"].gather(row),
    ).sort("call_ts_ns", "ts_ns", "event")  # fmt: skip
    calls = launched.group_by("operator", "operator_row", maintain_order=True).agg(
        kernel_sequence=pl.col("name").cast(pl.String).str.join(" -> "),
        operator_delay=(pl.col("call_ts_ns") - pl.col("began_ns")).first(),
        runtime_delay=(pl.col("ts_ns") - pl.col("call_ts_ns")).first().clip(0),
    )
    found = calls.group_by("operator", "kernel_sequence").agg(
        count=pl.len().cast(pl.Int64),
        operator_delay_mean_ns=pl.col("operator_delay").mean(),
        runtime_delay_mean_ns=pl.col("runtime_delay").mean(),
    )
    return found.sort(-pl.col("count"), "operator", "kernel_sequence")
