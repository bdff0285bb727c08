"""Writes a trace with its critical path: its own text, marks on events, and arrows."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.errors import HaiprofError, TraceFormatError
from haiprof.base.safe_files import whole_file
from haiprof.trace_analysis.critical.path import CriticalPath
from haiprof.trace_format.find import OVERLAY_SUFFIX
from haiprof.trace_format.kineto.added_arguments import add_marks
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText

CATEGORY = "critical_path"
MARK = "critical"
_GZIP_LEVEL = 1
_ROWS = 20_000


def write_overlay(
    trace: Trace, path: CriticalPath, *, folder: Path | None = None, only_path: bool = False
) -> Path:
    """Writes `<name>_critical_path.json.gz`, for Perfetto or chrome://tracing.

    The trace's text is passed through piece by piece, whatever its size. Events on the path get
    the argument `critical`; where the path changes its thread or stream stands an arrow (a flow
    event of category `critical_path`) that carries what bounds the next stretch. The file appears
    whole or not at all.
    """
    if trace.report.lost_count:
        raise TraceFormatError(
            f"{trace.path}: {trace.report.lost_count} events are no JSON, so the others cannot be "
            "marked in its text",
            hint="the path itself is in segments()",
        )
    stem = trace.path.name.removesuffix(".gz").removesuffix(".json")
    target = (folder or trace.path.parent) / f"{stem}{OVERLAY_SUFFIX}.json.gz"
    try:
        with (
            whole_file(target, below=target.parent) as packed,
            gzip.GzipFile("", "wb", _GZIP_LEVEL, packed) as file,
        ):
            for text in _text(trace.path, path, only_path=only_path):
                file.write(text)
    except OSError as error:
        raise HaiprofError(
            f"{target}: {error.strerror or error}", hint="name a folder that can be written"
        ) from None
    return target


def _text(source: Path, path: CriticalPath, *, only_path: bool) -> Iterator[bytes]:
    """Yields the new file's text; the metadata follows the events."""
    running = path.rows.filter(pl.col("kind") != "delay")["event"].drop_nulls()
    events = np.unique(running.to_numpy())
    text = TraceText(source)
    separator = b'{"traceEvents": [\n'
    for piece in add_marks(text, events, MARK, only_marked=only_path):
        yield separator
        yield piece
        separator = b",\n"
    arrows = arrow_events(path)
    for start in range(0, len(arrows), _ROWS):
        yield separator
        yield ",\n".join(arrows[start : start + _ROWS]).encode()
        separator = b",\n"
    if separator != b",\n":
        yield separator
    rest = json.dumps(text.metadata)[1:]
    yield b"\n]" + (b", " if text.metadata else b"") + rest.encode()


def arrow_events(path: CriticalPath) -> pl.Series:
    """Arrows between events on the path that lie on different threads or streams, as JSON."""
    events = path.rows.filter(pl.col("event").is_not_null() & (pl.col("kind") != "delay"))
    here = ("pid", "tid", "start_ns")
    moves = events.with_columns(pl.col(*here).shift(-1).name.prefix("next_"),
                                bound=pl.col("bound_by").shift(-1)).filter(
        (pl.col("pid") != pl.col("next_pid")) | (pl.col("tid") != pl.col("next_tid"))
    ).with_row_index("id")  # fmt: skip
    ends = [_arrow("s", "", moves, "pid", "tid", "start_ns"),
            _arrow("f", ', "bp": "e"', moves, "next_pid", "next_tid", "next_start_ns")]  # fmt: skip
    return pl.concat(ends)


def _arrow(phase: str, more: str, moves: pl.DataFrame, pid: str, tid: str, time: str) -> pl.Series:
    ns = pl.col(time)
    parts = (
        pl.lit(f'{{"ph": "{phase}", "cat": "{CATEGORY}", "name": "'), pl.col("bound"),
        pl.lit(f'"{more}, "id": "{CATEGORY}'), pl.col("id"), pl.lit('", "pid": '), pl.col(pid),
        pl.lit(', "tid": '), pl.col(tid), pl.lit(', "ts": '),
        pl.when(ns < 0).then(pl.lit("-")).otherwise(pl.lit("")), ns.abs() // 1000, pl.lit("."),
        (ns.abs() % 1000).cast(pl.String).str.zfill(3), pl.lit("}"),
    )  # fmt: skip
    return moves.select(event=pl.concat_str(*parts)).to_series()
