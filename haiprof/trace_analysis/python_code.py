"""Time of the job's Python: functions by call stack, and each nn.Module on host and GPU."""

from __future__ import annotations

from itertools import chain

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, Ints, covered_lengths, intersection, union
from haiprof.trace_analysis import call_tree
from haiprof.trace_analysis.attribution import of_graph, rows_around, with_operator
from haiprof.trace_analysis.device_time import Steps, step_window, union_of
from haiprof.trace_format.kineto.events import GPU_BACKENDS, HOST_BACKENDS
from haiprof.trace_format.kineto.rank_trace import Trace

_TIMES = ("total_ns", "self_ns", "non_overlapped_ns", "self_non_overlapped_ns")


def python_stacks(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Python calls by their call stack.

    Returns:
        `pid`, `tid`, `stack` (`root;...;leaf`), `name`, `depth`, `calls`, `total_ns`, `self_ns`,
        and of both the time and share in which no GPU work ran: `non_overlapped_ns`,
        `self_non_overlapped_ns`, `non_overlapped_ratio`, `self_non_overlapped_ratio`.

    Source: self and total time as in cProfile and in TensorBoard's operator view. HTA has no
    such question. Whose call a call is comes from `Python parent id`, or from the nesting of
    times where ids are missing or contradict the times.
    """
    calls, every = _calls(trace, steps)
    found = calls.group_by("stack").agg(pl.col("begun").sum().alias("calls"), pl.col(_TIMES).sum())
    texts = call_tree.stack_texts(every)
    known = pl.DataFrame([
        pl.Series("number", range(len(texts)), dtype=pl.Int64),
        *every.threads[every.thread].get_columns(),
        texts,
        every.names.gather(pl.Series(every.name, dtype=pl.UInt32)).alias("name"),
        texts.str.count_matches(";", literal=True).cast(pl.Int64).alias("depth"),
    ])  # fmt: skip
    joined = known.join(found, left_on="number", right_on="stack").drop("number")
    return _add_ratios(joined, has_gpu=trace.gpu.height > 0)


def python_functions(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Python calls by function, whoever called them.

    Returns:
        As `python_stacks`, without `stack` and `depth`.
    """
    calls, every = _calls(trace, steps)
    per_stack = pl.DataFrame({
        "stack": np.arange(len(every.name)), "thread": every.thread, "code": every.name,
        "outermost": call_tree.is_outermost(every),
    })  # fmt: skip
    found = calls.join(per_stack, on="stack").group_by("thread", "code").agg(
        pl.col("begun").sum().alias("calls"), pl.col(_TIMES[::2]).filter("outermost").sum(),
        pl.col(_TIMES[1::2]).sum(),
    )  # fmt: skip
    names = every.names.gather(found["code"].cast(pl.UInt32)).alias("name")
    threads = every.threads[found["thread"].to_numpy()].get_columns()
    named = found.select(*threads, names, "calls", *_TIMES)
    return _add_ratios(named, has_gpu=trace.gpu.height > 0)


def _calls(trace: Trace, steps: Steps) -> tuple[pl.DataFrame, call_tree.Stacks]:
    """`stack`, `begun` (0 or 1) and the times of each Python call, and the distinct stacks."""
    python = call_tree.python_calls(trace)
    if python.is_empty():
        raise MissingDataError(
            f"{trace.path}: no Python functions in it", hint="profile with with_stack=True"
        )
    spans = python.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    starts = spans["ts_ns"].to_numpy()
    ends = starts + spans["dur_ns"].to_numpy()
    parent = _recorded_parents(spans, starts, ends)
    parent = call_tree.nest(spans).parent if parent is None else parent
    found = call_tree.stacks(spans, parent)
    # Of each call: total and own time, and the parts of them outside GPU work.
    window, begun = union(starts, ends), np.ones(len(starts), dtype=np.int64)
    if steps is not None:
        first, last = step_window(trace, steps)
        window = Intervals(np.array([first]), np.array([last]))
        begun = ((starts >= first) & (starts < last)).astype(np.int64)
    busy = intersection(union_of(trace.gpu), window)

    def inside(starts: Ints, ends: Ints) -> Ints:
        return covered_lengths(window, starts, ends)

    def without_gpu(starts: Ints, ends: Ints) -> Ints:
        return inside(starts, ends) - covered_lengths(busy, starts, ends)

    times = chain.from_iterable(call_tree.total_and_own(starts, ends, parent, inside, without_gpu))
    frame = pl.DataFrame({"begun": begun, **dict(zip(_TIMES, times, strict=True))})
    return frame.with_columns(pl.Series("stack", found.of_call, dtype=pl.Int64)), found


def _recorded_parents(spans: pl.DataFrame, starts: Ints, ends: Ints) -> Ints | None:
    """Row of each call's caller by `Python parent id`; None where the ids cannot be right."""
    ids = spans["python_id"]
    if ids.null_count() or ids.n_unique() < len(ids):
        return None
    rows = pl.DataFrame({"parent_id": ids, "row": np.arange(len(ids))})
    known = spans.select("parent_id").join(rows, on="parent_id", how="left", maintain_order="left")
    parent: Ints = known["row"].fill_null(-1).to_numpy().astype(np.int64)
    inner = np.flatnonzero(parent >= 0)
    above, thread = parent[inner], call_tree.thread_numbers(spans)
    fits = (thread[above] == thread[inner]) & (starts[above] <= starts[inner])
    fits &= ends[inner] <= ends[above]  # several calls of one time may name each other
    return parent if fits.all() and call_tree.depths(parent) is not None else None


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


MODULE, ANNOTATION, FUNCTION = "module", "annotation", "function"
_MODULE = "nn.Module: "
_FORWARD = r"\.py\(\d+\): forward$"
_BACKWARD = "autograd::engine::evaluate_function"
# Ranges that hold whole steps, or a single collective.
_NO_PART = f"^(?:ProfilerStep|record_param_comms|(?:{GPU_BACKENDS}|{HOST_BACKENDS}):)"

SCHEMA = {
    "path": pl.String, "name": pl.String, "kind": pl.String, "depth": pl.Int64,
    "call_count": pl.Int64, "host_self_ns": pl.Int64, "host_ns": pl.Int64,
    "backward_host_ns": pl.Int64, "kernel_count": pl.Int64, "device_self_ns": pl.Int64,
    "device_ns": pl.Int64, "backward_device_self_ns": pl.Int64, "backward_device_ns": pl.Int64,
    "graph_kernel_count": pl.Int64, "graph_device_self_ns": pl.Int64,
}  # fmt: skip


def module_times(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Modules and annotated ranges by where they are called, with their time.

    A part is an nn.Module (recorded `with_stack`, of TorchScript `with_modules`), or a
    record_function range; where no module was recorded, also a Python function `forward` of the
    call stacks.

    Returns:
        One row per module or annotated range: `path`, `name`, `kind`, `depth`, `call_count`,
        `host_self_ns`, `host_ns`, `backward_host_ns`, `kernel_count`, `device_self_ns`,
        `device_ns`, `backward_device_self_ns`, `backward_device_ns`, `graph_kernel_count`,
        `graph_device_self_ns` (of CUDA graphs). The row with `path` null is of GPU events outside
        of all.

    Source: autograd joins an operator with its node by a sequence number: the node's forward
    operator is the last one begun before with that number (torch.autograd.profiler).
    """
    tree = part_tree(trace)
    paths = _paths(tree)
    launched = _launched_work(trace, tree, steps)
    window = step_window(trace, steps) if steps else None
    # Autograd nodes on the host, in the part of their forward.
    begun = pl.lit(True) if window is None else pl.col("ts_ns").is_between(*window, closed="left")
    is_node = pl.col("name").cast(pl.String).str.starts_with(_BACKWARD)
    nodes = trace.ops.filter(is_node & begun)
    part = _forward_part(trace, tree, nodes, np.arange(len(nodes)))
    nodes = nodes.select("dur_ns", row=pl.Series(part))
    calls = tree.spans.select(
        "ts_ns", "dur_ns", "name", "kind", paths,
        own=pl.Series(call_tree.own_ns(tree), dtype=pl.Int64), depth=pl.Series(tree.depth),
    )  # fmt: skip
    found = calls.group_by("path").agg(
        pl.col("name", "kind", "depth").first(),
        first_ns=pl.col("ts_ns").min(),
        call_count=begun.sum() if window else pl.len(),
        host_self_ns=pl.col("own").filter(begun).sum(),
        host_ns=pl.col("dur_ns").filter(begun).sum(),
    )
    ns, back, in_graph = pl.col("dur_ns"), pl.col("is_backward"), pl.col("of_graph")
    ahead_ns, back_ns = ns.filter(~back).sum(), ns.filter(back).sum()
    for sums in (
        _by_path(
            tree, paths, launched, with_outer=False, kernel_count=pl.len(),
            device_self_ns=ahead_ns, backward_device_self_ns=back_ns,
            graph_kernel_count=in_graph.sum(), graph_device_self_ns=ns.filter(in_graph).sum(),
        ),
        _by_path(tree, paths, launched, device_ns=ahead_ns, backward_device_ns=back_ns),
        _by_path(tree, paths, nodes, backward_host_ns=ns.sum()),
    ):  # fmt: skip
        found = found.join(sums, on="path", how="full", coalesce=True, nulls_equal=True)
    numbers = [name for name, dtype in SCHEMA.items() if dtype == pl.Int64 and name != "depth"]
    found = found.with_columns(pl.col(numbers).fill_null(0))
    order = pl.col("first_ns").fill_null(np.iinfo(np.int64).max)
    shown = found.filter(pl.col("call_count") + pl.col("kernel_count") > 0).sort(
        order, "depth", "path", nulls_last=True
    )
    return shown.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def part_tree(trace: Trace) -> call_tree.CallTree:
    """Modules and annotated ranges with their nesting."""
    # Calls of modules and ranges on the host: `name`, `kind`, `pid`, `tid`, `ts_ns`, `dur_ns`.
    name = pl.col("name").cast(pl.String)
    columns = ("pid", "tid", "ts_ns", "dur_ns")
    python = trace.python.select(name, *columns)
    modules = python.filter(name.str.starts_with(_MODULE)).with_columns(
        name.str.strip_prefix(_MODULE), kind=pl.lit(MODULE)
    )
    if modules.is_empty():
        modules = python.filter(name.str.contains(_FORWARD)).with_columns(kind=pl.lit(FUNCTION))
    ranges = trace.host_ranges
    named = ranges.select(name, *columns).filter(~name.str.contains(_NO_PART))
    tree = call_tree.nest(pl.concat([named.with_columns(kind=pl.lit(ANNOTATION)), modules]))
    if tree.spans.is_empty():
        raise MissingDataError(
            f"{trace.path}: no module, annotated range or call stack in it",
            hint="profile with with_stack=True (with_modules=True names modules of TorchScript "
            "alone), or put record_function around parts of the model",
        )
    return tree


def _paths(tree: call_tree.CallTree) -> pl.Series:
    """The names around each span and its own, from the outermost."""
    own = tree.spans["name"]
    paths = own.clone()
    for depth in range(1, int(tree.depth.max(initial=0)) + 1):
        rows = np.flatnonzero(tree.depth == depth)
        joined = paths.gather(tree.parent[rows]) + "/" + own.gather(rows)
        paths = paths.scatter(rows, joined)
    return paths.alias("path")


def _launched_work(trace: Trace, tree: call_tree.CallTree, steps: Steps) -> pl.DataFrame:
    """GPU events: `dur_ns`, `row` of the part that launched them, `is_backward`, `of_graph`."""
    owned = with_operator(trace, steps, captures=True)
    is_node = owned.tree.spans["name"].cast(pl.String).str.starts_with(_BACKWARD)
    node = owned.tree.climb(owned.row, is_node.to_numpy())  # the autograd node at or around each
    row = rows_around(tree, owned.made_by)
    inside = node >= 0
    row[inside] = _forward_part(trace, tree, owned.tree.spans, node[inside])
    return owned.gpu.select(
        "dur_ns", row=pl.Series(row), is_backward=pl.Series(inside),
        of_graph=of_graph() & ~owned.captured,
    )  # fmt: skip


def _forward_part(trace: Trace, tree: call_tree.CallTree, spans: pl.DataFrame, rows: Ints) -> Ints:
    """The part in which the forward operator of each autograd node ran; -1 where not known."""
    found = np.full(len(rows), -1, dtype=np.int64)
    nodes = spans.select("sequence_number", "ts_ns")[rows].with_row_index("at")
    nodes = nodes.drop_nulls("sequence_number").sort("ts_ns")
    name = pl.col("name").cast(pl.String)
    forward = trace.ops.drop_nulls("sequence_number").filter(
        pl.col("forward_tid").fill_null(0) == 0, ~name.str.starts_with(_BACKWARD)
    )
    columns = ("sequence_number", "pid", "tid", "ts_ns", "dur_ns")
    joined = nodes.join_asof(
        forward.select(*columns, begun_ns="ts_ns").sort("ts_ns"), on="ts_ns",
        by="sequence_number", check_sortedness=False,
    ).drop_nulls("begun_ns")  # fmt: skip
    calls = joined.select("pid", "tid", "dur_ns", ts_ns="begun_ns")
    found[joined["at"].to_numpy()] = call_tree.innermost(tree, calls)
    return found


def _by_path(
    tree: call_tree.CallTree, paths: pl.Series, rows: pl.DataFrame, *, with_outer: bool = True,
    **sums: pl.Expr,
) -> pl.DataFrame:  # fmt: skip
    """Sums by path; with those of the parts around as well, or of the innermost part alone."""
    own = rows["row"].to_numpy()
    levels = [rows.with_columns(call_tree.take(paths, own))]
    for place, row in tree.outwards(np.append(tree.parent, -1)[own]) if with_outer else ():
        levels.append(rows[place].with_columns(paths.gather(row)))
    return pl.concat(levels).group_by("path").agg(**sums)


_ENGINE = "^(torch::)?autograd::"
LINES_SCHEMA = {
    "file": pl.String, "line": pl.Int64, "function": pl.String, "step_count": pl.Int64,
    "operator_count": pl.Int64, "operator_ns": pl.Float64, "node_count": pl.Int64,
    "backward_ns": pl.Float64, "event_count": pl.Int64, "rest_ns": pl.Float64,
}  # fmt: skip

_STALLED = 20  # an operator so many times the median of its line's waited for a core


def operator_lines(trace: Trace) -> pl.DataFrame:
    """Lines of the job's code by the operators that they called in forward; a question for a pool.

    Needs a window with lines (`haiprof --explain`). A node of autograd's graph has the sequence
    number of its forward operator, and the window noted the number at which each line began. A
    node's time is that of its operators and of the engine around them; what is more than usual
    around them is a hook or a function in Python, which has lines of its own.

    Returns:
        One row per line, in all steps of the window together: `file`, `line`, `function`,
        `step_count`, `operator_count`, `operator_ns` (the mean of the outermost ones, stalls cut),
        `node_count`, `backward_ns`, `event_count` (recorded in backward), `rest_ns` (the engine's
        usual time per node). Of nodes whose forward is not known (the sums of gradients) `file` is
        null.
    """
    own = trace.metadata.get("haiprof")
    noted = own.get("lines") if isinstance(own, dict) else None
    if not isinstance(noted, dict) or trace.steps.is_empty():
        raise MissingDataError(
            f"{trace.path}: no lines of operators in it", hint="record with haiprof --explain"
        )
    try:
        places = pl.DataFrame(
            noted["places"], schema=dict(list(LINES_SCHEMA.items())[:3]), orient="row"
        )
        begins = np.array(noted["at"], dtype=np.int64).reshape(-1, 2)
        if begins.size and not 0 <= begins[:, 1].min() <= begins[:, 1].max() < places.height:
            raise ValueError("a place that is not there")
    except (KeyError, TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        raise MissingDataError(f"{trace.path}: its lines of operators are damaged") from error
    tree = call_tree.nest(trace.ops)
    name = tree.spans["name"].cast(pl.String)
    is_node = name.str.starts_with(_BACKWARD).to_numpy()
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
    most_ns = _STALLED * pl.col("operator_ns").median().over("place")
    forward = forward.with_columns(pl.min_horizontal("operator_ns", most_ns))
    backward = pl.DataFrame({
        "place": of_node, "backward_ns": operators + np.minimum(rest, usual), "event_count": events,
    })  # fmt: skip
    found = (
        forward.group_by("place")
        .agg(operator_count=pl.len(), operator_ns=pl.col("operator_ns").mean())
        .join(
            backward.group_by("place").agg(
                pl.col("backward_ns", "event_count").sum(), node_count=pl.len()
            ),
            on="place", how="full", coalesce=True,
        )
        .join(places.with_row_index("place").cast({"place": pl.Int64}), on="place", how="left")
        .with_columns(step_count=pl.lit(trace.steps.height), rest_ns=pl.lit(usual))
    )  # fmt: skip
    numbers = pl.col(list(LINES_SCHEMA)[4:9]).fill_null(0)
    ordered = found.with_columns(numbers).sort("backward_ns", "place", descending=[True, False])
    return ordered.select(pl.col(column).cast(dtype) for column, dtype in LINES_SCHEMA.items())
