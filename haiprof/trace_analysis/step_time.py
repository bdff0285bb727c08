"""Step time by cause, as in TensorBoard, and named ranges: their time, kernels and lanes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.intervals import Intervals, Ints, covered_lengths, difference, union
from haiprof.base.safe_files import MadeFolder
from haiprof.trace_analysis.call_tree import innermost_at, take
from haiprof.trace_analysis.device_time import (
    COMMUNICATION,
    COMPUTATION,
    DURATION_STATISTICS,
    MEMORY,
    Steps,
    gpu_events,
    step_window,
    union_of,
    with_kind,
    with_launch,
)
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.decode import event_texts, with_number, write_copy
from haiprof.trace_format.kineto.events import GPU_RANGES, HOST_BACKENDS, LANE, TEXTS
from haiprof.trace_format.kineto.rank_trace import STEP_NAME, Trace
from haiprof.trace_format.kineto.text import TraceText

_RANGE = ["category", "device", "name"]


def annotation_breakdown(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """Count and time of each named range: `record_function`, optimizer, loader, collectives.

    Returns:
        One row per category (CPU or GPU), device and name: `category`, `device`, `name`, `count`,
        `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`, `covered_ns`.

    Source: HTA get_gpu_user_annotation_breakdown, of both categories at once; its statistics
    are wrong where a limit takes effect (D2), and it rounds ns to us (D1).
    """
    ranges = _annotations(trace, steps).sort(*_RANGE, "ts_ns")
    end = pl.col("ts_ns") + pl.col("dur_ns")
    before = end.cum_max().shift(1).over(_RANGE)
    added = (end - pl.max_horizontal("ts_ns", before)).clip(0)
    found = ranges.with_columns(added_ns=added).group_by(_RANGE)
    return (
        found.agg(**DURATION_STATISTICS, covered_ns=pl.col("added_ns").sum())
        .with_columns(pl.col("category", "name").cast(pl.String))
        .sort("category", "device", -pl.col("sum_ns"), "name")
    )


def annotation_kernels(trace: Trace, steps: Steps = None) -> pl.DataFrame:
    """The GPU events of each annotation: which kernels a named piece of code ran.

    Returns:
        One row per device, annotation and kernel: `device`, `annotation` (null outside of all),
        `kind`, `name`, `count`, `sum_ns`, `min_ns`, `max_ns`, `mean_ns`, `std_ns`.

    Source: HTA get_gpu_kernels_with_user_annotations, which takes any overlap for
    containment, and of several ranges the one that it meets last.
    """
    gpu = with_annotation(with_kind(gpu_events(trace, steps)), trace.annotations)
    found = gpu.group_by("device", "annotation", "kind", "name").agg(**DURATION_STATISTICS)
    return found.with_columns(pl.col("annotation", "name").cast(pl.String)).sort(
        "device", -pl.col("sum_ns"), "annotation", "name"
    )


def with_annotation(gpu: pl.DataFrame, annotations: pl.DataFrame) -> pl.DataFrame:
    """GPU events with the innermost `annotation` around each, null outside of all."""
    on_gpu = annotations.filter(pl.col("category") == GPU_RANGES)
    ranges = on_gpu.with_columns(device="pid", stream="tid")
    by_stream = ranges.partition_by("device", "stream", as_dict=True, maintain_order=True)
    empty = ranges.clear()
    parts = [gpu.clear().with_columns(annotation=empty["name"])]
    for key, events in gpu.group_by("device", "stream", maintain_order=True):
        own = by_stream.get(key, empty)
        starts = own["ts_ns"].to_numpy()
        place = innermost_at(starts, starts + own["dur_ns"].to_numpy(), events["ts_ns"].to_numpy())
        parts.append(events.with_columns(annotation=take(own["name"], place)))
    return pl.concat(parts)


def _annotations(trace: Trace, steps: Steps) -> pl.DataFrame:
    """Annotations with their device, those of some steps only."""
    on_gpu = pl.col("category") == GPU_RANGES
    ranges = pl.concat([trace.annotations, trace.phase_ranges])
    every = ranges.with_columns(device=pl.when(on_gpu).then("pid"))
    if steps is None:
        return every
    start_ns, end_ns = step_window(trace, steps)
    origins = every.filter(~on_gpu, pl.col("external_id") > 0).group_by("external_id", "name")
    known = every.join(
        origins.agg(origin_ns=pl.col("ts_ns").min()), on=["external_id", "name"], how="left"
    )
    when = pl.when(on_gpu).then(pl.coalesce("origin_ns", "ts_ns")).otherwise("ts_ns")
    return known.filter(when.is_between(start_ns, end_ns, closed="left"))


CAUSES = ("kernel", "memcpy", "memset", "communication", "runtime", "dataloader", "cpu_exec")
"""Of concurrent causes the first one counts; time that none covers is `other`."""

STEP_TIME_SCHEMA = {
    "step": pl.Int64,
    "start_ns": pl.Int64,
    "wall_ns": pl.Int64,
    **{f"{cause}_ns": pl.Int64 for cause in (*CAUSES, "other")},
}
_COPIES = ("gpu_memcpy", "Memcpy")
_LOADER = r"^enumerate\((?:DataLoader\)#.*\.__next__$|DataPipe\)#)"
_CPU_COLLECTIVE = f"^(?:{HOST_BACKENDS}):"
_NAMED = ["name", "ts_ns", "dur_ns"]


def step_time_breakdown(trace: Trace, *, gpu_tail: bool = False) -> pl.DataFrame:
    """The time of each profiler step by cause.

    Args:
        trace: Of one rank.
        gpu_tail: A step lasts until the last GPU event that it launched, as in TensorBoard.

    Returns:
        One row per step: `step`, `start_ns`, `wall_ns`, and its parts, which add up to it:
        `kernel_ns`, `memcpy_ns`, `memset_ns`, `communication_ns`, `runtime_ns`, `dataloader_ns`,
        `cpu_exec_ns`, `other_ns`.

    Source: torch_tb_profiler 0.4, overall_parser.py and event_parser.py. It leaves out the
    last steps where it holds them to be incomplete, and counts any kernel under a collective's
    operator as communication, where this one goes by the kernel.
    """
    roles = _roles(trace)
    steps = steps_with_gpu_tails(trace) if gpu_tail else trace.steps
    if steps.is_empty():
        # One step without a number: from the first to the last event of all; none without events.
        real = [own for own in roles.values() if own is not None and len(own.starts)]
        first = min((int(own.starts[0]) for own in real), default=0)
        last = max((int(own.ends[-1]) for own in real), default=0)
        schema = {"step": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64}
        steps = pl.DataFrame([(None, first, last)] if real else [], schema=schema, orient="row")
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    # The time of each step that each cause gets; None where the cause was not recorded.
    empty = np.zeros(0, dtype=np.int64)
    taken = Intervals(empty, empty)
    parts: dict[str, Ints | None] = {}
    for cause in CAUSES:
        own = roles[cause]
        parts[cause] = (
            None if own is None else covered_lengths(difference(own, taken), starts, ends)
        )
        if own is not None:
            taken = union(np.append(taken.starts, own.starts), np.append(taken.ends, own.ends))
    wall = ends - starts
    other = wall - sum((part for part in parts.values() if part is not None), np.zeros_like(wall))
    columns = {
        "step": steps["step"], "start_ns": starts, "wall_ns": wall,
        **{f"{cause}_ns": part for cause, part in parts.items()}, "other_ns": other,
    }  # fmt: skip
    return pl.DataFrame(columns, schema=STEP_TIME_SCHEMA)


def _roles(trace: Trace) -> dict[str, Intervals | None]:
    """When each cause was active, on any thread or device; None where it was not recorded."""
    gpu, runtime = with_kind(gpu_events(trace, None)), trace.runtime
    host = pl.concat([trace.ops.select(_NAMED), trace.host_ranges.select(_NAMED)])
    collective = host.filter(has_name(host, _CPU_COLLECTIVE))
    no_work = rf"{_LOADER}|{_CPU_COLLECTIVE}|{STEP_NAME}"
    copies = pl.col("category").cast(pl.String).is_in(_COPIES)
    memory = gpu.filter(pl.col("kind") == MEMORY)
    communication = gpu.filter(pl.col("kind") == COMMUNICATION).select(_NAMED)
    has_gpu, has_host = not gpu.is_empty(), not host.is_empty()
    active = {
        "kernel": (has_gpu, gpu.filter(pl.col("kind") == COMPUTATION)),
        "memcpy": (has_gpu, memory.filter(copies)),
        "memset": (has_gpu, memory.filter(~copies)),
        "communication": (
            has_gpu or not collective.is_empty(),
            pl.concat([communication, collective]),
        ),
        "runtime": (not runtime.is_empty(), runtime),
        "dataloader": (has_host, host.filter(has_name(host, _LOADER))),
        "cpu_exec": (has_host, host.filter(~has_name(host, no_work))),
    }
    return {cause: union_of(events) if known else None for cause, (known, events) in active.items()}


def steps_with_gpu_tails(trace: Trace) -> pl.DataFrame:
    """The steps, each until the last GPU event that it launched has ended.

    The mark of a step ends when the host has launched its work; on an asynchronous device that work
    still runs, and would be counted in the next step. So a step ends with its last GPU event, never
    before an earlier step does, and the next one begins there.
    """
    marks = trace.steps.select("step", "start_ns", "end_ns")
    gpu = with_launch(gpu_events(trace, None), trace.runtime)
    if marks.is_empty() or gpu.is_empty():
        return marks
    starts, ends = marks["start_ns"].to_numpy(), marks["end_ns"].to_numpy()
    launch = gpu["launch_ns"].fill_null(int(starts[0]) - 1).to_numpy()
    begin = gpu["ts_ns"].to_numpy()
    finish = begin + gpu["dur_ns"].to_numpy()
    step = np.searchsorted(starts, launch, side="right") - 1
    inside = (step >= 0) & (launch < ends[step])
    last = ends.copy()
    np.maximum.at(last, step[inside], finish[inside])
    last = np.maximum.accumulate(last)
    # Work launched before the first step that runs into it ends before that step's own work begins.
    first = begin[inside & (step == 0)]
    earlier = finish[~inside & (finish < first.min())] if len(first) else first
    free = np.append(earlier.max(initial=starts[0]), last[:-1])
    return marks.with_columns(start_ns=pl.Series(np.maximum(starts, free)), end_ns=pl.Series(last))


@contextlib.contextmanager
def with_range_lanes(path: Path) -> Iterator[Path]:
    """The trace with its ranges (profiler steps, `record_function`) beside their thread.

    With Python stacks a range begins inside the call that opens it and ends after that call:
    neither contains the other, and Perfetto drops the range. In a lane of its own it is shown
    unchanged.
    """
    try:
        trace = Trace(path)
        ranges = pl.concat([trace.host_ranges, trace.phase_ranges])
        threads = ranges.select("pid", "tid").drop_nulls().unique().sort("pid", "tid")
        # Process and thread of every lane; none without Python functions.
        known = () if trace.python.is_empty() else threads.iter_rows()
        lanes = [(pid, tid) for pid, tid in known if 0 <= tid < LANE]
    except TraceFormatError:
        lanes = []
    if not lanes or trace.report.lost_count:
        yield path
        return
    with MadeFolder.temporary("haiprof-perfetto-") as folder:
        copy, text = folder / "trace.json.gz", TraceText(path)
        write_copy(copy, text, _pieces(ranges, text, lanes))
        yield copy


def _pieces(ranges: pl.DataFrame, text: TraceText, lanes: list[tuple[int, int]]) -> Iterator[bytes]:
    """Yields the names of the lanes, then all events, those of ranges in their lane."""
    threads = pl.DataFrame(lanes, schema=["pid", "tid"], orient="row")
    moved = ranges.join(threads, on=["pid", "tid"], how="semi").sort("event")
    waiting = list(moved.select("event", "tid").iter_rows())[::-1]
    first = 0
    yield b",\n".join(
        json.dumps({"ph": "M", "name": "thread_name", "pid": pid, "tid": LANE + tid, "ts": 0,
                    "args": {"name": f"ranges of thread {tid}"}}).encode()
        for pid, tid in lanes
    )  # fmt: skip
    for piece in event_texts(text):
        events = [bytes(one) for one in TEXTS.decode(b"[" + piece + b"]")]
        while waiting and waiting[-1][0] < first + len(events):
            place, tid = waiting.pop()
            events[place - first] = with_number(events[place - first], "tid", LANE + tid)
        first += len(events)
        yield b",\n".join(events)
