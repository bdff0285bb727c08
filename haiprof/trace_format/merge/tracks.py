"""What a run recorded beside its traces, as tracks of the merged trace: counters and spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import polars as pl

from haiprof.trace_format.merge.lanes import process_events, thread_event
from haiprof.trace_format.merge.timestamps import us_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """One process of the merged trace that no rank's file has.

    Its times are Unix time on the clock of the merged trace.
    """

    pid: int
    name: str
    sort_index: int
    threads: tuple[str, ...] = ()
    """Names of its threads, from 0."""
    counters: pl.DataFrame | None = None
    """`time_ns`, `name`, `unit`, `value`; a row without a value is left out."""
    spans: pl.DataFrame | None = None
    """`thread` (place in `threads`), `name`, `start_ns`, `duration_ns`, and further columns, which
    become arguments where they are not null."""


def track_events(track: Track, base_ns: int) -> Iterator[bytes]:
    """The track's events as JSON, one at a time."""
    yield from process_events(track.pid, track.name, track.sort_index)
    for place, name in enumerate(track.threads):
        yield thread_event(track.pid, place, name)
    if track.counters is not None:
        yield from _counters(track, track.counters, base_ns)
    if track.spans is not None:
        yield from _spans(track, track.spans, base_ns)


def _counters(track: Track, rows: pl.DataFrame, base_ns: int) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    named = rows.select("time_ns", "name", "unit", "value").drop_nulls("value")
    for time_ns, name, unit, value in named.iter_rows():
        ts = msgspec.Raw(us_text(time_ns - base_ns).encode())
        yield encode(
            {"ph": "C", "cat": "haiprof", "name": name, "pid": track.pid, "tid": 0, "ts": ts,
             "args": {unit or "value": value}}
        )  # fmt: skip


def _spans(track: Track, rows: pl.DataFrame, base_ns: int) -> Iterator[bytes]:
    encode = msgspec.json.Encoder().encode
    for row in rows.iter_rows(named=True):
        thread, name, start_ns, duration_ns = (
            row.pop(key) for key in ("thread", "name", "start_ns", "duration_ns")
        )
        yield encode(
            {"ph": "X", "cat": "haiprof", "name": name, "pid": track.pid, "tid": thread,
             "ts": msgspec.Raw(us_text(start_ns - base_ns).encode()),
             "dur": msgspec.Raw(us_text(duration_ns).encode()),
             "args": {key: value for key, value in row.items() if value is not None}}
        )  # fmt: skip
