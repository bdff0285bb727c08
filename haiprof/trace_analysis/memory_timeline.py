"""Memory over time from allocator events: totals, lifetimes, who allocated, what the peak held."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.call_stacks import is_outermost, levels, stacks
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest
from haiprof.trace_analysis.modules import part_tree
from haiprof.trace_format.kineto.rank_trace import STEP, Trace

# c10::DeviceType, c10/core/DeviceType.h. ROCm builds of PyTorch say CUDA.
DEVICE_TYPES = (
    "cpu", "cuda", "mkldnn", "opengl", "opencl", "ideep", "hip", "fpga", "maia", "xla", "vulkan",
    "metal", "xpu", "mps", "meta", "hpu", "ve", "lazy", "ipu", "mtia", "privateuseone",
)  # fmt: skip
_DEVICE = ("device_type", "device")


def memory_timeline(trace: Trace) -> pl.DataFrame:
    """What the allocators held after each event.

    One row per event, by device and time: `device_type` (`cpu`, `cuda`, ...); `device`, null
    for the CPU; `ts_ns`; `change_bytes`, negative when freed; `since_start_bytes`, the sum of
    the changes so far; `allocated_bytes` in tensors and `reserved_bytes` by the caching
    allocator, as PyTorch said them. Both are null in traces of 2021, which hold changes
    alone, and `reserved_bytes` is null for the CPU, which reserves nothing ahead.

    Source: torch.profiler's `[memory]` events (c10 `reportMemoryUsageToProfiler`). HTA drops
    them when it reads a trace (D24).
    """
    events = _events(trace)
    return events.select(
        *_DEVICE,
        "ts_ns",
        pl.col("bytes").alias("change_bytes"),
        pl.col("bytes").cum_sum().over(*_DEVICE).alias("since_start_bytes"),
        "allocated_bytes",
        "reserved_bytes",
    )


def memory_allocations(trace: Trace) -> pl.DataFrame:
    """Blocks of memory with their lifetimes."""
    found = _allocations(trace, _with_operators(_events(trace), _operators(trace)))
    return found.drop("order", "gone")


def memory_by_operator(trace: Trace) -> pl.DataFrame:
    """What each operator allocated, freed, and left behind.

    Source: "Size Increase" and "Self Size Increase" of TensorBoard's memory view
    (torch-tb-profiler, memory view).
    """
    operators = _operators(trace)
    events = _with_operators(_events(trace), operators)
    size = pl.col("bytes")
    own = events.group_by(*_DEVICE, "operator").agg(
        (size > 0).sum().cast(pl.Int64).alias("allocation_count"),
        size.filter(size > 0).sum().alias("allocated_bytes"),
        (size < 0).sum().cast(pl.Int64).alias("free_count"),
        -size.filter(size < 0).sum().alias("freed_bytes"),
        size.sum().alias("self_increase_bytes"),
    )
    on, counts = [*_DEVICE, "operator"], pl.selectors.integer() - pl.selectors.by_name("device")
    found = own.join(_increases(events, operators), on=on, how="full", coalesce=True,
                     nulls_equal=True).with_columns(counts.fill_null(0))  # fmt: skip
    return found.join(_leftovers(events), on=on, how="left", nulls_equal=True).select(
        *on, "allocation_count", "allocated_bytes", "free_count", "freed_bytes",
        "self_increase_bytes", "increase_bytes",
        *_zero_if(["kept_count", "kept_bytes"], known=_has_addresses(events)),
    ).sort(
        "self_increase_bytes", *on, descending=[True, False, False, False], nulls_last=True
    )  # fmt: skip


def memory_at_peak(trace: Trace) -> pl.DataFrame:
    """What was alive when each device held most."""
    return _at_peak(trace, _operators(trace))


def memory_at_peak_by_module(trace: Trace) -> pl.DataFrame:
    """What was alive when each device held most, by the module that allocated it."""
    return _at_peak(trace, part_tree(trace)).rename({"operator": "module"})


def _at_peak(trace: Trace, owners: CallTree) -> pl.DataFrame:
    events = _with_operators(_events(trace), owners)
    blocks = _allocations(trace, events)
    at = pl.col("allocated_bytes").arg_max()
    peaks = events.with_row_index("at").group_by(*_DEVICE, maintain_order=True).agg(
        pl.col("at", "ts_ns").get(at), pl.col("allocated_bytes").get(at).alias("peak_bytes")
    ).drop_nulls("peak_bytes")  # fmt: skip
    alive = (
        blocks.join(peaks, on=_DEVICE, nulls_equal=True)
        .filter(
            pl.col("allocated_ns").is_not_null()
            & (pl.col("order") <= pl.col("at"))
            & (pl.col("gone").is_null() | (pl.col("gone") > pl.col("at")))
        )
        .group_by(*_DEVICE, "operator")
        .agg(block_count=pl.len().cast(pl.Int64), size_bytes=pl.col("size_bytes").sum())
    )
    return _with_older(alive, peaks)


def _with_older(alive: pl.DataFrame, peaks: pl.DataFrame) -> pl.DataFrame:
    """With a row per device for what is older than the window."""
    known = alive.group_by(*_DEVICE).agg(known=pl.col("size_bytes").sum())
    older = peaks.join(known, on=_DEVICE, how="left", nulls_equal=True).select(
        *_DEVICE,
        operator=pl.lit(None, pl.String),
        block_count=pl.lit(None, pl.Int64),
        size_bytes=pl.col("peak_bytes") - pl.col("known").fill_null(0),
        origin=pl.lit("before"),
    )
    parts = [alive.with_columns(origin=pl.lit("window")), older.filter(pl.col("size_bytes") != 0)]
    found = pl.concat(parts).join(peaks, on=_DEVICE, nulls_equal=True)
    ratio = pl.when(pl.col("peak_bytes") > 0).then(pl.col("size_bytes") / pl.col("peak_bytes"))
    return found.select(
        *_DEVICE, "ts_ns", "peak_bytes", "origin", "operator", "block_count", "size_bytes",
        ratio.alias("ratio"),
    ).sort(*_DEVICE, -pl.col("size_bytes"), "operator", nulls_last=True)  # fmt: skip


def _events(trace: Trace) -> pl.DataFrame:
    """Memory events with their device in words, by device and time."""
    changes = trace.memory.filter(pl.col("bytes") != 0)
    if changes.is_empty():
        raise MissingDataError(
            f"{trace.path}: no memory event in it", hint="profile with profile_memory=True"
        )
    kind = pl.col("device_type")
    named = kind.replace_strict(
        range(len(DEVICE_TYPES)), DEVICE_TYPES, default=kind.cast(pl.String), return_dtype=pl.String
    )
    on_cpu = kind == 0
    return changes.with_columns(
        pl.when(~on_cpu).then("device").alias("device"),
        pl.when(~on_cpu).then("reserved_bytes").alias("reserved_bytes"),
        named.alias("device_type"),
    ).sort(*_DEVICE, "ts_ns", "event", maintain_order=True)  # fmt: skip


def _operators(trace: Trace) -> CallTree:
    """Operators with their nesting; the marks of steps are none."""
    names = trace.ops["name"].unique()
    marks = [name for name in names.cast(pl.String) if STEP.match(name)]
    return nest(trace.ops.filter(~pl.col("name").is_in(marks)))


def _with_operators(events: pl.DataFrame, operators: CallTree) -> pl.DataFrame:
    """With `row`, the innermost operator at that time on that thread, and its name `operator`."""
    row = innermost(operators, events)
    return events.with_columns(pl.Series("row", row, dtype=pl.Int64), _names_at(operators, row))


def _has_addresses(events: pl.DataFrame) -> bool:
    return events["address"].null_count() == 0


def _zero_if(names: list[str], *, known: bool) -> list[pl.Expr]:
    """Missing values become 0 where the trace could show them, else null."""
    return [pl.col(name).fill_null(0) if known else pl.lit(None, pl.Int64).alias(name)
            for name in names]  # fmt: skip


def _allocations(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    if not _has_addresses(events):
        raise MissingDataError(
            f"{trace.path}: its memory events have no addresses: what was freed is unknown",
            hint="record with a PyTorch of 2022 or later; memory_by_operator answers without them",
        )
    return _blocks(events)


def _blocks(events: pl.DataFrame) -> pl.DataFrame:
    """Pairs each allocation with the next event at its address, if that frees the same size.

    `order` is the place among the events, `gone` that of the next event at the same address, by
    which a block is gone even if its end was not recorded.
    """
    size, born = pl.col("bytes"), pl.col("bytes") > 0
    after = {name: pl.col(name).shift(-1).over(*_DEVICE, "address")
             for name in ("bytes", "ts_ns", "operator", "order")}  # fmt: skip
    pair = born & (after["bytes"] == -size)
    earlier = size.shift(1).over(*_DEVICE, "address")
    end_alone = ~born & (earlier.is_null() | (earlier != -size))
    numbered = events.with_row_index("order")
    return numbered.select(
        *_DEVICE, "address", size.abs().alias("size_bytes"),
        pl.when(born).then("ts_ns").alias("allocated_ns"),
        pl.when(pair).then(after["ts_ns"]).when(~born).then("ts_ns").alias("freed_ns"),
        pl.when(pair).then(after["ts_ns"] - pl.col("ts_ns")).alias("lifetime_ns"),
        pl.when(born).then("operator").alias("operator"),
        pl.when(pair).then(after["operator"]).when(~born).then("operator").alias("freed_by"),
        "order", after["order"].alias("gone"), (born | end_alone).alias("is_block"),
    ).filter("is_block").drop("is_block")  # fmt: skip


def _leftovers(events: pl.DataFrame) -> pl.DataFrame:
    """Per device and operator: blocks that were still there when the window ended."""
    blocks = _blocks(events).filter(pl.col("freed_ns").is_null() & pl.col("gone").is_null())
    return blocks.group_by(*_DEVICE, "operator").agg(
        kept_count=pl.len().cast(pl.Int64), kept_bytes=pl.col("size_bytes").sum()
    )


def _increases(events: pl.DataFrame, operators: CallTree) -> pl.DataFrame:
    """Per device and operator: changes in it and in all that it called."""
    counts = _outermost(operators)
    parts: list[pl.DataFrame] = []
    rows, places = np.arange(len(events)), events["row"].to_numpy()
    while len(rows):
        once = (places < 0) | counts[places]
        part = events[rows[once]].select(*_DEVICE, "bytes")
        parts.append(part.with_columns(_names_at(operators, places[once])))
        inner = places >= 0
        rows, places = rows[inner], operators.parent[places[inner]]
        rows, places = rows[places >= 0], places[places >= 0]
    changes = pl.concat(parts).group_by(*_DEVICE, "operator")
    return changes.agg(pl.col("bytes").sum().alias("increase_bytes"))


def _outermost(operators: CallTree) -> npt.NDArray[np.bool_]:
    """Whether no operator around each has its name; one False more, for no operator."""
    spans, parent = operators.spans, operators.parent
    _, code = np.unique(spans["name"].to_physical().to_numpy(), return_inverse=True)
    thread = spans.select(pl.struct("pid", "tid").rle_id()).to_series().cast(pl.Int64).to_numpy()
    found = stacks(levels(parent) or [], parent, code, thread)
    outermost: npt.NDArray[np.bool_] = np.append(is_outermost(found)[found.of_call], False)
    return outermost


def _names_at(operators: CallTree, rows: Ints) -> pl.Series:
    """`operator`, null where there is none (-1)."""
    at = pl.Series(rows, dtype=pl.Int64)
    names = operators.spans["name"].gather(at.set(at < 0, None))
    return names.cast(pl.String).alias("operator")
