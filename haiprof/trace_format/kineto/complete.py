"""Completes a trace that Kineto wrote by itself with what it lacks: rank, host, steps."""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.run_format import phase_ranges
from haiprof.trace_format.kineto.columns import finish_table, merge_parts
from haiprof.trace_format.kineto.events import ANNOTATIONS, OPS
from haiprof.trace_format.kineto.load import read_trace

_GZIP_BITS, _GZIP_LEVEL = 31, 3
_TAIL_BYTES = 4 << 20  # what Kineto says of its own window stands behind the job's events
_WINDOW = re.compile(
    rb'"cat": "Trace",\s*"name": "PyTorch Profiler[^"]*",[^{}]*?'
    rb'"ts": ([0-9]+)\.?([0-9]*),\s*"dur": ([0-9]+)\.?([0-9]*)'
)
_OPTIMIZER = r"^Optimizer\.step#"


class EmptyTraceError(TraceFormatError):
    """A trace holds nothing of the training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawTrace:
    """A trace before it is completed."""

    path: Path
    metadata: Mapping[str, Any]
    event_count: int
    base_ns: int  # what the times in the file are counted from, in Unix time
    start_wall_ns: int  # when Kineto began to record; else the start of the first operator or range
    end_wall_ns: int  # when it ended; else the end of the last operator or range
    optimizer_ends_wall_ns: tuple[int, ...]  # ends of the optimizers' steps, in order
    tid: int | None  # of the thread that trains; None where no optimizer stepped


def read_raw(path: Path) -> RawTrace:
    """Reads a trace that Kineto has just written."""
    parts: dict[str, list[pl.DataFrame]] = {ANNOTATIONS: [], OPS: []}

    def keep(table: str, part: pl.DataFrame) -> None:
        if table in parts:
            wanted = [name for name in ("name", "ts_ns", "dur_ns", "tid") if name in part.columns]
            parts[table].append(part.select(wanted))

    metadata, texts, report = read_trace(path, keep)
    base = metadata.get("baseTimeNanoseconds")
    base_ns = base if type(base) is int else 0
    spans = [p.select("ts_ns", "dur_ns", "tid") for table in parts.values() for p in table]
    if not spans or not sum(map(len, spans)):
        raise EmptyTraceError(f"{path}: it holds no operator and no range")
    whole = pl.concat(spans)
    ranges = finish_table(ANNOTATIONS, merge_parts(parts[ANNOTATIONS] or [pl.DataFrame()]),
                          pl.Enum(texts))  # fmt: skip
    steps = ranges.filter(pl.col("name").cast(pl.String).str.contains(_OPTIMIZER))
    ends = [int(end) + base_ns for end in (steps["ts_ns"] + steps["dur_ns"]).sort()]
    start_ns = int(whole["ts_ns"].to_numpy().min())
    end_ns = int((whole["ts_ns"] + whole["dur_ns"]).to_numpy().max())
    window = _window(path)
    if window is not None:
        start_ns, end_ns = min(start_ns, window[0]), max(end_ns, window[1])
    return RawTrace(
        path=path, metadata=metadata, event_count=report.event_count, base_ns=base_ns,
        start_wall_ns=base_ns + start_ns, end_wall_ns=base_ns + end_ns,
        optimizer_ends_wall_ns=tuple(ends), tid=next(iter(steps["tid"]), None),
    )  # fmt: skip


def _window(path: Path) -> tuple[int, int] | None:
    """Begin and end of the window by Kineto's own event, in ns of the file's times."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _TAIL_BYTES, 0))
        found = _WINDOW.search(file.read())
    if found is None:
        return None
    whole, part, long, rest = (text.decode() for text in found.groups())
    start = int(whole + part[:3].ljust(3, "0"))
    return start, start + int(long + rest[:3].ljust(3, "0"))


def write_complete(
    raw: RawTrace, file: BinaryIO, *, metadata: Mapping[str, Any],
    ranges: Sequence[phase_ranges.PhaseRange], pid: int, packed: bool,
) -> None:  # fmt: skip
    """Writes the trace with more metadata and ranges, and everything else unchanged."""
    new = {key: value for key, value in metadata.items() if key not in raw.metadata}
    more = "".join(f"\n  {json.dumps(k)}: {json.dumps(v)}," for k, v in new.items()).encode()
    packer = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, _GZIP_BITS) if packed else None
    with raw.path.open("rb") as source:
        head = source.read(phase_ranges.HEAD_BYTES)
        brace = head.find(b"{")
        if brace < 0 or head[:brace].strip() or phase_ranges.events_start(head) is None:
            raise TraceFormatError(f"{raw.path}: not a trace as Kineto writes it")
        source.seek(brace + 1)
        tid = pid if raw.tid is None else raw.tid
        rest = phase_ranges.add_phases(source, ranges, pid=pid, tid=tid)
        for piece in itertools.chain((head[: brace + 1], more), rest):
            file.write(packer.compress(piece) if packer else piece)
        file.write(packer.flush() if packer else b"")
