"""What bounds each rank, function by function; of all ranks, cached or in small files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import (
    Floats,
    Intervals,
    Ints,
    covered_lengths,
    difference,
    intersection,
    total,
    union,
)
from haiprof.base.units import ratio_text
from haiprof.run_format.unpack import read_text
from haiprof.trace_analysis import call_tree, report_cache
from haiprof.trace_analysis.arrivals import (
    WAITS,
    arrival_lateness,
    arrivals,
    collectives,
    who_is_late,
)
from haiprof.trace_analysis.collectives import (
    KERNELS_SCHEMA,
    clock_base_ns,
    collective_kernels,
    match_collectives,
)
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
    with_rank,
)
from haiprof.trace_analysis.files import TraceFile, host_name, trace_file
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
from haiprof.trace_analysis.pool import Pool, Progress, default_pool
from haiprof.trace_format.find import FUNCTIONS_SUFFIX, by_rank, window_files
from haiprof.trace_format.frame_columns import Columns, Type, types_of
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
    times = pl.concat([table.select("ts_ns", "dur_ns") for table in tables])
    if times.is_empty():
        raise MissingDataError(f"{trace.path}: no event with a time in it")
    end = pl.col("ts_ns") + pl.col("dur_ns")
    return PatternWindow(*times.select(pl.col("ts_ns").min(), end.max().alias("end")).row(0))


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


def stack_times(
    tree: call_tree.CallTree, window: PatternWindow, free: Intervals, *, least_ns: int
) -> pl.DataFrame:
    """Own time of each call stack, of all threads together."""
    starts = np.clip(tree.starts, window.start, window.end)
    ends = np.clip(tree.starts + tree.spans["dur_ns"].to_numpy(), window.start, window.end)
    (_, own), (_, lone) = call_tree.total_and_own(
        starts, ends, tree.parent,
        lambda begin, end: end - begin, lambda begin, end: covered_lengths(free, begin, end),
    )  # fmt: skip
    found = call_tree.stacks(tree.spans, tree.parent)
    late = tree.starts + tree.spans["dur_ns"].to_numpy() > window.start
    rows = pl.DataFrame(
        {"stack": found.of_call, "dur": ends - starts, "own": own, "lone": lone}
    ).filter(pl.Series(late & (tree.starts < window.end)))
    summed = rows.group_by("stack").agg(
        count=pl.len().cast(pl.Int64), total_ns=pl.col("dur").sum(), durations="dur",
        covered_ns=pl.col("own").sum(), bottleneck_ns=pl.col("lone").sum(),
    )  # fmt: skip
    # By text: the same stack on two threads is one.
    kept = summed.filter(pl.col("covered_ns") > 0).sort("stack")
    names = found.names.str.replace_all("|", "/", literal=True)
    texts = call_tree.stack_texts(found._replace(names=names)).gather(kept["stack"].cast(pl.UInt32))
    table = kept.group_by(texts.str.replace_all(";", "|").alias("name")).agg(
        pl.col("count", "total_ns", "covered_ns", "bottleneck_ns").sum(),
        median_ns=pl.col("durations").explode().median(),
    )
    kinds = [pl.col(name).cast(FUNCTIONS_SCHEMA[name]) for name in _OF_STACKS]
    return table.filter(pl.col("covered_ns") >= least_ns).select(kinds)


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


class RankFunctions(NamedTuple):
    """What the functions of one rank did, and its collectives."""

    functions: pl.DataFrame  # columns of `FUNCTIONS_SCHEMA`
    totals: pl.DataFrame  # one row: columns of `TOTALS_SCHEMA`
    collectives: pl.DataFrame
    """Columns of `collectives.KERNELS_SCHEMA`; only those that began in the window."""


def worker_pattern(trace: Trace, *, steps: Steps = None, geometry: bool = False) -> RankFunctions:
    """Computes what bounds one rank; a question for a pool.

    Source: EROICA (arXiv 2506.08528): beta, mu and sigma of a function and worker.
    """
    window = pattern_window(trace, steps)
    whole = window.end - window.start
    parts, communication = function_events(trace, window, geometry=geometry)
    unknown = trace.gpu.is_empty() and has_gpu(trace)
    tables = [pl.DataFrame(schema=FUNCTIONS_SCHEMA)]
    ratios: dict[str, int | None] = dict.fromkeys(PRIORITY)
    free = union(np.array([window.start]), np.array([window.end]))  # of kinds above
    for kind in PRIORITY[:-1]:
        table, active = _kind(parts[kind], window, free)
        tables.append(table.with_columns(kind=pl.lit(kind)))
        ratios[kind] = total(intersection(active, free))
        free = difference(free, active)
    # Call stacks, and how long the host alone was in any of them.
    python = call_tree.python_calls(trace).select(_COLUMNS)
    operators = trace.ops.select(_COLUMNS).with_columns(pl.col("name").cast(python["name"].dtype))
    spans = pl.concat([python, operators])
    spans = spans.filter(~has_name(spans, "^ProfilerStep#"))
    # A thread without an operator or a call of the runtime only waits: left out beside others.
    works = pl.concat([table.select("pid", "tid") for table in (trace.ops, trace.runtime)]).unique()
    working = spans.join(works, on=["pid", "tid"], how="semi", maintain_order="left")
    spans = spans if working.is_empty() else working
    if not spans.is_empty():
        calls = call_tree.nest(spans)
        found = stack_times(calls, window, free, least_ns=int(KEPT_RATIO * whole))
        tables.append(found.with_columns(kind=pl.lit(PYTHON), type=pl.lit("")))
        top = calls.spans.filter(pl.Series(calls.parent < 0))
        ratios[PYTHON] = total(intersection(union_of(_cut(top, window)), free))
    on_host = pl.col("kind").is_in([RUNTIME, PYTHON])
    known = pl.concat(tables, how="diagonal_relaxed").with_columns(
        pl.when(~(on_host & unknown)).then("bottleneck_ns")
    )
    place = pl.col("kind").replace_strict(PRIORITY, range(len(PRIORITY)))
    functions = with_ratios(known, whole).select(
        pl.col(name).cast(kind) for name, kind in FUNCTIONS_SCHEMA.items()
    ).sort(
        place, -pl.col("bottleneck_ns"), -pl.col("covered_ns"), "type", "name", nulls_last=True
    )  # fmt: skip
    return RankFunctions(
        functions, _totals(trace, parts, window, ratios, unknown=unknown), communication
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
    for column, deviation in ((_FILL, "occupancy_std"), (_RATE, _SPREAD)):
        if column in rows.columns:  # known of every call that takes time
            value = pl.col(column)
            known = (weight.sum() > 0) & ((weight == 0) | value.is_not_null()).all()
            mean, spread = (pl.when(known).then(each) for each in weighted_mean(value, weight))
            more += [mean.alias(column), spread.alias(deviation)]
    if _BLOCKS in rows.columns:
        more.append(pl.col(_BLOCKS).median().alias("median_block_count"))
    table = rows.group_by("code").agg(
        pl.col("type").first().cast(pl.String), pl.col("name").first().cast(pl.String),
        pl.len().cast(pl.Int64).alias("count"), pl.col("dur_ns").sum().alias("total_ns"),
        pl.col("dur_ns").median().alias("median_ns"), *more,
    )  # fmt: skip
    length, own = function_times(cut, free, int(code.max(initial=-1)) + 1)
    at = table["code"].to_numpy()
    timed = table.with_columns(covered_ns=pl.Series(length[at]), bottleneck_ns=pl.Series(own[at]))
    return timed.drop("code"), union_of(cut)


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
        "window_ns": whole, **ratios,
        "utilization_ratio": total(runs) / whole if has_events else None,
        **found.row(0, named=True), "overlap_ratio": hidden,
        "gpu_name": name if isinstance(name, str) else None, "host": host_name(trace),
        "has_gpu": has_events, "has_python": len(trace.python) > 0,
    }  # fmt: skip
    return pl.DataFrame([row], schema=TOTALS_SCHEMA)


def _cut(events: pl.DataFrame, window: PatternWindow) -> pl.DataFrame:
    """The parts of events that lie in the window."""
    start = pl.col("ts_ns").clip(window.start, window.end)
    end = (pl.col("ts_ns") + pl.col("dur_ns")).clip(window.start, window.end)
    return events.with_columns(ts_ns=start, dur_ns=end - start).filter(pl.col("dur_ns") > 0)


_SPREAD = "bandwidth_std_bytes_per_s"
_RANK_KEYS = ["rank", "type", "name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """What every rank's functions did."""

    functions: pl.DataFrame
    """`rank`, `worker.FUNCTIONS_SCHEMA`, and of communication `wait_ns`, `transfer_ns` and
    `missing`, the reason why these and its bandwidth are null."""
    totals: pl.DataFrame  # One row per rank: columns of `WorkerPattern.totals`
    lateness: pl.DataFrame  # From `arrival_lateness`: who begins collectives later than the others
    who_is_late: str  # The same in words, or why it is not known
    moved_clocks: tuple[int, ...]
    """Ranks whose clock was corrected although the trace names no host: a link that is slow in
    every collective would look the same."""

    left_out: tuple[str, ...] = ()
    """What files of the ranks' functions have left out, in words; empty from traces."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a trace."""
        return tuple(self.totals["rank"].to_list())


def gather_patterns(workers: Mapping[int, RankFunctions]) -> Patterns:
    """Puts the patterns of all ranks together.

    The functions of all ranks. A communication function's `bandwidth_bytes_per_s` is its bus
    bandwidth as nccl-tests defines it, over the transfer alone: from the arrival of the last
    rank to the rank's own end. Where the same collective is not found on all ranks of its
    group the transfer is not known, and `missing` says why.

    Source: nccl-tests doc/PERFORMANCE.md; `haiprof.trace_analysis.arrivals` for the transfer.
    """
    kernels = match_collectives(with_rank((r, w.collectives) for r, w in workers.items()))
    totals = with_rank((r, w.totals) for r, w in workers.items())
    hosts = totals.select("rank", "host")
    waits, offsets = arrivals(kernels, hosts)
    lateness = arrival_lateness(waits, offsets)
    functions = with_rank((r, w.functions) for r, w in workers.items())
    moved = functions.join(_throughput(waits), on=_RANK_KEYS, how="left", maintain_order="left")
    talks = pl.col("kind") == COMMUNICATION
    alone = pl.lit("no other rank's trace has the same collective")
    lacks = talks & pl.col("own_rate").is_null()
    return Patterns(
        functions=moved.with_columns(
            pl.when(talks).then("own_rate").otherwise(_RATE).alias(_RATE),
            pl.when(talks).then("own_spread").otherwise(_SPREAD).alias(_SPREAD),
            missing=pl.when(lacks).then(pl.coalesce("missing", alone)),
        ).drop("own_rate", "own_spread"),
        totals=totals,
        moved_clocks=()
        if not hosts["host"].null_count()
        else tuple(offsets.filter("corrected")["rank"].to_list()),
        lateness=lateness,
        who_is_late=who_is_late(lateness, waits),
    )


def _throughput(waits: pl.DataFrame) -> pl.DataFrame:
    """Per rank and function: `wait_ns`, `transfer_ns`, bus bandwidth and its deviation."""
    bus, time, work = map(pl.col, ("bus_bandwidth_bytes_per_s", "transfer_ns", "work"))
    sized = collectives(waits).select("collective", work=bus * time)
    rows = with_transfer_type(waits.join(sized, on="collective", how="left"))
    timed = pl.when(work.is_not_null() & (time > 0))
    unsized = pl.when(work.is_null()).then(pl.lit("sizes were not recorded"))
    weighted = rows.with_columns(
        rate=timed.then(work / time),
        weight=timed.then(time),
        missing=pl.coalesce("missing", unsized),
    )
    mean, spread = weighted_mean(pl.col("rate"), pl.col("weight"))
    known = pl.col("weight").sum() > 0
    return weighted.group_by(_RANK_KEYS).agg(
        *(pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()) for name in WAITS),
        own_rate=pl.when(known).then(mean),
        own_spread=pl.when(known).then(spread),
        missing=pl.col("missing").drop_nulls().first(),
    )


def cached_patterns(
    paths: Sequence[Path], options: Mapping[str, Any],
    compute: Callable[[Sequence[Path]], Sequence[RankFunctions]],
) -> list[RankFunctions]:  # fmt: skip
    """The pattern of each trace, computed where it is not cached."""
    found = report_cache.cached_answers(paths, "patterns", options, RankFunctions._fields,
                           lambda left: [each._asdict() for each in compute(left)])  # fmt: skip
    return [RankFunctions(**each) for each in found]  # type: ignore[arg-type] # all are frames


MAJORITY_RATIO = 0.5
"""A sample is a function's where it ran for at least this part of what the sample is of: below it
the sample says more about something else. Own choice."""

_SERIES = ("source", "entity")
COUNTERS_SCHEMA: dict[str, type[pl.DataType]] = {
    "kind": pl.String, "type": pl.String, "name": pl.String, "source": pl.String,
    "entity": pl.String, "metric": pl.String, "unit": pl.String, "mean": pl.Float64,
    "std": pl.Float64, "min": pl.Float64, "max": pl.Float64, "sample_count": pl.Int64,
    "interval_ns": pl.Int64,
}  # fmt: skip


def function_counters(
    trace: Trace, samples: pl.DataFrame, *, steps: Steps = None, geometry: bool = False
) -> pl.DataFrame:
    """What the counters of a rank's GPU and host were while its functions ran.

    Source: PerfTracker (seed 001), which joins samples of 100 us to functions.
    """
    window = pattern_window(trace, steps)
    base = clock_base_ns(trace)
    inside = pl.col("time_ns").is_between(window.start + base, window.end + base)
    known = samples.filter(inside).drop_nulls("value").with_columns(pl.col("time_ns") - base)
    rows: list[pl.DataFrame] = [pl.DataFrame(schema=COUNTERS_SCHEMA)]
    if not known.is_empty():
        events, _ = function_events(trace, window, geometry=geometry)
        for kind, frame in events.items():
            rows += _of_kind(kind, frame, known)
    return pl.concat(rows)


def _of_kind(kind: str, events: pl.DataFrame, samples: pl.DataFrame) -> Iterator[pl.DataFrame]:
    functions: list[tuple[str | None, str | None, Intervals]] = [(None, None, union_of(events))]
    texts = events.with_columns(pl.col("type", "name").cast(pl.String))
    for (type_, name), own in texts.group_by("type", "name", maintain_order=True):
        functions.append((str(type_), str(name), union_of(own)))
    value, weight = pl.col("value"), pl.col("weight")
    mean, spread = weighted_mean(value, weight)
    for series in samples.partition_by(_SERIES):
        times = np.unique(series["time_ns"].to_numpy())
        intervals = np.diff(times)
        for type_, name, spans in functions:
            ran = covered_lengths(spans, times[:-1], times[1:])
            weights: Floats = np.where(ran >= MAJORITY_RATIO * intervals, ran, 0).astype(np.float64)
            if not weights.any():
                continue
            known = pl.DataFrame({"time_ns": times[1:], "weight": weights})
            rows = series.join(known.filter(weight > 0), on="time_ns")
            found = rows.group_by(*_SERIES, "metric", "unit", maintain_order=True).agg(
                mean=mean, std=spread, min=value.min(), max=value.max(),
                sample_count=pl.len().cast(pl.Int64),
                interval_ns=pl.lit(int(np.median(intervals)), pl.Int64),
            )  # fmt: skip
            yield found.select(
                pl.lit(kind).alias("kind"), pl.lit(type_, pl.String).alias("type"),
                pl.lit(name, pl.String).alias("name"), *list(COUNTERS_SCHEMA)[3:],
            )  # fmt: skip


VERSION = 2
"""2: functions have `median_block_count`.
1: gzip of a line of JSON (`haiprof_functions`, the version; `steps`; `geometry`; `left_out`,
what is not in the file, in words), then four answers as `report_cache` packs them, their frames as
plain Arrow: `file`; `functions`, without the two ratios that follow from it; `totals`;
`collectives`, whose `event` and `start_ns` are differences to the row above, and `end_ns` to
`start_ns`."""
SIZE_LIMIT_BYTES = 30_000  # Source: EROICA (arXiv 2506.08528), some 30 KB per worker of 3 GB
_TEXT_LIMIT_BYTES = 64 << 20
_LEVEL = 6
_SHRINK = 0.97  # Of the rows that may fit: bytes do not shrink quite as rows do. Own choice.
_DERIVED = ("share_ratio", "bottleneck_ratio")
_STORED = {name: kind for name, kind in FUNCTIONS_SCHEMA.items() if name not in _DERIVED}


def reduce_patterns(
    path: str | Path, folder: Path, *, steps: Steps = None, geometry: bool = False,
    window: int | None = None, pool: Pool | None = None, progress: Progress | None = None,
) -> list[Path]:  # fmt: skip
    """Writes the pattern of each trace, from which `TraceQuestions.patterns` answers the same."""
    traces = window_files(path, window)
    pool = pool or default_pool(traces)
    options = {"steps": steps, "geometry": geometry}
    found = pool.map(file_and_pattern, traces, options, progress)
    data = (pack_pattern(steps, file, pattern, geometry=geometry) for file, pattern in found)
    paths = (folder / f"{trace.name}{FUNCTIONS_SUFFIX}" for trace in traces)
    return list(map(report_cache.write_reduced, paths, data))


def file_and_pattern(
    trace: Trace, *, steps: Steps = None, geometry: bool = False
) -> tuple[TraceFile, RankFunctions]:
    """What a file is, and its pattern; a question for a pool."""
    return trace_file(trace), worker_pattern(trace, steps=steps, geometry=geometry)


def read_pattern(path: Path) -> tuple[report_cache.Reduced, TraceFile, RankFunctions]:
    """The content of a file, the trace that it was made of, and its pattern."""
    try:
        data = read_text(path, limit_bytes=_TEXT_LIMIT_BYTES)
        found = report_cache.unpack_reduced(data, path, "haiprof_functions", VERSION)
        file, head = found.answers["file"], found.head
        if not isinstance(file, TraceFile):
            raise TypeError("no trace file")
        known = {"geometry": bool(head["geometry"]), "left_out": list(map(str, head["left_out"]))}
        functions = _frame(found.answers["functions"], _STORED)
        totals = _frame(found.answers["totals"], TOTALS_SCHEMA)
        collectives = _frame(found.answers["collectives"], KERNELS_SCHEMA)
        rated = with_ratios(functions, int(totals["window_ns"].item()))
        began = collectives.with_columns(pl.col("event", "start_ns").cum_sum())
        ended = began.with_columns(end_ns=pl.col("start_ns") + pl.col("end_ns"))
        pattern = RankFunctions(rated.select(list(FUNCTIONS_SCHEMA)), totals, ended)
        return replace(found, head=known), file, pattern
    except report_cache.UNFIT as error:
        raise TraceFormatError(
            f"{path}: no functions that this haiprof can read: {error}",
            hint="haiprof trace functions TRACES --reduce DIR writes them again",
        ) from None


def patterns_of_files(paths: Sequence[Path], asked: Steps, *, geometry: bool = False) -> Patterns:
    """The patterns of all ranks, as from their traces but for what each file has left out."""
    every = [read_pattern(path) for path in paths]
    read = {file.path: (found, pattern) for found, file, pattern in every}
    report_cache.common_steps(
        [found for found, _ in read.values()], asked, command="trace functions"
    )
    known = [found.head["geometry"] for found, _ in read.values()]
    if not all(known) and (geometry or any(known)):
        raise MissingDataError(
            f"{paths[known.index(False)]}: kernels by name alone, without grid and block",
            hint="haiprof trace functions TRACES --geometry --reduce DIR",
        )
    files = by_rank(file for _, file, _ in every)
    found = gather_patterns({rank: read[file.path][1] for rank, file in files.items()})
    lacks = [f"rank {rank}: {text}" for rank, file in files.items()
             for text in read[file.path][0].head["left_out"]]  # fmt: skip
    return replace(found, left_out=tuple(lacks))


def pack_pattern(
    steps: Steps, file: TraceFile, pattern: RankFunctions, *, geometry: bool = False
) -> bytes:
    """The bytes of a file; where too many, without what ran least, and of collectives the last."""
    functions, collectives = pattern.functions, pattern.collectives
    while True:
        content = pattern._replace(functions=functions, collectives=collectives)
        head = {"haiprof_functions": VERSION, "steps": steps, "geometry": geometry,
                "left_out": _left_out(pattern, content)}  # fmt: skip
        # Times as small numbers, of which gzip makes more.
        first = (pl.col(name).diff().fill_null(pl.col(name)) for name in ("event", "start_ns"))
        answers: dict[str, report_cache.Answer] = {
            "file": file,
            "functions": content.functions.select(list(_STORED)),
            "totals": content.totals,
            "collectives": content.collectives.with_columns(
                *first, end_ns=pl.col("end_ns") - pl.col("start_ns")
            ),
        }
        text = json.dumps(head).encode() + b"\n" + report_cache.pack_answers(answers, plain=True)
        data = gzip.compress(text, _LEVEL, mtime=0)
        if len(data) <= SIZE_LIMIT_BYTES or not (len(functions) or len(collectives)):
            return data
        excess = len(data) - SIZE_LIMIT_BYTES
        sizes = [len(gzip.compress(report_cache.pack_answers({"": frame}, plain=True), _LEVEL))
                 for frame in (functions, collectives)]  # fmt: skip
        kept = min(_SHRINK, max(1 - excess / max(sizes), 1 / 3))  # at least a third of the rows
        if sizes[0] > sizes[1]:
            place = pl.col("covered_ns").rank("ordinal", descending=True)
            functions = functions.filter(place <= int(len(functions) * kept))
        else:
            collectives = collectives.head(int(len(collectives) * kept))


def _left_out(whole: RankFunctions, kept: RankFunctions) -> list[str]:
    lacks = []
    if count := len(whole.functions) - len(kept.functions):
        gone = whole.functions.join(kept.functions, on=["kind", "type", "name"], how="anti")
        share = gone["share_ratio"].max()
        most = ratio_text(share if isinstance(share, float) else None)
        lacks.append(f"{count} functions that ran for at most {most} of the time are left out")
    if len(kept.collectives) < len(whole.collectives):
        lacks.append(
            f"only the first {len(kept.collectives)} of {len(whole.collectives)} collectives: "
            "bandwidth, waiting and who is late rest on them"
        )
    return lacks


def _frame(answer: report_cache.Answer, schema: Mapping[str, Type]) -> pl.DataFrame:
    if not isinstance(answer, pl.DataFrame):
        raise TypeError("no frame")
    return answer.select(pl.col(name).cast(kind) for name, kind in schema.items())
