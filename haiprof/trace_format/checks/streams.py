"""Kernels that overlap on one stream: by design, or because an end was recorded wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.trace_format.checks.finding import GPU_TIME, Finding, count_text, milliseconds
from haiprof.trace_format.kineto.times import Flags

_COVERED_LEAST = 3
_ALONE_COVERED_LEAST = 8
_PEER_FACTOR = 5
_HUGE_FACTOR, _HUGE_NS = 100, 1_000_000
_FLOOR_NS = 50_000
"""Stamps of one stream contradict each other by some us in sound traces."""
_WINDOW_FACTOR = 2
_DEVICE = 1_000_003  # tells the streams of devices apart in one number
_RESULT_ANSWERS = (*GPU_TIME, "critical-path", "what-if", "process_groups", "efficiency")


@dataclass(frozen=True, slots=True)
class _Streams:
    """GPU events stream by stream, each by start."""

    row: Ints
    """Of the frame."""
    start: Ints
    end: Ints
    next_start: Ints
    """Of the next event on the stream; of the last one its own end."""
    begun: Ints
    """How many later ones of the stream begin before it ends."""
    in_graph: Flags
    """Whether these are all of one launch: branches of a CUDA graph may run side by side."""


def check_streams(
    gpu: pl.DataFrame, host: tuple[int, int] | None
) -> tuple[pl.DataFrame, list[Finding]]:
    """GPU events with ends that can be true, and what was found.

    Source: Hyperloom PR 1116 (7 of 55,423 events hid 62 % of the GPU's time), TraceLens issue
    669; programmatic dependent launch lets a kernel begin before the one before it has ended.
    """
    if len(gpu) < 2:
        return gpu, []
    order = _by_stream(gpu)
    if not (order.begun > 0).any() and not _longer(order, host).any():
        return gpu, []
    wrong = _wrong(order, gpu, host)
    findings = [_overlap_finding(order, wrong)]
    if wrong.any():
        gpu, found = _cut(gpu, order, wrong, host)
        findings.append(found)
    return gpu, [each for each in findings if each is not None]


def _by_stream(gpu: pl.DataFrame) -> _Streams:
    device: Ints = gpu.select(pl.coalesce("device", "pid").fill_null(-1)).to_series().to_numpy()
    stream: Ints = gpu.select(pl.coalesce("stream", "tid").fill_null(-1)).to_series().to_numpy()
    group = device * _DEVICE + stream
    row: Ints = np.argsort(group, kind="stable")
    group = group[row]
    start: Ints = gpu["ts_ns"].to_numpy()[row]
    end: Ints = start + gpu["dur_ns"].to_numpy()[row]
    last = np.append(group[1:] != group[:-1], True)
    next_start = np.where(last, end, np.append(start[1:], 0))
    begun = np.zeros(len(row), dtype=np.int64)
    over = np.flatnonzero(~last & (next_start < end) & (next_start > start))
    bounds = np.flatnonzero(last) + 1
    for at in np.unique(np.searchsorted(bounds, over, side="right")).tolist():
        first, after = (bounds[at - 1] if at else 0), bounds[at]
        own = over[(over >= first) & (over < after)]
        begun[own] = first + np.searchsorted(start[first:after], end[own]) - own - 1
    launch: Ints = gpu["correlation"].fill_null(0).to_numpy()[row]
    latest = np.arange(len(row)) + begun
    return _Streams(row, start, end, next_start, begun, (launch == launch[latest]) & (begun > 0))


def _longer(order: _Streams, host: tuple[int, int] | None) -> Flags:
    """Which events are longer than the window in which the host recorded calls."""
    length = order.end - order.start
    if host is None:
        return np.zeros(len(length), dtype=np.bool_)
    window = host[1] - host[0]
    found: Flags = length > max(_WINDOW_FACTOR * window, window + _HUGE_NS)
    return found


def _wrong(order: _Streams, gpu: pl.DataFrame, host: tuple[int, int] | None) -> Flags:
    """Which ends cannot be true."""
    length, excess = order.end - order.start, order.end - order.next_start
    odd = (order.begun > 0) & (excess > _FLOOR_NS) & ~order.in_graph
    if not odd.any():
        return _longer(order, host)
    names = gpu["name"].to_physical().to_numpy()[order.row]
    usual = _usual(names, length, odd)
    alone = usual < 0
    far = length > _PEER_FACTOR * usual
    covers = (order.begun >= _COVERED_LEAST) & far & ~alone
    covers |= (order.begun >= _ALONE_COVERED_LEAST) & alone
    huge = (length > _HUGE_FACTOR * usual) & (excess > _HUGE_NS) & ~alone
    return (odd & (covers | huge)) | _longer(order, host)


def _usual(names: Ints, length: Ints, odd: Flags) -> Ints:
    """The median duration of the sound events of the same name, for odd ones; -1 without any."""
    usual = np.full(len(names), -1, dtype=np.int64)
    wanted = np.unique(names[odd])
    rows = np.flatnonzero(np.isin(names, wanted) & ~odd)
    for name in np.unique(names[rows]).tolist():
        usual[names == name] = int(np.median(length[rows[names[rows] == name]]))
    return usual


def _cut(
    gpu: pl.DataFrame, order: _Streams, wrong: Flags, host: tuple[int, int] | None
) -> tuple[pl.DataFrame, Finding]:
    at = np.flatnonzero(wrong)
    sound_end = int(order.end[~wrong].max()) if not wrong.all() else int(order.start.max())
    close = max(sound_end, host[1] if host else sound_end)
    ends = np.where(order.begun[at] > 0, order.next_start[at], close)
    ends = np.clip(ends, order.start[at], order.end[at])
    durations = gpu["dur_ns"].to_numpy().copy()
    durations[order.row[at]] = ends - order.start[at]
    lost = int((order.end[at] - ends).sum())
    recorded = int((order.end - order.start).sum())
    text = (
        f"{count_text(len(at), 'kernel')} recorded with an end that cannot be true: longer than "
        "the window, or over later kernels of the same stream"
    )
    found = Finding(
        check="covering_kernels",
        count=len(at),
        text=f"{text} ({lost / max(recorded, 1):.0%} of the recorded kernel time)",
        effect=f"taken to end where the next one begins, {milliseconds(lost)} less; "
        f"at most {milliseconds(int((ends - order.start[at]).sum()))} is theirs",
        answers=_RESULT_ANSWERS,
    )
    return gpu.with_columns(dur_ns=pl.Series(durations, dtype=pl.Int64)), found


def _overlap_finding(order: _Streams, wrong: Flags) -> Finding | None:
    sound = (order.begun > 0) & ~wrong
    if not sound.any():
        return None
    overlap = int((order.end - order.next_start)[sound].max())
    graph = int((sound & order.in_graph).sum())
    of_graphs = f", {graph:,} of them inside one CUDA graph" if graph else ""
    return Finding(
        check="overlap_by_design",
        count=int(sound.sum()),
        text=f"{count_text(int(sound.sum()), 'kernel')} still running when the next one of the "
        f"stream begins{of_graphs}, by at most {milliseconds(overlap)}",
        effect="by design (programmatic dependent launch, branches of graphs): busy time counts "
        "it once, sums of kernel times twice",
        answers=("kernels",),
        is_fault=False,
    )
