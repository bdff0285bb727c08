"""A trace with counter tracks: its own text, and queue length and memory bandwidth as counters."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import polars as pl

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.safe_files import whole_file
from haiprof.trace_analysis.bandwidth import memory_bandwidth
from haiprof.trace_analysis.queue import queue_length
from haiprof.trace_format.file_ranks import COPY_KEY
from haiprof.trace_format.find import COUNTER_SUFFIX
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText

QUEUE_LENGTH, MEMORY_BANDWIDTH = "queue_length", "memory_bandwidth"
COUNTERS = (QUEUE_LENGTH, MEMORY_BANDWIDTH)


_GZIP_LEVEL = 1
_ROWS = 20_000


def write_counter_trace(
    trace: Trace,
    *,
    folder: Path | None = None,
    counters: tuple[str, ...] = COUNTERS,
    suffix: str = COUNTER_SUFFIX,
) -> pl.DataFrame:
    """Writes `<name>_with_counters.json.gz`, for Perfetto or chrome://tracing.

    The trace's text is streamed, whatever its size: every event as written, without what is not
    JSON, and the file closed where the original is truncated.

    One row: `path`; `counter_event_count`.

    Source: HTA generate_trace_with_counters, which holds the whole trace in memory.
    """
    unknown = set(counters) - set(COUNTERS)
    if unknown:
        raise ValueError(f"no counters {sorted(unknown)}: they are {', '.join(COUNTERS)}")
    if not suffix or "/" in suffix:
        raise UsageError(f"suffix {suffix!r}: expected part of a file's name")
    path = (folder or trace.path.parent) / f"{_stem(trace.path.name)}{suffix}.json.gz"
    events = pl.concat([_events(trace, counter) for counter in counters])
    try:
        with (
            whole_file(path, below=path.parent) as packed,
            gzip.GzipFile("", "wb", _GZIP_LEVEL, packed) as file,
        ):
            for text in _text(trace.path, events, named=COUNTER_SUFFIX in suffix):
                file.write(text)
    except OSError as error:
        raise HaiprofError(
            f"{path}: {error.strerror or error}", hint="name a folder that can be written"
        ) from None
    return pl.DataFrame({"path": [str(path)], "counter_event_count": [len(events)]})


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".json")


def _text(path: Path, events: pl.Series, *, named: bool) -> Iterator[bytes]:
    """Yields the new file's text; the metadata follows the events.

    Where its name does not say so, it says itself that it is a copy, not the trace of a rank.
    """
    text = TraceText(path)
    mark = "" if named else f'"{COPY_KEY}": 1, '
    separator = f'{{{mark}"traceEvents": [\n'.encode()
    for piece in event_texts(text):
        yield separator
        yield piece
        separator = b",\n"
    for start in range(0, len(events), _ROWS):
        yield separator
        yield ",\n".join(events[start : start + _ROWS]).encode()
        separator = b",\n"
    if separator != b",\n":
        yield separator
    rest = json.dumps(text.metadata)[1:]
    yield b"\n]" + (b", " if text.metadata else b"") + rest.encode()


def _events(trace: Trace, counter: str) -> pl.Series:
    """Counter events as JSON, one per change, in the tracks of the GPU's process."""
    if counter == QUEUE_LENGTH:
        series = queue_length(trace).with_columns(
            counter=pl.format("Queue length, stream {}", "stream"), value="queue_length"
        )
        key = "launches"
    else:
        series = memory_bandwidth(trace).with_columns(
            counter=pl.format("Bandwidth of {}", "copy_kind"),
            value=pl.col("bandwidth_bytes_per_s") / 1e9,
        )
        key = "GB/s"
    names = {name: json.dumps(name) for name in series["counter"].unique()}
    ns = pl.col("ts_ns")
    parts = (
        pl.lit('{"ph": "C", "name": '),
        pl.col("counter").replace(old=names),
        pl.lit(', "pid": '),
        pl.col("device"),  # Kineto's process of a GPU event is the device
        pl.lit(', "ts": '),
        pl.when(ns < 0).then(pl.lit("-")).otherwise(pl.lit("")),
        ns.abs() // 1000,
        pl.lit("."),
        (ns.abs() % 1000).cast(pl.String).str.zfill(3),
        pl.lit(f', "args": {{"{key}": '),
        pl.col("value"),
        pl.lit("}}"),
    )
    return series.select(event=pl.concat_str(*parts)).to_series()
