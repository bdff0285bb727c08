"""Memory by category from a file that `export_memory_timeline` of torch.profiler wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.run_format.unpack import read_text

# By their place in the file: torch/profiler/_memory_profiler.py, _CATEGORY_TO_INDEX.
CATEGORIES = (
    "parameter", "optimizer_state", "input", "temporary", "activation", "gradient",
    "autograd_detail", "unknown",
)  # fmt: skip
# The same module, Action; counted from 1.
ACTIONS = ("preexisting", "create", "increment_version", "destroy")

TEXT_LIMIT_BYTES = 1 << 30
_FILE_SCHEMA = {"time": pl.Int64, "action": pl.Int64, "bytes": pl.Int64, "category": pl.Int64}
_HINT = "export_memory_timeline writes such a file when its name ends in .raw.json.gz"


def memory_by_category(path: str | Path) -> pl.DataFrame:
    """What each category of tensors holds over time.

    Args:
        path: A `*.raw.json.gz` (or the same unpacked) of `prof.export_memory_timeline(path,
            device)`: a list of [time in ns, action, change in bytes, category]. It holds one
            device, and does not say which.

    Returns:
        One row per time at which something changed: `ts_ns`; then, after all changes at that time,
        `parameter_bytes`, `optimizer_state_bytes`, `input_bytes`, `temporary_bytes`,
        `activation_bytes`, `gradient_bytes`, `autograd_detail_bytes`, `unknown_bytes`, and
        `total_bytes`. What was there before profiling counts from the first time on.

        Source: HTA MemoryAnalysis, torch's MemoryProfileTimeline. HTA keeps a row for every
        change of time in the file's order and draws it; this is the frame, by time. Torch's
        memory snapshots (`_dump_snapshot`) are pickles, which can run code when they are read:
        they are not read here.

    Raises:
        TraceFormatError: It is not such a file.
    """
    known = pl.col("time") >= 0
    changes = _changes(Path(path))
    first = changes.filter(known)["time"].min()
    if first is None:
        raise TraceFormatError(f"{path}: no event in it has a time", hint=_HINT)
    sums = (
        pl.col("bytes").filter(pl.col("category") == at).sum().alias(f"{name}_bytes")
        for at, name in enumerate(CATEGORIES)
    )
    per_time = (
        changes.with_columns(ts_ns=pl.when(known).then("time").otherwise(pl.lit(first)))
        .group_by("ts_ns")
        .agg(sums)
        .sort("ts_ns")
    )
    held = pl.exclude("ts_ns").cum_sum()
    return per_time.with_columns(held).with_columns(
        total_bytes=pl.sum_horizontal(pl.exclude("ts_ns"))
    )


def _changes(path: Path) -> pl.DataFrame:
    """The file's rows."""
    rows = _json(path)
    if not isinstance(rows, list) or not rows:
        raise TraceFormatError(f"{path}: not a list of memory events", hint=_HINT)
    good = (
        isinstance(row, list) and len(row) == 4 and all(type(part) is int for part in row)
        and 1 <= row[1] <= len(ACTIONS) and 0 <= row[3] < len(CATEGORIES) and abs(row[2]) < 1 << 60
        and abs(row[0]) < 1 << 62
        for row in rows
    )  # fmt: skip
    if not all(good):
        raise TraceFormatError(f"{path}: not a list of [time, action, bytes, category]", hint=_HINT)
    return pl.DataFrame(rows, schema=_FILE_SCHEMA, orient="row")


def _json(path: Path) -> Any:  # noqa: ANN401 - whatever the file holds
    try:
        content = read_text(path, limit_bytes=TEXT_LIMIT_BYTES)
    except OSError as error:
        raise TraceFormatError(f"{path}: {error}") from None
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise TraceFormatError(f"{path}: no JSON: {error}", hint=_HINT) from None
