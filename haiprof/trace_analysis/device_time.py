"""GPU events by kind, and a device's time: computing, communicating, idle, kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, difference, intersection, total, union
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import Trace

COMPUTATION, COMMUNICATION, MEMORY = "computation", "communication", "memory"
KINDS = (COMPUTATION, COMMUNICATION, MEMORY)

MEMORY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
# MTIA has one category for all that runs on the device; HTA knows copies by this name too.
MTIA_CATEGORY, MTIA_COPIES = "mtia_ccp_events", r"(?i)^dma(?:[^a-z]|$)"
COMMUNICATION_NAMES = "|".join(
    (
        # NCCL's are ncclKernel_* up to 2.18 and ncclDevKernel_* since, ncclSymDevKernel_* on
        # symmetric memory; RCCL's have the same names. HCCL is Habana's and Huawei's
        # (whose kernels are hcom_*), MCCL Moore Threads'.
        r"^(?:nccl|rccl|hccl|mccl|hcom_)",
        r"nccl(?:Symk?)?(?:Dev)?Kernel",
        r"mscclKernel|mscclpp",
        # oneCCL, as its SYCL kernels are called.
        r"\b(?:oneccl|ccl::)",
        # PyTorch's symmetric memory (CUDASymmetricMemoryOps.cu) and what came before it
        # (intra_node_comm.cu); NVSHMEM's own and PyTorch's on top of it.
        r"\bmultimem_(?:one_shot_)?(?:all_reduce|reduce|all_gather|reduce_scatter)",
        r"\b(?:one|two)_shot_(?:all_reduce|reduce_scatter|all_to_all)",
        r"\b(?:one|two)ShotAllReduceKernel|\bhybridCubeMeshAllReduceKernel",
        r"\bnvshmem",
        # Inference engines reduce small tensors themselves: vLLM and SGLang, AITER, quick reduce.
        r"\bcross_device_reduce|\bquickreduce::|\ballreduce_prototype",
        # DeepEP's exchange between experts.
        r"\bdeep_ep::",
    )
)
"""Names of kernels that move data between GPUs, or wait for another GPU to do it.

A kernel whose event names a collective is one whatever its own name. Kernels that fuse a collective
with computing (`allreduce_fusion_kernel`) count as computing: no name says how they share the time.
"""


def with_rank(frames: Iterable[tuple[int, pl.DataFrame]]) -> pl.DataFrame:
    """The frames of all ranks below each other, with the rank in front."""
    return pl.concat(
        frame.select(pl.lit(rank, dtype=pl.Int64).alias("rank"), pl.all()) for rank, frame in frames
    )


def weighted_mean(value: pl.Expr, weight: pl.Expr) -> tuple[pl.Expr, pl.Expr]:
    """A mean over time, or any other weight, and its deviation."""
    whole = weight.sum()
    mean = (value * weight).sum() / whole
    square = (value * value * weight).sum() / whole - mean * mean
    return mean, square.clip(0).sqrt()


def with_kind(gpu: pl.DataFrame) -> pl.DataFrame:
    """GPU events with their `kind`, one of `KINDS` (docs/hta-differences.md, D13 and D25)."""
    collective = pl.col("collective").cast(pl.String) != ""
    talking = has_name(gpu, COMMUNICATION_NAMES) | collective
    of_mtia = pl.col("category").cast(pl.String) == MTIA_CATEGORY
    copying = of_mtia & has_name(gpu, MTIA_COPIES)
    copying |= pl.col("category").cast(pl.String).is_in(MEMORY_CATEGORIES)
    return gpu.with_columns(
        kind=pl.when(copying).then(pl.lit(MEMORY)).when(talking).then(pl.lit(COMMUNICATION))
        .otherwise(pl.lit(COMPUTATION))
    )  # fmt: skip


Steps = tuple[int, int] | None
"""First profiler step and the one after the last; None is everything in the file."""
TEMPORAL_SCHEMA = {
    "device": pl.Int64, "span_ns": pl.Int64, "idle_ns": pl.Int64, "compute_ns": pl.Int64,
    "non_compute_ns": pl.Int64,
}  # fmt: skip


def temporal_breakdown(trace: Trace, *, steps: Steps = None) -> pl.DataFrame:
    """Idle, computing and other time of each GPU of a trace.

    Source: HTA get_temporal_breakdown. HTA rounds ns to us (D1), counts waits as work (D11),
    lays all devices of a process into one timeline (D12), takes kernels with `Sync`, `dma` or
    `Memset` in their name for no computation (D13), and leaves the last step out (D20).
    """
    gpu = with_kind(gpu_events(trace, steps))
    rows: list[tuple[object, ...]] = []
    for (device,), events in gpu.group_by("device", maintain_order=True):
        span = int(_ends(events).to_numpy().max() - events["ts_ns"].to_numpy().min())
        compute = total(union_of(events.filter(pl.col("kind") == COMPUTATION)))
        busy = total(union_of(events))
        rows.append((device, span, span - busy, compute, busy - compute))
    nothing = [(None,) * len(TEMPORAL_SCHEMA)]
    return pl.DataFrame(rows or nothing, schema=TEMPORAL_SCHEMA, orient="row").sort("device")


def _ends(events: pl.DataFrame) -> pl.Series:
    return events["ts_ns"] + events["dur_ns"]


def union_of(events: pl.DataFrame) -> Intervals:
    """The time that any of the events covers; from their `ts_ns` and `dur_ns`."""
    return union(events["ts_ns"].to_numpy(), _ends(events).to_numpy())


def gpu_events(trace: Trace, steps: Steps) -> pl.DataFrame:
    """`Trace.gpu`, or those events of it whose launch call began in some profiler steps.

    An event without a launch counts by its own beginning.
    """
    gpu = trace.gpu.with_columns(
        device=pl.coalesce("device", "pid"), stream=pl.coalesce("stream", "tid")
    )
    if steps is None:
        return gpu
    start_ns, end_ns = step_window(trace, steps)
    known = with_launch(gpu, trace.runtime)
    when = pl.coalesce("launch_ns", "ts_ns")
    return known.filter(when.is_between(start_ns, end_ns, closed="left")).drop("launch_ns")


def step_window(trace: Trace, steps: tuple[int, int]) -> tuple[int, int]:
    """When some profiler steps began and ended, in ns."""
    return step_marks(trace, steps).select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)


def step_marks(trace: Trace, steps: Steps) -> pl.DataFrame:
    """`Trace.steps`, or those of them that were asked for."""
    if steps is None:
        return trace.steps
    marks = trace.steps.filter(pl.col("step").is_between(*steps, closed="left"))
    if len(marks):
        return marks
    if trace.steps.is_empty():
        raise MissingDataError(
            f"{trace.path}: no profiler step was recorded",
            hint="call profiler.step() once per step, or ask without steps=",
        )
    numbers = trace.steps["step"].to_list()
    raise MissingDataError(
        f"{trace.path}: no step from {steps[0]} to before {steps[1]}; "
        f"it has {min(numbers)} to {max(numbers)}"
    )


def traced_window(trace: Trace, steps: Steps = None) -> tuple[int, int, int | None]:
    """When the profiler steps of a trace began and ended, in ns, and how many there are."""
    marks = trace.steps
    if steps is not None:
        marks = marks.filter(pl.col("step").is_between(*steps, closed="left"))
    if len(marks):
        low, high = marks.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
        return low, high, marks["step"].n_unique()
    return *(trace.checked.window or (0, 0)), None


def traced_time(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """How long `traced_window` is; a question for a pool: one row, `wall_ns`."""
    low, high, _ = traced_window(trace, steps)
    return pl.DataFrame({"wall_ns": [high - low]}, schema={"wall_ns": pl.Int64})


def with_launch(gpu: pl.DataFrame, runtime: pl.DataFrame) -> pl.DataFrame:
    """GPU events with the beginning of the call that launched each, null where it is not there."""
    calls = runtime.select("correlation", launch_ns="ts_ns").filter(pl.col("correlation") > 0)
    first = calls.group_by("correlation").agg(pl.col("launch_ns").min())
    return gpu.join(first, on="correlation", how="left", maintain_order="left")


OVERLAP_SCHEMA = {
    "device": pl.Int64, "compute_ns": pl.Int64, "communication_ns": pl.Int64,
    "overlap_ns": pl.Int64, "overlap_ratio": pl.Float64,
}  # fmt: skip
TYPES_SCHEMA = {
    "device": pl.Int64, "kernel_type": pl.String, "time_ns": pl.Int64, "time_ratio": pl.Float64,
}  # fmt: skip


def overlap(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """How much of the communication of each GPU computation hides.

    Returns:
        One row per device: `device`, `compute_ns`, `communication_ns`, `overlap_ns`,
        `overlap_ratio` (null without communication).

    Source: HTA get_comm_comp_overlap, in integer ns (D1) and per device (D12).
    """
    rows: list[tuple[object, ...]] = []
    for device, kinds in _times(trace, steps):
        compute, talk_ns = kinds[COMPUTATION], total(kinds[COMMUNICATION])
        both = total(intersection(compute, kinds[COMMUNICATION]))
        rows.append((device, total(compute), talk_ns, both, both / talk_ns if talk_ns else None))
    nothing = [(None,) * len(OVERLAP_SCHEMA)]
    return pl.DataFrame(rows or nothing, schema=OVERLAP_SCHEMA, orient="row").sort("device")


def kernel_types(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """The busy time of each GPU by the kinds of event that ran at the same time.

    Returns:
        Seven rows per device: `device`, `kernel_type`, `time_ns`, `time_ratio`.

    Source: the first frame of HTA get_gpu_kernel_breakdown, which adds all ranks together,
    cuts each piece to whole us (D3) and merges devices (D12).
    """
    rows = [(device, name, time_ns) for device, kinds in _times(trace, steps)
            for name, time_ns in _combinations(kinds)]  # fmt: skip
    whole = pl.col("time_ns").sum().over("device")
    found = pl.DataFrame(rows, schema=list(TYPES_SCHEMA.items())[:-1], orient="row")
    return found.with_columns(time_ratio=pl.when(whole > 0).then(pl.col("time_ns") / whole)).sort(
        "device", maintain_order=True
    )


def _times(trace: Trace, steps: Steps) -> list[tuple[object, dict[str, Intervals]]]:
    """When each kind ran, per device."""
    gpu = with_kind(gpu_events(trace, steps))
    return [(key[0], {kind: union_of(events.filter(pl.col("kind") == kind)) for kind in KINDS})
            for key, events in gpu.group_by("device", maintain_order=True)]  # fmt: skip


def _combinations(kinds: dict[str, Intervals]) -> list[tuple[str, int]]:
    """Each combination of kinds, and how long just those ran."""
    found = []
    for bits in range(1, 1 << len(KINDS)):
        inside = [kind for place, kind in enumerate(KINDS) if bits >> place & 1]
        outside = [kind for kind in KINDS if kind not in inside]
        both = reduce(intersection, (kinds[kind] for kind in inside))
        alone = reduce(difference, (kinds[kind] for kind in outside), both)
        found.append((len(inside), " overlapping ".join(inside), total(alone)))
    return [(name, time_ns) for _, name, time_ns in sorted(found, key=lambda row: row[0])]


HOST_WAIT, KERNEL_WAIT, OTHER, UNKNOWN = "host_wait", "kernel_wait", "other", "unknown"
IDLE_CATEGORIES = (HOST_WAIT, KERNEL_WAIT, OTHER, UNKNOWN)

CONSECUTIVE_KERNEL_DELAY_NS = 30_000
"""HTA documents its default of 30 in ns but compares it with us (D9): its results mean 30 us."""

_STREAM = ["device", "stream"]
_GAP = pl.col("gap_ns")
_STATISTICS = {
    "count": pl.len().cast(pl.Int64), "mean_ns": _GAP.mean(), "std_ns": _GAP.std(),
    "min_ns": _GAP.min(), "q25_ns": _GAP.quantile(0.25, "linear"), "median_ns": _GAP.median(),
    "q75_ns": _GAP.quantile(0.75, "linear"), "max_ns": _GAP.max(),
}  # fmt: skip


def idle_breakdown(
    trace: Trace, steps: Steps = None, *, streams: list[int] | None = None,
    consecutive_kernel_delay_ns: int = CONSECUTIVE_KERNEL_DELAY_NS,
) -> pl.DataFrame:  # fmt: skip
    """The idle time of each stream by what it waited for.

    One row per device, stream and category: `device`, `stream`, `idle_category`, `idle_ns`,
    `idle_ratio` (of the stream's idle time; null where it has none), `before_launch_ns` (the
    part before the launch call began: what a faster host can save), `count` of idle
    intervals and their `mean_ns`, `std_ns`, `min_ns`, `q25_ns`, `median_ns`, `q75_ns` and
    `max_ns` (null without any; the sample's deviation: null of a single one). The categories:
    `host_wait`: the next event was launched after all before it on the stream had ended;
    `kernel_wait`: it was launched before, and the gap is below the delay; `other`: it was
    launched before, and waited longer (an event of another stream, as a rule); `unknown`: its
    launch is not in the trace. The idle time of a stream is that between its first start and
    last end in which nothing ran on it. Empty without GPU events.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        streams: Only these.
        consecutive_kernel_delay_ns: A gap below it is what a GPU needs between two kernels.

    Source: HTA get_idle_time_breakdown. HTA takes the end of the one event before instead of
    the latest end, so that overlaps give negative gaps (D10), counts waits as events (D11),
    gaps of 0 as intervals, and puts what has no launch under `kernel_wait` or `other`.
    """
    gpu = gpu_events(trace, steps)
    if streams is not None:
        gpu = gpu.filter(pl.col("stream").is_in(streams))
    parts = gaps(gpu, trace.runtime, consecutive_kernel_delay_ns).group_by(
        *_STREAM, "idle_category"
    ).agg(
        idle_ns=pl.col("gap_ns").sum(), before_launch_ns=pl.col("before_launch_ns").sum(),
        **_STATISTICS,
    )  # fmt: skip
    # Categories without an interval have a row too, and 0 in it.
    categories = pl.DataFrame({"idle_category": IDLE_CATEGORIES})
    every = gpu.select(_STREAM).unique().join(categories, how="cross")
    category, whole = pl.col("idle_category"), pl.col("idle_ns").sum().over(_STREAM)
    known = pl.when(category != UNKNOWN).then(pl.col("before_launch_ns").fill_null(0))
    return (
        pl.concat([parts, every], how="diagonal")
        .unique([*_STREAM, "idle_category"], keep="first", maintain_order=True)
        .with_columns(pl.col("idle_ns", "count").fill_null(0), before_launch_ns=known)
        .with_columns(idle_ratio=pl.when(whole > 0).then(pl.col("idle_ns") / whole))
        .sort(*_STREAM, category.replace_strict(IDLE_CATEGORIES, range(len(IDLE_CATEGORIES))))
        .select(
            *_STREAM, "idle_category", "idle_ns", "idle_ratio", "before_launch_ns", *_STATISTICS
        )
    )


def gaps(gpu: pl.DataFrame, runtime: pl.DataFrame, delay_ns: int) -> pl.DataFrame:
    """The idle intervals of every stream, each at the time at which the next event begins."""
    end = pl.col("ts_ns") + pl.col("dur_ns")
    timed = with_launch(gpu, runtime).with_columns(
        busy_until_ns=end.cum_max().shift(1).over(_STREAM)
    )
    found = timed.with_columns(gap_ns=pl.col("ts_ns") - pl.col("busy_until_ns"))
    late_ns = pl.col("launch_ns") - pl.col("busy_until_ns")
    category = (
        pl.when(late_ns.is_null()).then(pl.lit(UNKNOWN)).when(late_ns > 0).then(pl.lit(HOST_WAIT))
        .when(pl.col("gap_ns") < delay_ns).then(pl.lit(KERNEL_WAIT)).otherwise(pl.lit(OTHER))
    )  # fmt: skip
    return found.filter(pl.col("gap_ns") > 0).select(
        *_STREAM, "ts_ns", "gap_ns", before_launch_ns=late_ns.clip(0, pl.col("gap_ns")),
        idle_category=category,
    )  # fmt: skip


OTHERS = "others"
TOP_KERNELS = 10  # how many of each kind pictures show; the rest are one part
_GROUP = ["device", "kind"]
DURATION_STATISTICS = {
    "count": pl.len().cast(pl.Int64), "sum_ns": pl.col("dur_ns").sum(),
    "min_ns": pl.col("dur_ns").min(), "max_ns": pl.col("dur_ns").max(),
    "mean_ns": pl.col("dur_ns").mean(), "std_ns": pl.col("dur_ns").std(),
}  # fmt: skip
"""Of a group of events; the sample's deviation, which is null of a single event."""


LAUNCH = ("blocks_per_sm", "occupancy_ratio", "waves")
"""How a kernel fills a GPU: blocks on each multiprocessor, the share of its warps that are there,
and how often all multiprocessors are filled until no block is left; null where not recorded."""
NO_LAUNCHES = (
    "waves and occupancy: the profiler did not record blocks per SM (ROCm's and old ones do not); "
    "grid and block, where they are known, are in --json"
)
GEOMETRY = ("grid", "block")
"""Of a launch as recorded: in blocks and threads, of ROCm the grid in threads too."""


def device_properties(trace: Trace) -> dict[str, Any]:
    """As the profiler recorded them: of the device of most GPU events, without any of the first."""
    said = trace.metadata.get("deviceProperties")
    every = [each for each in said if isinstance(each, dict)] if isinstance(said, list) else []
    numbers = trace.gpu.select(pl.coalesce("device", "pid")).to_series().drop_nulls().mode()
    own = every if numbers.is_empty() else [each for each in every if each.get("id") == numbers[0]]
    return own[0] if own else {}


def device_name(trace: Trace) -> str | None:
    """Of the device that the GPU events are of; None on the CPU."""
    said = device_properties(trace) if len(trace.gpu) else {}
    return str(said.get("name"))[:200] if said else None


def known_occupancy() -> pl.Expr:
    """A kernel's estimated occupancy; null for Kineto's 0, which says that it has no estimate."""
    fill = pl.col("occupancy_ratio")
    return pl.when(fill > 0).then(fill)


def launch_columns(trace: Trace) -> tuple[pl.Expr, ...]:
    """The columns of LAUNCH of GPU events.

    Kineto's estimate is the CUDA occupancy calculator's (cuda_occupancy.h,
    cudaOccMaxActiveBlocksPerMultiprocessor) from threads, registers and shared memory, or less
    where the grid has fewer blocks than fit. Blocks that fit are that share of the most warps, by
    the warps of a block.
    """
    said = device_properties(trace)
    threads, warp = (said.get(name) for name in ("maxThreadsPerMultiprocessor", "warpSize"))
    most = None
    if isinstance(threads, int) and isinstance(warp, int) and warp > 0:
        most = threads / warp
    blocks, fill = pl.col("blocks_per_sm"), known_occupancy()
    present = fill * pl.lit(most, dtype=pl.Float64)
    fit = (present / pl.col("warps_per_sm") * blocks).round().clip(1)
    is_all = present >= pl.col("warps_per_sm") - 0.01 * present
    waves = pl.when(is_all).then(blocks / blocks.ceil()).otherwise(blocks / fit)
    return blocks, fill.alias("occupancy_ratio"), waves.alias("waves")


def kernels(
    trace: Trace, steps: Steps = None, *, num_kernels: int | None = None,
    duration_ratio: float | None = None, include_memory: bool = True,
) -> pl.DataFrame:  # fmt: skip
    """Each kernel's count and time.

    Args:
        trace: Of one rank.
        steps: First profiler step and the one after the last; None takes all.
        num_kernels: At most so many per rank and kind; the rest is one row `others`.
        duration_ratio: The longest that make this share of a kind's time; the rest likewise.
        include_memory: Copies and sets too.

    Returns:
        One row per device, kind and kernel: `device`, `kind`, `name`, `count`, `sum_ns`, `min_ns`,
        `max_ns`, `mean_ns`, `std_ns`, `kind_ratio`, `name_count`; of the longest call `grid` and
        `block` as recorded, and the columns of LAUNCH, null where they were not.

    Source: the second frame of HTA get_gpu_kernel_breakdown. HTA's mean, min and max are the
    sum, and its deviation 0, as soon as a limit takes effect (D2); its duration_ratio cuts at
    a quantile of the running sum, not at a share of the time (D4).
    """
    gpu = with_kind(gpu_events(trace, steps)).select(
        *_GROUP, "name", "dur_ns", pl.col(GEOMETRY).cast(pl.String), *launch_columns(trace)
    )
    if not include_memory:
        gpu = gpu.filter(pl.col("kind") != MEMORY)
    told = [*GEOMETRY, *LAUNCH]
    by_name = gpu.group_by(*_GROUP, "name").agg(
        "dur_ns", pl.col(told).get(pl.col("dur_ns").arg_max()),
        longest_ns=pl.col("dur_ns").sum(),
    )  # fmt: skip
    # With `is_kept`: whether a kernel has a row of its own.
    text, sum_ns = pl.col("name").cast(pl.String), pl.col("longest_ns")
    ordered = by_name.with_columns(text=text).sort(*_GROUP, -sum_ns, "text")
    keep = are_longest(sum_ns, _GROUP, count=num_kernels, ratio=duration_ratio)
    marked = ordered.with_columns(is_kept=keep).explode("dur_ns")
    found = marked.group_by(*_GROUP, "is_kept", own=pl.when("is_kept").then("name")).agg(
        **DURATION_STATISTICS,
        name_count=pl.col("name").n_unique().cast(pl.Int64),
        **{name: pl.when(pl.col("is_kept").first()).then(pl.col(name).first()) for name in told},
    )
    whole = pl.col("sum_ns").sum().over(_GROUP)
    named = found.with_columns(
        name=pl.col("own").cast(pl.String).fill_null(OTHERS),
        kind_ratio=pl.when(whole > 0).then(pl.col("sum_ns") / whole),
    )
    ordered = named.sort(*_GROUP, pl.col("is_kept").not_(), -pl.col("sum_ns"), "name")
    return ordered.select(*_GROUP, "name", *DURATION_STATISTICS, "kind_ratio", "name_count", *told)


def are_longest(
    sums: pl.Expr, over: str | list[str], *, count: int | None, ratio: float | None
) -> pl.Expr:
    """Which rows, sorted by `sums`, are the first so many, and the first of such a share."""
    keep = pl.lit(True)
    if count is not None:
        keep = keep & (sums.cum_count().over(over) <= count)
    if ratio is not None:
        keep = keep & ((sums.cum_sum() - sums).over(over) < ratio * sums.sum().over(over))
    return keep


def across_ranks(breakdown: pl.DataFrame) -> pl.DataFrame:
    """The same kernel on every rank: which one is slow at it, and what that costs."""
    per_rank = breakdown.group_by("kind", "name", "rank").agg(
        pl.col("count", "sum_ns").sum(), pl.col("max_ns").max(),
        pl.col(*GEOMETRY, *LAUNCH).get(pl.col("max_ns").arg_max()),
    ).with_columns(mean_ns=pl.col("sum_ns") / pl.col("count")).sort("rank")  # fmt: skip
    mean, told = pl.col("mean_ns"), (*GEOMETRY, *LAUNCH)
    slowest, fastest = mean.arg_max(), mean.arg_min()
    others = mean.sort().head(pl.len() - 1).median()
    above = mean.max() - others
    found = per_rank.group_by("kind", "name").agg(
        rank_count=pl.len().cast(pl.Int64), count=pl.col("count").sum(),
        sum_ns=pl.col("sum_ns").sum(), mean_ns=mean.mean(), std_ns=mean.std(),
        slowest_rank=pl.col("rank").get(slowest), slowest_mean_ns=mean.max(),
        fastest_rank=pl.col("rank").get(fastest), fastest_mean_ns=mean.min(),
        others_median_ns=others, distance_ratio=pl.when(others > 0).then(above / others),
        excess_ns=above * pl.col("count").get(slowest),
        **{name: pl.col(name).get(pl.col("max_ns").arg_max()) for name in told},
    )  # fmt: skip
    return found.sort(-pl.col("excess_ns"), "kind", "name", nulls_last=True)
