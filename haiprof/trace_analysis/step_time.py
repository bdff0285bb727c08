"""Steps by cause, on the device and on a time line; named ranges: time, kernels and lanes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import (
    Intervals,
    Ints,
    complement,
    covered_lengths,
    difference,
    intersection,
    union,
)
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
from haiprof.trace_analysis.host_activity import ACTIVITIES, LOADER_NAME, OUTSIDE, read_host, split
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.decode import event_texts, with_number, write_copy
from haiprof.trace_format.kineto.events import GPU_RANGES, HOST_BACKENDS, LANE
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
    found = ranges.with_columns(added_ns=added).group_by(_RANGE).agg(
        **DURATION_STATISTICS, covered_ns=pl.col("added_ns").sum()
    ).with_columns(pl.col("category", "name").cast(pl.String))  # fmt: skip
    return found.sort("category", "device", -pl.col("sum_ns"), "name")


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
    "step": pl.Int64, "start_ns": pl.Int64, "wall_ns": pl.Int64,
    **{f"{cause}_ns": pl.Int64 for cause in (*CAUSES, "other")},
}  # fmt: skip
_COPIES = ("gpu_memcpy", "Memcpy")
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
    # The time of each step that each cause gets; null where the cause was not recorded.
    taken, other = Intervals(starts[:0], starts[:0]), ends - starts
    parts: dict[str, Ints | None] = dict.fromkeys(CAUSES)
    for cause, own in roles.items():
        if own is not None:
            parts[cause] = part = covered_lengths(difference(own, taken), starts, ends)
            taken = union(np.append(taken.starts, own.starts), np.append(taken.ends, own.ends))
            other = other - part
    columns = {
        "step": steps["step"], "start_ns": starts, "wall_ns": ends - starts,
        **{f"{cause}_ns": part for cause, part in parts.items()}, "other_ns": other,
    }  # fmt: skip
    return pl.DataFrame(columns, schema=STEP_TIME_SCHEMA)


def _roles(trace: Trace) -> dict[str, Intervals | None]:
    """When each of CAUSES was active, on any thread or device; None where it was not recorded."""
    gpu, runtime = with_kind(gpu_events(trace, None)), trace.runtime
    host = pl.concat([trace.ops.select(_NAMED), trace.host_ranges.select(_NAMED)])
    collective = host.filter(has_name(host, _CPU_COLLECTIVE))
    no_work = rf"{LOADER_NAME}|{_CPU_COLLECTIVE}|{STEP_NAME}"
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
        "dataloader": (has_host, host.filter(has_name(host, LOADER_NAME))),
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


_STEP_COLUMNS = ("step", "number", "start_ns", "end_ns", "own_ns", "mark_ns")


def step_windows(trace: Trace) -> pl.DataFrame:
    """Steps as the device has them; what lies between two that follow each other is the first's."""
    marks = trace.steps
    if marks.is_empty():
        window = trace.checked.window
        if len(trace.gpu):
            first = with_launch(trace.gpu.head(1), trace.runtime)["launch_ns"][0]
            start, end = int(trace.gpu["ts_ns"][0]), trace.gpu["ts_ns"] + trace.gpu["dur_ns"]
            window = min(start, start if first is None else int(first)), int(end.max())  # type: ignore[arg-type]
        whole = [(0, None, *window, *[window[1] - window[0]] * 2)] if window else []
        return pl.DataFrame(whole, schema=dict.fromkeys(_STEP_COLUMNS, pl.Int64), orient="row")
    follows = pl.col("step").shift(-1) == pl.col("step") + 1
    return steps_with_gpu_tails(trace).select(
        step=pl.int_range(pl.len(), dtype=pl.Int64), number="step", start_ns="start_ns",
        end_ns=pl.when(follows).then(pl.col("start_ns").shift(-1)).otherwise("end_ns"),
        own_ns=pl.col("end_ns") - pl.col("start_ns"), mark_ns=marks["end_ns"] - marks["start_ns"],
    )  # fmt: skip


IDLE_LANE, HOST_LANE = "GPU idle", "host"
_LANE_LIMIT = 6
_PIECES = 600  # of the step: what is shorter is not seen
NAMED_RATIO = 0.04  # of the step: a shorter bar has no room for a name
TIMELINE_SCHEMA = {
    "lane": pl.String, "kind": pl.String, "name": pl.String, "start_ns": pl.Int64,
    "dur_ns": pl.Int64, "is_one": pl.Boolean,
}  # fmt: skip


def timeline(trace: Trace, steps: tuple[int, int] | None = None) -> pl.DataFrame:
    """The step of a median length: streams with most work first, gaps, and the training thread.

    Returns:
        One row per bar: `lane` (`stream 7`, `GPU idle`, `host`), `kind` (of device work, `idle`, or
        the host's activity), `name` of the longest event in it, `start_ns` since the step began,
        `dur_ns`, `is_one` (one event, not many short ones); and of the step `step` (null without
        profiler steps), `step_ns`, `idle_ns`, and the longest gap's `gap_ns`, `gap_start_ns`.
    """
    windows = step_windows(trace)
    if steps is not None:
        windows = windows.filter(pl.col("number").is_between(*steps, closed="left"))
    if trace.gpu.is_empty() or windows.is_empty():
        raise MissingDataError(f"{trace.path}: no GPU event in it")
    lengths = (windows["end_ns"] - windows["start_ns"]).arg_sort()
    row = windows.row(int(lengths[(len(lengths) - 1) // 2]), named=True)
    start, end = row["start_ns"], row["end_ns"]
    several = trace.gpu["device"].n_unique() > 1
    lane = pl.format("GPU {} · stream {}", "device", "stream") if several else pl.format(
        "stream {}", "stream"
    )  # fmt: skip
    begin = pl.max_horizontal("ts_ns", start)
    events = with_kind(trace.gpu).select(
        lane=lane, kind="kind", name=pl.col("name").cast(pl.String), start_ns=begin,
        dur_ns=pl.min_horizontal(pl.col("ts_ns") + pl.col("dur_ns"), end) - begin,
    ).filter(pl.col("dur_ns") > 0)  # fmt: skip
    busiest = events.group_by("lane").agg(pl.col("dur_ns").sum()).sort("dur_ns", descending=True)
    shown = events.filter(pl.col("lane").is_in(busiest["lane"].head(_LANE_LIMIT).implode()))
    busy = union(events["start_ns"].to_numpy(), (events["start_ns"] + events["dur_ns"]).to_numpy())
    whole = Intervals(np.array([start]), np.array([end]))
    gaps = intersection(complement(busy), whole)
    lengths_ns = gaps.ends - gaps.starts
    idle = pl.DataFrame({"start_ns": gaps.starts, "dur_ns": lengths_ns}).with_columns(
        lane=pl.lit(IDLE_LANE), kind=pl.lit("idle"), name=pl.lit("idle")
    )
    longest = idle.sort("dur_ns", descending=True, maintain_order=True).head(1)
    parts = [
        _draw(part, start, end)
        for part in (*shown.partition_by("lane"), idle, _host_events(trace, whole))
    ]
    order = {name: at for at, name in enumerate([*busiest["lane"], IDLE_LANE, HOST_LANE])}
    rows = pl.concat(parts).sort(pl.col("lane").replace_strict(order), "start_ns")
    typed = [pl.col(name).cast(dtype) for name, dtype in TIMELINE_SCHEMA.items()]
    return rows.select(typed).with_columns(
        start_ns=pl.col("start_ns") - start,
        step=pl.lit(row["number"], pl.Int64), step_ns=pl.lit(end - start, pl.Int64),
        idle_ns=pl.lit(int(lengths_ns.sum()), pl.Int64),
        gap_ns=pl.lit(next(iter(longest["dur_ns"]), None), pl.Int64),
        gap_start_ns=pl.lit(next(iter(longest["start_ns"] - start), None), pl.Int64),
    )  # fmt: skip


def _host_events(trace: Trace, window: Intervals) -> pl.DataFrame:
    """What the training thread did: pieces between two of its events' edges."""
    host = read_host(trace)
    moments = host.main_moments
    cut = split(window.starts, window.ends, moments.edges)
    rows = moments.rows[cut.segment + 1]
    kind = np.where(rows >= 0, np.append(host.activity, 0)[rows], ACTIVITIES.index(OUTSIDE))
    return pl.DataFrame({
        "lane": [HOST_LANE] * len(rows), "kind": [ACTIVITIES[each] for each in kind],
        "name": host.name_at(rows), "start_ns": cut.starts, "dur_ns": cut.ends - cut.starts,
    }, schema=dict(list(TIMELINE_SCHEMA.items())[:5]))  # fmt: skip


def _draw(lane: pl.DataFrame, start: int, end: int) -> pl.DataFrame:
    """Bars of one lane as they can be seen; events long enough for a name stay alone."""
    edges = np.linspace(start, end, _PIECES + 1).round().astype(np.int64)
    begins, lengths = lane["start_ns"].to_numpy(), lane["dur_ns"].to_numpy()
    own = np.where(lengths >= NAMED_RATIO * (end - start), np.arange(len(lengths)), -1)
    cut = split(begins, begins + lengths, edges)
    inside = np.flatnonzero((cut.segment >= 0) & (cut.segment < _PIECES) & (cut.ends > cut.starts))
    of, piece = cut.of[inside], cut.segment[inside]
    pieces = lane[of].select("lane", "kind", "name", longest="dur_ns").with_columns(
        piece=pl.Series(piece), own=pl.Series(own[of]),
        ns=pl.Series((cut.ends - cut.starts)[inside]),
        start_ns=pl.Series(edges[piece]), end_ns=pl.Series(edges[piece + 1]),
    )  # fmt: skip
    summed = pieces.sort("longest", descending=True).group_by("piece", "kind", "own").agg(
        pl.col("lane", "name", "longest", "start_ns", "end_ns").first(), pl.col("ns").sum()
    )  # fmt: skip
    is_busy = 2 * pl.col("ns").sum().over("piece") >= pl.col("end_ns") - pl.col("start_ns")
    shown = summed.filter(is_busy).sort("piece", -pl.col("ns"), "kind", "own")
    shown = shown.unique("piece", keep="first", maintain_order=True)
    same = [pl.col(name) == pl.col(name).shift(1) for name in ("kind", "own")]
    follows = pl.all_horizontal(pl.col("start_ns") == pl.col("end_ns").shift(1), *same)
    bars = shown.with_columns(bar=(~follows.fill_null(value=False)).cum_sum())
    return bars.sort("longest", descending=True).group_by("bar").agg(
        pl.col("lane", "kind", "name").first(), pl.col("start_ns").min(),
        dur_ns=pl.col("end_ns").max() - pl.col("start_ns").min(),
        is_one=pl.col("own").first() >= 0,
    ).select(list(TIMELINE_SCHEMA))  # fmt: skip


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
    yield b",\n".join(
        json.dumps({"ph": "M", "name": "thread_name", "pid": pid, "tid": LANE + tid, "ts": 0,
                    "args": {"name": f"ranges of thread {tid}"}}).encode()
        for pid, tid in lanes
    )  # fmt: skip
    for first, events in event_texts(text):
        while waiting and waiting[-1][0] < first + len(events):
            place, tid = waiting.pop()
            events[place - first] = with_number(events[place - first], "tid", LANE + tid)
        yield b",\n".join(events)
