"""Memory over time: from allocator events, or from a file of torch.profiler by category."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.run_format.unpack import read_text
from haiprof.trace_analysis.call_tree import CallTree, innermost, nest
from haiprof.trace_analysis.python_code import part_tree
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import STEP_NAME, Trace

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
    change, known = pl.col("bytes"), ("allocated_bytes", "reserved_bytes")
    since_start = change.cum_sum().over(*_DEVICE).alias("since_start_bytes")
    return _events(trace).select(
        *_DEVICE, "ts_ns", change.alias("change_bytes"), since_start, *known
    )


def memory_allocations(trace: Trace) -> pl.DataFrame:
    """Blocks of memory with their lifetimes.

    Returns:
        `device_type`, `device`, `address`, `size_bytes`, `allocated_ns`, `freed_ns`, `lifetime_ns`,
        `operator`, `freed_by`; null is what did not happen in the window.
    """
    found = _allocations(trace, _with_operators(_events(trace), _operators(trace)))
    return found.drop("order", "gone")


def memory_by_operator(trace: Trace) -> pl.DataFrame:
    """What each operator allocated, freed, and left behind.

    Returns:
        `device_type`, `device`, `operator`, `allocation_count`, `allocated_bytes`, `free_count`,
        `freed_bytes`, `self_increase_bytes`, `increase_bytes`, `kept_count`, `kept_bytes`.

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
    # Changes in each operator and in all that it called.
    changes = events.select(*_DEVICE, "bytes", "operator")
    pairs = operators.names_around(events["row"].to_numpy())
    inside = changes[pairs["place"]].with_columns(operator=pairs["name"])
    increases = pl.concat([changes.filter(pl.col("operator").is_null()), inside]).group_by(on).agg(
        increase_bytes=pl.col("bytes").sum()
    )  # fmt: skip
    found = own.join(increases, on=on, how="full", coalesce=True, nulls_equal=True)
    blocks = _blocks(events).filter(pl.col("freed_ns").is_null() & pl.col("gone").is_null())
    kept = blocks.group_by(on).agg(
        kept_count=pl.len().cast(pl.Int64), kept_bytes=pl.col("size_bytes").sum()
    )
    known = found.with_columns(counts.fill_null(0)).join(kept, on=on, how="left", nulls_equal=True)
    return known.select(
        *on, "allocation_count", "allocated_bytes", "free_count", "freed_bytes",
        "self_increase_bytes", "increase_bytes",
        pl.when(_has_addresses(events)).then(pl.col("kept_count", "kept_bytes").fill_null(0)),
    ).sort(
        "self_increase_bytes", *on, descending=[True, False, False, False], nulls_last=True
    )  # fmt: skip


def memory_at_peak(trace: Trace) -> pl.DataFrame:
    """What was alive when each device held most.

    Returns:
        `device_type`, `device`, `ts_ns`, `peak_bytes`, `origin`, `operator`, `block_count`,
        `size_bytes`, `ratio`.
    """
    return _at_peak(trace, _operators(trace))


def memory_at_peak_by_module(trace: Trace) -> pl.DataFrame:
    """What was alive when each device held most, by the module that allocated it.

    Returns:
        As `memory_at_peak`, with `module` in place of `operator`.
    """
    return _at_peak(trace, part_tree(trace)).rename({"operator": "module"})


def _at_peak(trace: Trace, owners: CallTree) -> pl.DataFrame:
    events = _with_operators(_events(trace), owners)
    blocks = _allocations(trace, events)
    at = pl.col("allocated_bytes").arg_max()
    peaks = events.with_row_index("at").group_by(*_DEVICE, maintain_order=True).agg(
        pl.col("at", "ts_ns").get(at), pl.col("allocated_bytes").get(at).alias("peak_bytes")
    ).drop_nulls("peak_bytes")  # fmt: skip
    at_peak = blocks.join(peaks, on=_DEVICE, nulls_equal=True).filter(
        pl.col("allocated_ns").is_not_null(), pl.col("order") <= pl.col("at"),
        pl.col("gone").is_null() | (pl.col("gone") > pl.col("at")),
    )  # fmt: skip
    alive = at_peak.group_by(*_DEVICE, "operator").agg(
        block_count=pl.len().cast(pl.Int64), size_bytes=pl.col("size_bytes").sum()
    )
    # With a row per device for what is older than the window.
    known = alive.group_by(*_DEVICE).agg(known=pl.col("size_bytes").sum())
    older = peaks.join(known, on=_DEVICE, how="left", nulls_equal=True).select(
        *_DEVICE, size_bytes=pl.col("peak_bytes") - pl.col("known").fill_null(0),
        origin=pl.lit("before"),
    )  # fmt: skip
    parts = [alive.with_columns(origin=pl.lit("window")), older.filter(pl.col("size_bytes") != 0)]
    found = pl.concat(parts, how="diagonal").join(peaks, on=_DEVICE, nulls_equal=True)
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
            f"{trace.path}: no memory event in it",
            hint="record it: haiprof --trace-memory train.py, or profile_memory=True",
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
    return nest(trace.ops.filter(~has_name(trace.ops, STEP_NAME)))


def _with_operators(events: pl.DataFrame, operators: CallTree) -> pl.DataFrame:
    """With `row`, the innermost operator at that time on that thread, and its name `operator`."""
    row = innermost(operators, events)
    return events.with_columns(row=pl.Series(row), operator=operators.names_at(row))


def _has_addresses(events: pl.DataFrame) -> bool:
    return events["address"].null_count() == 0


def _allocations(trace: Trace, events: pl.DataFrame) -> pl.DataFrame:
    if not _has_addresses(events):
        raise MissingDataError(
            f"{trace.path}: its memory events have no addresses: what was freed is unknown",
            hint="record with a PyTorch of 2022 or later; memory_by_operator answers without them",
        )
    return _blocks(events)


def _blocks(events: pl.DataFrame) -> pl.DataFrame:
    """Pairs each allocation with the next event at its address, if that frees the same size."""
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


# By their place in the file: torch/profiler/_memory_profiler.py, _CATEGORY_TO_INDEX.
CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient",
    "autograd_detail", "unknown",
)  # fmt: skip
# The same module, Action; counted from 1.
ACTIONS = ("preexisting", "create", "increment_version", "destroy")

TEXT_LIMIT_BYTES = 1 << 30
_FILE_SCHEMA = {"time": pl.Int64, "action": pl.Int64, "bytes": pl.Int64, "category": pl.Int64}
_BEGIN = re.compile(rb"\s*\[\s*\[\s*[-\d]")
_HINT = "export_memory_timeline writes such a file when its name ends in .raw.json.gz"


def memory_by_category(path: str | Path) -> pl.DataFrame:
    """What each category of tensors holds over time.

    One row per time at which something changed: `ts_ns`; then, after all changes at that time,
    `parameter_bytes`, `optimizer_state_bytes`, `input_bytes`, `temporary_bytes`,
    `activation_bytes`, `gradient_bytes`, `autograd_detail_bytes`, `unknown_bytes`, and
    `total_bytes`. What was there before profiling counts from the first time on.

    Source: HTA MemoryAnalysis, torch's MemoryProfileTimeline. HTA keeps a row for every
    change of time in the file's order and draws it; this is the frame, by time. Torch's
    memory snapshots are another format: `trace_format.memory_snapshot`.
    """
    path = Path(path)
    try:
        rows = json.loads(read_text(path, limit_bytes=TEXT_LIMIT_BYTES))
    except OSError as error:
        raise TraceFormatError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(f"{path}: no JSON: {error}", hint=_HINT) from None
    if not isinstance(rows, list) or not rows:
        raise TraceFormatError(f"{path}: not a list of memory events", hint=_HINT)
    # [times, sizes]: then the second list holds lists.
    if (
        len(rows) == 2 and all(isinstance(part, list) and part for part in rows)
        and isinstance(rows[1][0], list)
    ):  # fmt: skip
        return _levels(rows, path)
    known = pl.col("time") >= 0
    good = (
        isinstance(row, list) and len(row) == 4 and all(type(part) is int for part in row)
        and 1 <= row[1] <= len(ACTIONS) and 0 <= row[3] < len(CATEGORIES) and abs(row[2]) < 1 << 60
        and abs(row[0]) < 1 << 62
        for row in rows
    )  # fmt: skip
    if not all(good):
        raise TraceFormatError(f"{path}: not a list of [time, action, bytes, category]", hint=_HINT)
    changes = pl.DataFrame(rows, schema=_FILE_SCHEMA, orient="row")
    first = changes.filter(known)["time"].min()
    if first is None:
        raise TraceFormatError(f"{path}: no event in it has a time", hint=_HINT)
    sums = {f"{name}_bytes": pl.col("bytes").filter(pl.col("category") == at).sum()
            for at, name in enumerate(CATEGORIES)}  # fmt: skip
    when = pl.when(known).then("time").otherwise(pl.lit(first))
    per_time = changes.group_by(ts_ns=when).agg(**sums).sort("ts_ns")
    held = per_time.with_columns(pl.exclude("ts_ns").cum_sum())
    return held.with_columns(total_bytes=pl.sum_horizontal(pl.exclude("ts_ns")))


def is_memory_timeline(path: Path) -> bool:
    """Whether a file is one of these and no trace, by its first characters."""
    if not path.is_file():  # a pipe would block
        return False
    try:
        with open(path, "rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            head = (gzip.GzipFile(fileobj=raw) if packed else raw).read(64)
    except (OSError, EOFError, zlib.error):  # reading it as a trace gives the reason
        return False
    return bool(_BEGIN.match(head))


def _levels(rows: list[list[Any]], path: Path) -> pl.DataFrame:
    times, sizes = rows
    width = len(CATEGORIES) + 1
    good = len(times) == len(sizes) and all(
        isinstance(row, list) and len(row) == width
        and all(type(size) is int and abs(size) < 1 << 58 for size in row)
        for row in sizes
    ) and all(type(time) is int and abs(time) < 1 << 52 for time in times)  # fmt: skip
    if not good:
        raise TraceFormatError(f"{path}: not [times, sizes by category]", hint=_HINT)
    columns = {
        f"{name}_bytes": [row[at + 1] for row in sizes] for at, name in enumerate(CATEGORIES)
    }
    frame = pl.DataFrame({"ts_ns": times, **columns}, schema_overrides={"ts_ns": pl.Int64})
    frame = frame.with_columns(pl.col("ts_ns") * 1000).sort("ts_ns", maintain_order=True)
    last = frame.group_by("ts_ns", maintain_order=True).last()
    return last.with_columns(total_bytes=pl.sum_horizontal(pl.exclude("ts_ns")))
