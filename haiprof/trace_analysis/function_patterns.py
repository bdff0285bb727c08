"""The pattern of one rank: each function's bottleneck ratio, cost, and the resource it used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import (
    Intervals,
    Ints,
    covered_lengths,
    difference,
    intersection,
    total,
    union,
)
from haiprof.trace_analysis.call_tree import (
    CallTree,
    nest,
    python_calls,
    stack_texts,
    stacks,
    total_and_own,
)
from haiprof.trace_analysis.collectives import clock_base_ns, collective_kernels
from haiprof.trace_analysis.device_time import (
    COMPUTATION,
    MEMORY_CATEGORIES,
    Steps,
    device_properties,
    gpu_events,
    known_occupancy,
    step_window,
    union_of,
    weighted_mean,
    with_kind,
)
from haiprof.trace_analysis.files import host_name
from haiprof.trace_analysis.kernel_names import (
    COMMUNICATION,
    GPU_COMPUTE,
    MEMORY,
    PRIORITY,
    PYTHON,
    RUNTIME,
    block_counts,
    transfer_type,
    with_geometry,
)
from haiprof.trace_format.frame_columns import Columns, types_of
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import Trace


class PatternWindow(NamedTuple):
    """The window of function patterns, in ns on the trace's clock."""

    start: int
    end: int


def pattern_window(trace: Trace, steps: Steps) -> PatternWindow:
    """The profiler steps that were asked for, or everything from the first to the last event."""
    if steps is not None:
        return PatternWindow(*step_window(trace, steps))
    tables = (trace.gpu, trace.runtime, trace.ops, trace.python, trace.annotations)
    ends = [(table["ts_ns"] + table["dur_ns"]).to_numpy().max() for table in tables if len(table)]
    if not ends:
        raise MissingDataError(f"{trace.path}: no event with a time in it")
    return PatternWindow(min(int(table["ts_ns"].to_numpy()[0]) for table in tables if len(table)),
                  int(max(ends)))  # fmt: skip


def function_times(events: pl.DataFrame, free: Intervals, count: int) -> tuple[Ints, Ints]:
    """How long each function, a `code` from 0, ran, and how long with no kind above it."""
    length, own = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    if events.is_empty():
        return length, own
    starts = events["ts_ns"].to_numpy()
    ends, base = starts + events["dur_ns"].to_numpy(), int(starts.min())
    stride = int(ends.max()) - base + 1  # a lane of its own for each function
    lane = events["code"].to_numpy() * stride - base
    merged = union(starts + lane, ends + lane)
    code = merged.starts // stride
    starts, ends = merged.starts - code * stride + base, merged.ends - code * stride + base
    np.add.at(length, code, ends - starts)
    np.add.at(own, code, covered_lengths(free, starts, ends))
    return length, own


_COLUMNS = ("name", "ts_ns", "dur_ns", "pid", "tid")

_OF_STACKS = ("name", "count", "total_ns", "median_ns", "covered_ns", "bottleneck_ns")


def host_calls(trace: Trace) -> CallTree | None:
    """Calls of Python functions and operators, nested by their times; None where there are none.

    A thread without an operator or a call of the runtime only waits: it is left out beside others.
    """
    python = python_calls(trace).select(_COLUMNS)
    operators = trace.ops.select(_COLUMNS).with_columns(pl.col("name").cast(python["name"].dtype))
    parts = [python, operators]
    spans = pl.concat(part for part in parts if len(part)) if any(map(len, parts)) else parts[0]
    spans = spans.filter(~has_name(spans, "^ProfilerStep#"))
    works = pl.concat([trace.ops.select("pid", "tid"), trace.runtime.select("pid", "tid")]).unique()
    working = spans.join(works, on=["pid", "tid"], how="semi", maintain_order="left")
    spans = spans if working.is_empty() else working
    if spans.is_empty():
        return None
    return nest(spans)


def stack_times(
    tree: CallTree, window: PatternWindow, free: Intervals, *, least_ns: int
) -> pl.DataFrame:
    """Own time of each call stack, of all threads together."""
    starts = np.clip(tree.starts, window.start, window.end)
    ends = np.clip(tree.starts + tree.spans["dur_ns"].to_numpy(), window.start, window.end)
    (_, own), (_, lone) = total_and_own(
        starts, ends, tree.parent,
        lambda begin, end: end - begin, lambda begin, end: covered_lengths(free, begin, end),
    )  # fmt: skip
    found = stacks(tree.spans, tree.parent)
    assert found is not None, "what encloses a span comes before it"
    late = tree.starts + tree.spans["dur_ns"].to_numpy() > window.start
    rows = pl.DataFrame(
        {"stack": found.of_call, "dur": ends - starts, "own": own, "lone": lone}
    ).filter(pl.Series(late & (tree.starts < window.end)))
    summed = rows.group_by("stack").agg(
        count=pl.len().cast(pl.Int64),
        total_ns=pl.col("dur").sum(),
        durations="dur",
        covered_ns=pl.col("own").sum(),
        bottleneck_ns=pl.col("lone").sum(),
    )
    # By text: the same stack on two threads is one.
    kept = summed.filter(pl.col("covered_ns") > 0).sort("stack")
    names = found.names.str.replace_all("|", "/", literal=True)
    texts = stack_texts(found._replace(names=names))
    named = kept.with_columns(
        texts.gather(kept["stack"].cast(pl.UInt32)).str.replace_all(";", "|").alias("name")
    )
    return (
        named.group_by("name")
        .agg(
            pl.col("count", "total_ns", "covered_ns", "bottleneck_ns").sum(),
            median_ns=pl.col("durations").explode().median(),
        )
        .filter(pl.col("covered_ns") >= least_ns)
        .select(pl.col(name).cast(FUNCTIONS_SCHEMA[name]) for name in _OF_STACKS)
    )


KEPT_RATIO = 0.0005
"""Call stacks below this share of the window are left out of a rank's pattern: EROICA's is some
30 KB per worker, and a trace has tens of thousands of stacks. Own choice."""

FUNCTION_COLUMNS: Columns = {
    "kind": (pl.String, "gpu-compute, communication, memory, runtime or python"),
    "type": (pl.String, "of a communication, such as ring all_reduce"),
    "name": (pl.String, "of the kernel, copy or call; of Python root|...|leaf"),
    "count": (pl.Int64, "of calls that reach into the window"),
    "total_ns": (pl.Int64, "of those calls"),
    "median_ns": (pl.Float64, "of those calls"),
    "covered_ns": (pl.Int64, "in which it ran; of a call stack its own"),
    "bottleneck_ns": (pl.Int64, "in which it ran and nothing of a kind above it did"),
    "share_ratio": (pl.Float64, "covered_ns of the window"),
    "bottleneck_ratio": (pl.Float64, "bottleneck_ns of the window"),
    "occupancy_ratio": (pl.Float64, "estimated occupancy, a mean over its time"),
    "occupancy_std": (pl.Float64, "its deviation"),
    "bandwidth_bytes_per_s": (pl.Float64, "of a copy; of a communication the bus bandwidth"),
    "bandwidth_std_bytes_per_s": (pl.Float64, "its deviation"),
    "median_block_count": (
        pl.Float64, "blocks of a kernel's launches; null where grids are missing",
    ),
}  # fmt: skip
FUNCTIONS_SCHEMA = types_of(FUNCTION_COLUMNS)
_RAN = {
    GPU_COMPUTE: "a computing kernel", COMMUNICATION: "communication", MEMORY: "a copy or set",
    RUNTIME: "a call of the CUDA runtime", PYTHON: "a Python function or operator",
}  # fmt: skip
TOTAL_COLUMNS: Columns = {
    "window_ns": (pl.Int64, "what was judged"),
    **{
        f"{kind.replace('-', '_')}_ratio":
            (pl.Float64, f"of the window in which {_RAN[kind]} ran and nothing above it did")
        for kind in PRIORITY
    },
    "utilization_ratio": (pl.Float64, "of the window in which a computing kernel ran"),
    "sm_efficiency_ratio": (pl.Float64, "estimated, from blocks per SM"),
    "occupancy_ratio": (pl.Float64, "estimated, over the time of kernels"),
    "overlap_ratio": (pl.Float64, "of communication that computing hides"),
    "gpu_name": (pl.String, "of the first GPU"),
    "host": (pl.String, "node; only haiprof records it"),
    "has_gpu": (pl.Boolean, "GPU events were recorded"),
    "has_python": (pl.Boolean, "Python stacks were recorded"),
}  # fmt: skip
TOTALS_SCHEMA = types_of(TOTAL_COLUMNS)
_KEYS = ("type", "name")
_RATE, _FILL, _BLOCKS = "bandwidth_bytes_per_s", "occupancy_ratio", "blocks"
NO_GPU = "no GPU event was recorded: nobody knows what ran beside the host's functions"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFunctions:
    """What the functions of one rank did, and its collectives."""

    functions: pl.DataFrame
    """Columns of `FUNCTIONS_SCHEMA`."""
    totals: pl.DataFrame
    """One row: columns of `TOTALS_SCHEMA`."""
    collectives: pl.DataFrame
    """Columns of `collectives.KERNELS_SCHEMA`; only those that began in the window."""


def worker_pattern(trace: Trace, *, steps: Steps = None, geometry: bool = False) -> RankFunctions:
    """Computes what bounds one rank; a question for a pool.

    Source: EROICA (arXiv 2506.08528): beta, mu and sigma of a function and worker.
    """
    window = pattern_window(trace, steps)
    parts, communication = function_events(trace, window, geometry=geometry)
    unknown = trace.gpu.is_empty() and has_gpu(trace)
    tables: list[pl.DataFrame] = []
    ratios: dict[str, int | None] = {}
    free = union(np.array([window.start]), np.array([window.end]))  # of kinds above
    for kind in PRIORITY[:-1]:
        table, active = _kind(parts[kind], window, free)
        tables.append(table.with_columns(kind=pl.lit(kind)))
        ratios[kind] = total(intersection(active, free))
        free = difference(free, active)
    stacks, host_ns = _host(trace, window, free)
    tables.append(stacks)
    ratios[PYTHON] = host_ns
    functions = _complete(pl.concat(tables, how="diagonal"), window, unknown=unknown)
    return RankFunctions(
        functions=functions,
        totals=_totals(trace, parts, window, ratios, unknown=unknown),
        collectives=communication,
    )


def has_gpu(trace: Trace) -> bool:
    """Whether the traced process had a GPU: it called the runtime, or the profiler saw devices."""
    return bool(len(trace.gpu) or len(trace.runtime) or trace.metadata.get("deviceProperties"))


def function_events(
    trace: Trace, window: PatternWindow, *, geometry: bool = False
) -> tuple[dict[str, pl.DataFrame], pl.DataFrame]:
    """The calls of each function by kind but Python, and the collectives that began in a window."""
    base = clock_base_ns(trace)
    began = pl.col("start_ns").is_between(window.start + base, window.end + base, closed="left")
    communication = collective_kernels(trace).filter(began)
    gpu = with_kind(gpu_events(trace, None))
    gpu = with_geometry(gpu) if geometry else gpu
    own = pl.when(pl.col("dur_ns") > 0).then(pl.col("bytes") / pl.col("dur_ns") * 1e9)
    rated = gpu.with_columns(
        pl.coalesce(_RATE, own).alias(_RATE), known_occupancy().alias(_FILL), type=pl.lit("")
    )
    is_copy = pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES)
    columns = ("type", "name", "ts_ns", "dur_ns", _RATE, _FILL, "blocks_per_sm")
    computing = rated.filter(pl.col("kind") == COMPUTATION)
    parts = {
        GPU_COMPUTE: computing.select(*columns, block_counts(computing).alias(_BLOCKS)),
        MEMORY: rated.filter(is_copy).select(columns),
        COMMUNICATION: with_transfer_type(communication).select(
            *_KEYS, ts_ns=pl.col("start_ns") - base, dur_ns=pl.col("end_ns") - pl.col("start_ns")
        ),
        RUNTIME: trace.runtime.select("name", "ts_ns", "dur_ns", type=pl.lit("")),
    }
    return parts, communication


def with_transfer_type(communication: pl.DataFrame) -> pl.DataFrame:
    """Collectives with their `type`: what they are and the kernel that does them."""
    pairs = communication.select("kind", "name").unique()
    types = pl.Series("type", [transfer_type(*row) for row in pairs.rows()], dtype=pl.String)
    return communication.join(pairs.with_columns(types), on=["kind", "name"], how="left")


def _kind(
    events: pl.DataFrame, window: PatternWindow, free: Intervals
) -> tuple[pl.DataFrame, Intervals]:
    """The functions of one kind, and when it ran; `free` is when no kind above did."""
    code = events.select(pl.struct(_KEYS).rank("dense") - 1).to_series().cast(pl.Int64).to_numpy()
    # Count, cost and resource of each function whose calls reach into the window.
    end = pl.col("ts_ns") + pl.col("dur_ns")
    coded = events.with_columns(pl.Series("code", code))
    rows = coded.filter((pl.col("ts_ns") < window.end) & (end > window.start))
    cut = _cut(coded, window)
    more, weight = [], pl.col("dur_ns")
    for column, deviation in ((_FILL, "occupancy_std"), (_RATE, "bandwidth_std_bytes_per_s")):
        if column in rows.columns:  # known of every call that takes time
            value = pl.col(column)
            known = (weight.sum() > 0) & ((weight == 0) | value.is_not_null()).all()
            mean, spread = (pl.when(known).then(each) for each in weighted_mean(value, weight))
            more += [mean.alias(column), spread.alias(deviation)]
    if _BLOCKS in rows.columns:
        more.append(pl.col(_BLOCKS).median().alias("median_block_count"))
    table = rows.group_by("code").agg(
        pl.col("type").first().cast(pl.String),
        pl.col("name").first().cast(pl.String),
        pl.len().cast(pl.Int64).alias("count"),
        pl.col("dur_ns").sum().alias("total_ns"),
        pl.col("dur_ns").median().alias("median_ns"),
        *more,
    )
    length, own = function_times(cut, free, int(code.max(initial=-1)) + 1)
    at = table["code"].to_numpy()
    timed = table.with_columns(
        pl.Series("covered_ns", length[at], dtype=pl.Int64),
        pl.Series("bottleneck_ns", own[at], dtype=pl.Int64),
    )
    return timed.drop("code"), union_of(cut)


def _host(trace: Trace, window: PatternWindow, free: Intervals) -> tuple[pl.DataFrame, int | None]:
    """Call stacks, and how long the host alone was in any of them."""
    calls = host_calls(trace)
    empty = pl.DataFrame(schema={"kind": pl.String, "name": pl.String})
    if calls is None:
        return empty, None
    least = int(KEPT_RATIO * (window.end - window.start))
    found = stack_times(calls, window, free, least_ns=least)
    top = np.flatnonzero(calls.parent < 0)
    active = union_of(_cut(calls.spans[top.tolist()], window))
    return found.with_columns(kind=pl.lit(PYTHON), type=pl.lit("")), total(
        intersection(active, free)
    )


def _complete(found: pl.DataFrame, window: PatternWindow, *, unknown: bool) -> pl.DataFrame:
    whole = window.end - window.start
    host = pl.col("kind").is_in([RUNTIME, PYTHON])
    own = pl.when(~(host & unknown)).then("bottleneck_ns")
    known = found.with_columns(
        bottleneck_ns=own,
        **{name: pl.lit(None) for name in FUNCTIONS_SCHEMA if name not in
           found.columns},
    )  # fmt: skip
    place = pl.col("kind").replace_strict(PRIORITY, range(len(PRIORITY)))
    return (
        with_ratios(known, whole)
        .select(pl.col(name).cast(kind) for name, kind in FUNCTIONS_SCHEMA.items())
        .sort(place, -pl.col("bottleneck_ns"), -pl.col("covered_ns"), *_KEYS, nulls_last=True)
    )


def with_ratios(functions: pl.DataFrame, window_ns: int) -> pl.DataFrame:
    """With what functions take of their window."""
    # polars divides a chunk of one row otherwise than a longer one, by a last bit.
    return functions.rechunk().with_columns(
        share_ratio=pl.col("covered_ns") / window_ns,
        bottleneck_ratio=pl.col("bottleneck_ns") / window_ns,
    )


def _totals(
    trace: Trace, parts: dict[str, pl.DataFrame], window: PatternWindow,
    own_ns: dict[str, int | None], *, unknown: bool,
) -> pl.DataFrame:  # fmt: skip
    """The rank's row: what each kind takes alone, and how its GPU was used."""
    whole = window.end - window.start
    has_events = len(trace.gpu) > 0
    known = {
        GPU_COMPUTE: has_events, COMMUNICATION: has_events, MEMORY: has_events,
        RUNTIME: not unknown and len(trace.runtime) > 0, PYTHON: not unknown,
    }  # fmt: skip
    ratios = {
        f"{kind.replace('-', '_')}_ratio": None if ns is None or not known[kind] else ns / whole
        for kind, ns in own_ns.items()
    }
    compute = _cut(parts[GPU_COMPUTE], window)
    runs = union_of(compute)
    # Share of communication hidden by computation; None without communication.
    active = union_of(_cut(parts[COMMUNICATION], window))
    length = total(active)
    hidden = total(intersection(active, runs)) / length if length else None
    # TensorBoard's estimates: SM efficiency over the window, occupancy over kernel time. Source:
    # kineto tb_plugin, docs/gputil.md: SM efficiency is min(blocks per SM, 1), weighted with the
    # kernel's time over all time; achieved occupancy is weighted with the kernels' time.
    weight = pl.col("dur_ns")
    blocks, fill = pl.col("blocks_per_sm"), pl.col(_FILL)
    found = compute.select(
        sm_efficiency_ratio=pl.when(blocks.is_not_null().all() & (pl.len() > 0)).then(
            (blocks.clip(0, 1) * weight).sum() / whole
        ),
        occupancy_ratio=pl.when(fill.is_not_null().all() & (pl.len() > 0)).then(
            (fill * weight).sum() / weight.sum()
        ),
    )
    name = device_properties(trace).get("name")
    row = {
        "window_ns": whole,
        **ratios,
        "utilization_ratio": total(runs) / whole if has_events else None,
        **found.row(0, named=True),
        "overlap_ratio": hidden,
        "gpu_name": name if isinstance(name, str) else None,
        "host": host_name(trace),
        "has_gpu": has_events,
        "has_python": len(trace.python) > 0,
    }
    return pl.DataFrame([row], schema=TOTALS_SCHEMA)


def _cut(events: pl.DataFrame, window: PatternWindow) -> pl.DataFrame:
    """The parts of events that lie in the window."""
    start = pl.col("ts_ns").clip(window.start, window.end)
    end = (pl.col("ts_ns") + pl.col("dur_ns")).clip(window.start, window.end)
    return events.with_columns(ts_ns=start, dur_ns=end - start).filter(pl.col("dur_ns") > 0)
