"""Memory by category from a file that `export_memory_timeline` of torch.profiler wrote."""

from __future__ import annotations

import gzip
import json
import re
import zlib
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
    rows = _json(path)
    if _is_coalesced(rows):
        return _levels(rows, path)
    known = pl.col("time") >= 0
    changes = _changes(rows, path)
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


def _is_coalesced(rows: Any) -> bool:  # noqa: ANN401 - whatever the file holds
    """Whether it is [times, sizes]: then the second list holds lists."""
    return (
        isinstance(rows, list) and len(rows) == 2
        and all(isinstance(part, list) and part for part in rows) and isinstance(rows[1][0], list)
    )  # fmt: skip


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


def _changes(rows: Any, path: Path) -> pl.DataFrame:  # noqa: ANN401 - whatever the file holds
    """The file's rows."""
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
