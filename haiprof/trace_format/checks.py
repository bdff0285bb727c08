"""What a trace can support: faults of the recording, found and corrected when it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.intervals import Bools, Ints
from haiprof.trace_format.kineto.cache import KeptFindings
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.events import ANNOTATIONS, GPU, GPU_RANGES, OPS, PYTHON, RUNTIME
from haiprof.trace_format.kineto.load import Cut, LoadReport
from haiprof.trace_format.launch_checks import (
    Finding,
    check_launches,
    count_text,
    link_launches,
    milliseconds,
)

_EVENTS_LEAST = 20  # fewer do not tell where the middle of a trace is
_FAR_SPANS = 50
_SPAN_LEAST_NS = 1_000_000_000
_FAR_SHARE = 0.01
_IDLE_LEAST_NS = 100_000_000
_LAUNCH = "LaunchKernel"
# The shortest tenth of launch calls takes 2 to 10 us on every machine seen, of kernels 1 to 20 us.
_LAUNCH_LEAST_NS, _LAUNCH_MOST_NS = 200, 800_000
_KERNEL_LEAST_NS, _KERNEL_MOST_NS = 1_000, 400_000


def without_far(events: pl.DataFrame) -> pl.DataFrame:
    """Events by start without the few that begin far from all others."""
    count = len(events)
    if count < _EVENTS_LEAST:
        return events
    starts = events["ts_ns"]
    low, high = int(starts[count // 10]), int(starts[count - 1 - count // 10])
    far = _FAR_SPANS * max(high - low, _SPAN_LEAST_NS)
    if int(starts[0]) >= low - far and int(starts[-1]) <= high + far:
        return events
    near = events.filter(pl.col("ts_ns").is_between(low - far, high + far))
    return near if count - len(near) <= max(1, _FAR_SHARE * count) else events


def without_far_from_host(gpu: pl.DataFrame, host: tuple[int, int] | None) -> pl.DataFrame:
    """GPU events without the few that no call of the host explains.

    A GPU works on after the host's last call, and may have begun before its first, but then without
    a pause: nothing that it runs was launched outside of that window.
    """
    count = len(gpu)
    if host is None or count < _EVENTS_LEAST:
        return gpu
    limit = max(host[1] - host[0], _IDLE_LEAST_NS)
    early, late = host[0] - limit, host[1] + limit
    starts = gpu["ts_ns"].to_numpy()
    if starts[0] >= early and starts[-1] <= late:
        return gpu
    reached = np.maximum.accumulate(starts + gpu["dur_ns"].to_numpy())[:-1]
    pauses = np.flatnonzero(starts[1:] - reached > limit)
    before, after = pauses[reached[pauses] < early], pauses[starts[pauses + 1] > late]
    first = int(before[-1]) + 1 if len(before) else 0
    last = int(after[0]) + 1 if len(after) else count
    far = count - (last - first)
    return gpu[first:last] if 0 < far <= max(1, _FAR_SHARE * count) else gpu


def without_duplicates(events: pl.DataFrame, key: str) -> pl.DataFrame:
    """Events by start, each once."""
    starts, durations = events["ts_ns"].to_numpy(), events["dur_ns"].to_numpy()
    same = (starts[1:] == starts[:-1]) & (durations[1:] == durations[:-1])
    if not same.any():
        return events
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    rows = events[tied].filter(pl.col(key) > 0)
    again = rows.filter(~rows.select(pl.exclude("event")).is_unique())
    later = again.filter(~pl.struct(pl.exclude("event")).is_first_distinct())
    return events.join(later.select("event"), on="event", how="anti") if len(later) else events


_UNORDERED_SHARE = 0.01
"""Of a table's time: where starts go back further, the file is not in order of time."""
WRITTEN = (OPS, ANNOTATIONS, PYTHON, RUNTIME, GPU)  # tables that tell where a file is cut off


def find_cut(tables: Mapping[str, pl.DataFrame], marks: pl.DataFrame, *, has_gpu: bool) -> Cut:
    """Where the events of a file that is cut off are no longer all there.

    Kineto writes operators and ranges of one thread after the other, then Python functions, then
    calls and GPU events in turns, then ranges as they are on the GPU; each by start, but calls and
    GPU events of long traces in blocks without an order. `tables` are those of `WRITTEN`, `marks`
    all profiler steps that begin in the file.
    """
    events = {name: tables[name]["event"].cast(pl.Int64).to_numpy() for name in WRITTEN}
    ends = {name: int(each.max(initial=-1)) for name, each in events.items()}
    last = max(ends, key=lambda name: ends[name])
    if ends[last] < 0:
        return Cut(text="the file is cut off", effect="no event of it is left")
    latest = tables[last].filter(pl.col("event") == pl.col("event").max())["category"][0]
    if last == ANNOTATIONS and str(latest) == GPU_RANGES:
        return Cut(text="the file is cut off behind its last GPU event",
                   effect="ranges as they are on the GPU may be missing")  # fmt: skip
    known_ns = _known_until(tables, last)
    is_lost = has_gpu and tables[GPU].is_empty()
    lost = "; its GPU events came later, and are lost" if is_lost else ""
    where, whole_ns, end_ns = "", None, None if known_ns is None else known_ns + 1
    is_whole = marks["end_ns"] <= (-1 if known_ns is None else known_ns)
    whole, begun = marks.filter(is_whole), marks.filter(~is_whole)["step"]
    if marks.is_empty():
        effect = "how much of it is missing is not known"
    elif whole.is_empty():
        where = "" if known_ns is None else f" in its first step, {begun[0]}"
        sure = " for certain: it is not in the order of time" if known_ns is None else ""
        effect, whole_ns = f"no step of it is whole{sure}", -1
    else:
        step = whole["step"][-1]
        where = f" in step {begun[0]}" if len(begun) else f" behind step {step}"
        effect = f"what follows step {step}, its last whole one, is left out"
        whole_ns = end_ns = max(whole["end_ns"].to_list())
    return Cut(
        whole_ns=whole_ns, end_ns=end_ns, text=f"the file is cut off{where}",
        effect=f"{effect}{lost}", is_device_lost=is_lost,
    )  # fmt: skip


def _known_until(tables: Mapping[str, pl.DataFrame], last: str) -> int | None:
    """When the last event began before which all are there; None where nobody can tell."""
    if last in (RUNTIME, GPU):  # a kernel counts by its launch: all launched before ran before
        calls = tables[RUNTIME].sort("event").select("correlation", call_ns="ts_ns")
        launched = tables[GPU].sort("event").select("correlation").join(
            calls, on="correlation", maintain_order="left"
        )  # fmt: skip
        parts = [calls["call_ns"], launched["call_ns"]]
    elif last == PYTHON:
        parts = [tables[PYTHON].sort("event")["ts_ns"]]
    else:  # haiprof's own ranges stand first in its traces: operators alone are looked at
        written = tables[OPS].sort("event")
        parts = [written.filter(pl.col("tid").eq_missing(pl.col("tid").last()))["ts_ns"]]
    found = [each.to_numpy() for each in parts]
    for starts in found:  # none may be far before an earlier one
        back = np.maximum.accumulate(starts) - starts
        if not len(starts) or back.max() > _UNORDERED_SHARE * np.ptp(starts):
            return None
    return int(min(starts[-1] for starts in found))


def before_cut(
    name: str, events: pl.DataFrame, runtime: Callable[[], pl.DataFrame], end_ns: int
) -> pl.DataFrame:
    """A table's events that began before `end_ns`; those of the GPU that were launched before."""
    if name != GPU:
        return events.filter(pl.col("ts_ns") < end_ns)
    calls = runtime()
    by = [calls.filter(when)["correlation"].drop_nulls().implode()
          for when in (pl.col("ts_ns") < end_ns, pl.col("ts_ns") >= end_ns)]  # fmt: skip
    early, late = (pl.col("correlation").is_in(each).fill_null(False) for each in by)
    return events.filter(early | ((pl.col("ts_ns") < end_ns) & ~late))


def _event_finding(counts: Mapping[str, int], check: str, what: str, effect: str) -> Finding | None:
    total = sum(counts.values())
    names = ", ".join(f"{count} of {table}" for table, count in counts.items() if count)
    text = f"{count_text(total, 'event')} {what} ({names})"
    return Finding(check, total, text, effect) if total else None


def unit_finding(gpu: pl.DataFrame, runtime: pl.DataFrame) -> Finding | None:
    """Times a thousand times too long or too short, by launch calls and kernels together."""
    calls = runtime.filter(has_name(runtime, _LAUNCH))["dur_ns"]
    if len(calls) < _EVENTS_LEAST or len(gpu) < _EVENTS_LEAST:
        return None
    call, kernel = (float(np.quantile(each.to_numpy(), 0.1)) for each in (calls, gpu["dur_ns"]))
    median = float(np.median(calls.to_numpy()))
    longest = float(np.quantile(gpu["dur_ns"].to_numpy(), 0.9))
    if call > _LAUNCH_MOST_NS and kernel > _KERNEL_MOST_NS:
        said, advice = "1000 times too long: nanoseconds written as us", "divide by 1000"
    elif median < _LAUNCH_LEAST_NS and longest < _KERNEL_LEAST_NS:
        said, advice = "1000 times too short: milliseconds written as us", "multiply by 1000"
    else:
        return None
    return Finding(
        "wrong_unit", len(gpu) + len(runtime),
        text=f"all times seem {said} (the median launch call takes {median / 1e3:,.3f} µs)",
        effect=f"shares hold, durations do not: {advice}",
    )  # fmt: skip


_COVERED_LEAST = 3
_ALONE_COVERED_LEAST = 8
_PEER_FACTOR = 5
_HUGE_FACTOR, _HUGE_NS = 100, 1_000_000
_FLOOR_NS = 50_000  # stamps of one stream contradict each other by some us in sound traces
_WINDOW_FACTOR = 2
_ALONE_NS = 100_000_000
"""By so much the only kernel of its name may be longer than the host's window."""
_DEVICE = 1_000_003  # tells the streams of devices apart in one number


@dataclass(frozen=True, slots=True)
class _Streams:
    """GPU events stream by stream, each by start."""

    row: Ints  # of the frame
    start: Ints
    end: Ints
    next_start: Ints  # of the next event on the stream; of the last one its own end
    begun: Ints  # how many later ones of the stream begin before it ends
    in_graph: Bools
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
    longer = _longer(order, gpu, host)
    if not ((order.begun > 0) | longer).any():
        return gpu, []
    wrong = _covering(order, gpu) | longer
    findings = [_overlap_finding(order, wrong)]
    if wrong.any():
        gpu, found = _cut(gpu, order, wrong, host)
        findings.append(found)
    return gpu, [each for each in findings if each is not None]


def _by_stream(gpu: pl.DataFrame) -> _Streams:
    device, stream = (
        pl.coalesce(pair).fill_null(-1) for pair in (("device", "pid"), ("stream", "tid"))
    )
    group: Ints = gpu.select(device * _DEVICE + stream).to_series().to_numpy()
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


def _longer(order: _Streams, gpu: pl.DataFrame, host: tuple[int, int] | None) -> Bools:
    """Which events are longer than the host's window, and than others of their name."""
    length = order.end - order.start
    if host is None:
        return np.zeros(len(length), dtype=np.bool_)
    window = host[1] - host[0]
    found: Bools = length > max(_WINDOW_FACTOR * window, window + _HUGE_NS)
    names = gpu["name"].to_physical().to_numpy()[order.row]
    for at in np.flatnonzero(found).tolist():
        alike = length[names == names[at]]
        usual = int(np.median(alike)) if len(alike) > 1 else window + _ALONE_NS
        found[at] = length[at] > (_PEER_FACTOR * usual if len(alike) > 1 else usual)
    return found


def _covering(order: _Streams, gpu: pl.DataFrame) -> Bools:
    """Which events cover later ones of their stream, and cannot have taken that long."""
    length, excess = order.end - order.start, order.end - order.next_start
    odd: Bools = (order.begun > 0) & (excess > _FLOOR_NS) & ~order.in_graph
    if not odd.any():
        return odd
    names = gpu["name"].to_physical().gather(order.row)
    # The median duration of the sound events of the same name; -1 without any.
    sound = pl.when(~pl.col("odd")).then("length").median().over("name")
    rows = pl.DataFrame({"name": names, "length": length, "odd": odd})
    usual = rows.select(sound.fill_null(-1).cast(pl.Int64)).to_series().to_numpy()
    alone = usual < 0
    far = length > _PEER_FACTOR * usual
    covers = (order.begun >= _COVERED_LEAST) & far & ~alone
    covers |= (order.begun >= _ALONE_COVERED_LEAST) & alone
    huge = (length > _HUGE_FACTOR * usual) & (excess > _HUGE_NS) & ~alone
    return odd & (covers | huge)


def _cut(
    gpu: pl.DataFrame, order: _Streams, wrong: Bools, host: tuple[int, int] | None
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
        "covering_kernels", len(at),
        text=f"{text} ({lost / max(recorded, 1):.0%} of the recorded kernel time)",
        effect=f"taken to end where the next one begins, {milliseconds(lost)} less; "
        f"at most {milliseconds(int((ends - order.start[at]).sum()))} is theirs",
    )  # fmt: skip
    return gpu.with_columns(dur_ns=pl.Series(durations, dtype=pl.Int64)), found


def _overlap_finding(order: _Streams, wrong: Bools) -> Finding | None:
    sound = (order.begun > 0) & ~wrong
    if not sound.any():
        return None
    overlap = int((order.end - order.next_start)[sound].max())
    graph = int((sound & order.in_graph).sum())
    of_graphs = f", {graph:,} of them inside one CUDA graph" if graph else ""
    return Finding(
        "overlap_by_design", int(sound.sum()),
        text=f"{count_text(int(sound.sum()), 'kernel')} still running when the next one of the "
        f"stream begins{of_graphs}, by at most {milliseconds(overlap)}",
        effect="by design (programmatic dependent launch, branches of graphs): busy time counts "
        "it once, sums of kernel times twice",
        is_fault=False,
    )  # fmt: skip


_IDS = {GPU: "correlation", RUNTIME: "correlation", OPS: "external_id"}


def check_trace(
    tables: Mapping[str, pl.DataFrame], report: LoadReport, path: Path
) -> tuple[dict[str, pl.DataFrame], KeptFindings]:
    """GPU events, calls and operators as they can be believed, and what was found of one trace."""
    near = {name: without_far(table) for name, table in tables.items()}
    once = {name: without_duplicates(table, _IDS[name]) for name, table in near.items()}
    linked, calls, of_links = link_launches(once[GPU], once[RUNTIME], path)
    host = _window(calls) if len(calls) else None
    close = without_far_from_host(linked, host)
    cut, of_streams = check_streams(close, host)
    gpu, of_launches = check_launches(cut, calls)
    far = {name: len(table) - len(near[name]) for name, table in tables.items()}
    far[GPU] += len(linked) - len(close)
    twice = {name: len(table) - len(once[name]) for name, table in near.items()}
    what, effect = "far in time from all others", "left out of all answers"
    damage = [(report.cut.text, report.cut.effect)] if report.cut is not None else []
    damage += [(note.partition(": ")[2] or note, "what could not be read is in no answer")
               for note in replace(report, truncated_bytes=None).notes]  # fmt: skip
    found = (
        *(Finding("damaged_file", 1, *said) for said in damage),
        _event_finding(far, "far_timestamps", what, effect),
        _event_finding(twice, "duplicate_events", "recorded twice", "counted once"),
        *of_streams, *of_launches, unit_finding(close, calls), *of_links,
    )  # fmt: skip
    sound = {GPU: gpu, RUNTIME: calls, OPS: once[OPS]}
    windows = [_window(table) for table in sound.values() if len(table)]
    starts, ends = zip(*windows, strict=True) if windows else ((), ())
    kept = KeptFindings(
        findings=tuple(each for each in found if each is not None),
        corrected=frozenset(name for name, table in sound.items() if table is not tables[name]),
        window=(min(starts), max(ends)) if windows else None,
    )
    return sound, kept


def _window(events: pl.DataFrame) -> tuple[int, int]:
    """First start and last end of some events."""
    end = events.select((pl.col("ts_ns") + pl.col("dur_ns")).max()).item()
    return int(events["ts_ns"][0]), int(end)
