"""The tables that SQL can ask about functions: functions, the totals of ranks, who is late."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

import polars as pl

from haiprof.trace_analysis.arrival_lateness import LATENESS_SCHEMA
from haiprof.trace_analysis.patterns.worker import FUNCTIONS_SCHEMA, TOTALS_SCHEMA

if TYPE_CHECKING:
    from haiprof.trace_analysis.patterns.gather import Patterns

Schema = Mapping[str, "type[pl.DataType]"]

_KIND_RATIO = "of the window in which {} ran and nothing above it did"
FUNCTION_TABLES: dict[str, tuple[str, Schema, dict[str, str]]] = {
    "functions": (
        "what bounds each rank, function by function (haiprof functions)",
        {
            "rank": pl.Int64, **FUNCTIONS_SCHEMA,
            "wait_ns": pl.Int64, "transfer_ns": pl.Int64, "missing": pl.String,
        },
        {
            "rank": "of the trace",
            "kind": "gpu-compute, communication, memory, runtime or python",
            "type": "of a communication, such as ring all_reduce",
            "name": "of the kernel, copy or call; of Python root|...|leaf",
            "count": "of calls that reach into the window",
            "total_ns": "of those calls",
            "median_ns": "of those calls",
            "covered_ns": "in which it ran; of a call stack its own",
            "bottleneck_ns": "in which it ran and nothing of a kind above it did",
            "share_ratio": "covered_ns of the window",
            "bottleneck_ratio": "bottleneck_ns of the window",
            "occupancy_ratio": "estimated occupancy, a mean over its time",
            "occupancy_std": "its deviation",
            "bandwidth_bytes_per_s": "of a copy; of a communication the bus bandwidth",
            "bandwidth_std_bytes_per_s": "its deviation",
            "median_block_count": "blocks of a kernel's launches; null where grids are missing",
            "wait_ns": "of a communication: for the last rank",
            "transfer_ns": "of a communication: after the last rank came",
            "missing": "why a communication has no bandwidth",
        },
    ),
    "rank_totals": (
        "what each kind of function takes of a rank's window (haiprof functions)",
        {"rank": pl.Int64, **TOTALS_SCHEMA},
        {
            "rank": "of the trace",
            "window_ns": "what was judged",
            "gpu_compute_ratio": _KIND_RATIO.format("a computing kernel"),
            "communication_ratio": _KIND_RATIO.format("communication"),
            "memory_ratio": _KIND_RATIO.format("a copy or set"),
            "runtime_ratio": _KIND_RATIO.format("a call of the CUDA runtime"),
            "python_ratio": _KIND_RATIO.format("a Python function or operator"),
            "utilization_ratio": "of the window in which a computing kernel ran",
            "sm_efficiency_ratio": "estimated, from blocks per SM",
            "occupancy_ratio": "estimated, over the time of kernels",
            "overlap_ratio": "of communication that computing hides",
            "gpu_name": "of the first GPU",
            "host": "node; only haiprof records it",
            "has_gpu": "GPU events were recorded",
            "has_python": "Python stacks were recorded",
        },
    ),
    "lateness": (
        "who begins its collectives later than the others of its group",
        LATENESS_SCHEMA,
        {
            "rank": "of the trace",
            "process_group": "the group in which it is latest",
            "part": "of the job that the group serves",
            "late_ns": "per step, negative: earlier",
            "low_ns": "of its 95 % interval; null: too few steps",
            "high_ns": "of its 95 % interval",
            "clock_ns": "of it that may be the clocks'",
            "step_count": "steps",
            "collective_count": "collectives",
            "is_late": "beyond chance",
            "said": "the answer in words",
        },
    ),
}  # fmt: skip


def function_frames(patterns: Callable[[], Patterns]) -> dict[str, Callable[[], pl.DataFrame]]:
    """The rows of each table; patterns are computed when the first is asked for."""
    found = cache(patterns)
    return {
        "functions": lambda: found().functions,
        "rank_totals": lambda: found().totals,
        "lateness": lambda: found().lateness,
    }
