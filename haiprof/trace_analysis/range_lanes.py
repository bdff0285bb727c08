"""A trace for Perfetto with record_function ranges in a lane of their own."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.safe_files import MadeFolder, whole_file
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.event_fields import with_number
from haiprof.trace_format.kineto.events import TEXTS
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.merge.overlaps import LANE

_GZIP_LEVEL = 1


@contextlib.contextmanager
def with_range_lanes(path: Path) -> Iterator[Path]:
    """The trace with its ranges (profiler steps, `record_function`) beside their thread.

    With Python stacks a range begins inside the call that opens it and ends after that call:
    neither contains the other, and Perfetto drops the range. In a lane of its own it is shown
    unchanged.
    """
    try:
        trace = Trace(path)
        lanes = _lanes(trace)
    except TraceFormatError:
        lanes = []
    if not lanes or trace.report.lost_count:
        yield path
        return
    with MadeFolder.temporary("haiprof-perfetto-") as folder:
        copy = folder / "trace.json.gz"
        with (
            whole_file(copy, below=folder) as packed,
            gzip.GzipFile("", "wb", _GZIP_LEVEL, packed) as file,
        ):
            for text in _text(trace, lanes):
                file.write(text)
        yield copy


def _lanes(trace: Trace) -> list[tuple[int, int]]:
    """Process and thread of every lane; none without Python functions."""
    if trace.python.is_empty():
        return []
    threads = _ranges(trace).select("pid", "tid").drop_nulls().unique().sort("pid", "tid")
    return [(pid, tid) for pid, tid in threads.iter_rows() if 0 <= tid < LANE]


def _ranges(trace: Trace) -> pl.DataFrame:
    ranges = pl.concat([trace.annotations, trace.phase_ranges])
    return ranges.filter(pl.col("category") != "gpu_user_annotation")


def _text(trace: Trace, lanes: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yields the new file's text; the metadata follows the events."""
    threads = pl.DataFrame(lanes, schema=["pid", "tid"], orient="row")
    moved = _ranges(trace).join(threads, on=["pid", "tid"], how="semi").sort("event")
    waiting = list(moved.select("event", "tid").iter_rows())[::-1]
    text, first = TraceText(trace.path), 0
    yield b'{"traceEvents": [\n' + b",\n".join(_name(pid, tid) for pid, tid in lanes)
    for piece in event_texts(text):
        events = [bytes(one) for one in TEXTS.decode(b"[" + piece + b"]")]
        while waiting and waiting[-1][0] < first + len(events):
            place, tid = waiting.pop()
            events[place - first] = with_number(events[place - first], "tid", LANE + tid)
        first += len(events)
        yield b",\n" + b",\n".join(events)
    rest = json.dumps(text.metadata)[1:].encode()
    yield b"\n]" + (b", " if text.metadata else b"") + rest


def _name(pid: int, tid: int) -> bytes:
    event = {"ph": "M", "name": "thread_name", "pid": pid, "tid": LANE + tid, "ts": 0}
    return json.dumps({**event, "args": {"name": f"ranges of thread {tid}"}}).encode()
