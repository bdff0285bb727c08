"""Step time breakdown: each moment of a step is given to one cause, as in TensorBoard.

Causes overlap: a kernel runs while the host launches the next one and a loader waits. So that
the parts add up to the step, the time of a cause is what no earlier cause of `CAUSES` covers: GPU
work first, as the step cannot be shorter than that, and the host's share is what the GPU does not
hide.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.base.arrays import Ints
from haiprof.base.intervals import Intervals, covered_lengths, difference, union
from haiprof.trace_analysis.annotations import GPU_CATEGORY
from haiprof.trace_analysis.classify import COMMUNICATION, COMPUTATION, MEMORY, with_kind
from haiprof.trace_analysis.temporal import gpu_events, union_of, with_launch
from haiprof.trace_format.kineto.rank_trace import STEP, Trace

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
_CPU_COLLECTIVE = r"^(?:gloo|mpi):"
_NAMED = ["name", "ts_ns", "dur_ns"]


def step_time_breakdown(trace: Trace, *, gpu_tail: bool = False) -> pl.DataFrame:
    """The time of each profiler step by cause.

    Source: torch_tb_profiler 0.4, overall_parser.py and event_parser.py. It leaves out the
    last steps where it holds them to be incomplete, and counts any kernel under a collective's
    operator as communication, where this one goes by the kernel.
    """
    roles = _roles(trace)
    steps = steps_with_gpu_tails(trace) if gpu_tail else _step_marks(trace)
    if steps.is_empty():
        steps = _whole(roles)
    starts, ends = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    parts = _split_by_cause(roles, starts, ends)
    wall = ends - starts
    other = wall - sum((part for part in parts.values() if part is not None), np.zeros_like(wall))
    columns = {
        "step": steps["step"], "start_ns": starts, "wall_ns": wall,
        **{f"{cause}_ns": part for cause, part in parts.items()}, "other_ns": other,
    }  # fmt: skip
    return pl.DataFrame(columns, schema=STEP_TIME_SCHEMA)


def _split_by_cause(
    roles: dict[str, Intervals | None], starts: Ints, ends: Ints
) -> dict[str, Ints | None]:
    """The time of each step that each cause gets; None where the cause was not recorded."""
    empty = np.zeros(0, dtype=np.int64)
    taken = Intervals(empty, empty)
    found: dict[str, Ints | None] = {}
    for cause in CAUSES:
        own = roles[cause]
        found[cause] = (
            None if own is None else covered_lengths(difference(own, taken), starts, ends)
        )
        if own is not None:
            taken = union(np.append(taken.starts, own.starts), np.append(taken.ends, own.ends))
    return found


def _roles(trace: Trace) -> dict[str, Intervals | None]:
    """When each cause was active, on any thread or device; None where it was not recorded."""
    gpu, runtime = with_kind(gpu_events(trace, None)), trace.runtime
    host = pl.concat(
        [
            trace.ops.select(_NAMED),
            trace.annotations.filter(pl.col("category") != GPU_CATEGORY).select(_NAMED),
        ]
    )
    loader, collective = _matching(host, _LOADER), _matching(host, _CPU_COLLECTIVE)
    other = host.filter(~pl.col("name").is_in(_names(host, rf"{_LOADER}|{_CPU_COLLECTIVE}")))
    work = other.filter(~pl.col("name").is_in(_names(other, STEP.pattern.replace(r"\Z", "$"))))
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
        "dataloader": (has_host, loader),
        "cpu_exec": (has_host, work),
    }
    return {cause: union_of(events) if known else None for cause, (known, events) in active.items()}


def _matching(events: pl.DataFrame, pattern: str) -> pl.DataFrame:
    return events.filter(pl.col("name").is_in(_names(events, pattern)))


def _names(events: pl.DataFrame, pattern: str) -> list[str]:
    """The names that match: there are far fewer names than events."""
    names = events["name"].unique().cast(pl.String)
    return names.filter(names.str.contains(pattern)).to_list()


def _step_marks(trace: Trace) -> pl.DataFrame:
    return trace.steps.select("step", "start_ns", "end_ns")


def steps_with_gpu_tails(trace: Trace) -> pl.DataFrame:
    """The steps, each until the last GPU event that it launched has ended.

    The mark of a step ends when the host has launched its work; on an asynchronous device that work
    still runs, and would be counted in the next step. So a step ends with its last GPU event, never
    before an earlier step does, and the next one begins there.
    """
    marks = _step_marks(trace)
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


def _whole(roles: dict[str, Intervals | None]) -> pl.DataFrame:
    """One step without a number: from the first to the last event of all; none without events."""
    real = [own for own in roles.values() if own is not None and len(own.starts)]
    first = min((int(own.starts[0]) for own in real), default=0)
    last = max((int(own.ends[-1]) for own in real), default=0)
    schema = {"step": pl.Int64, "start_ns": pl.Int64, "end_ns": pl.Int64}
    return pl.DataFrame([(None, first, last)] if real else [], schema=schema, orient="row")
