"""GPU memory over the steps of each rank, as its caching allocator counted where steps began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from haiprof.base.intervals import Ints
from haiprof.base.statistics import growth_p_value
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer

LEAK_REMEDY = (
    "look for tensors on the GPU that are kept from each step: losses and outputs in lists without "
    ".detach().cpu(), hooks that store activations, growing sequence lengths"
)
LEAST_POINTS = 8
GROWTH_P_VALUE = 0.01
GROWTH_RATIO = 0.05
"""Of the limit: what steps begin with has grown at least so much, or it is no growth of note."""
_COLUMNS = ("time_ns", "step", "allocated_bytes", "peak_bytes", "reserved_bytes", "limit_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemorySeries:
    """Of one rank's last attempt; an entry per reading, in order of time."""

    time_ns: Ints
    """On the rank's own clock."""
    step: Ints
    allocated_bytes: Ints
    """Where a step began: without its activations."""
    peak_bytes: Ints
    """The highest so far, or since the job's own reset."""
    reserved_bytes: Ints
    limit_bytes: int
    """What the process may take of its device."""


def gpu_memory_series(files: RunFiles) -> Mapping[int, GpuMemorySeries]:
    """By rank, where anything was read."""
    last = {rank.rank: rank for rank in sorted(files.ranks, key=lambda r: (r.rank, r.attempt))}
    found = {number: _series(rank) for number, rank in last.items()}
    return {number: series for number, series in found.items() if series is not None}


def growth_per_step(series: GpuMemorySeries) -> float | None:
    """Bytes per step by which what steps begin with grew, from the third reading on.

    The first steps allocate what stays: optimizer state, workspaces. None where it did not grow
    beyond chance (Mann-Kendall) by GROWTH_RATIO of the limit, or had come to rest.
    """
    steps, held = series.step[2:], series.allocated_bytes[2:].astype(np.float64)
    if len(held) < LEAST_POINTS or steps[-1] <= steps[0]:
        return None
    grown = float(held[-1] - held[0])
    if grown < GROWTH_RATIO * series.limit_bytes or growth_p_value(held) >= GROWTH_P_VALUE:
        return None
    if held[-1] - held[len(held) // 2] < grown / 5:
        return None
    return grown / float(steps[-1] - steps[0])


def _series(rank: RankFiles) -> GpuMemorySeries | None:
    rows = []
    for line in rank.of_type("gpu_memory"):
        row = [integer(line.get(name)) for name in _COLUMNS]
        if all(value is not None and value >= 0 for value in row):
            rows.append(row)
    if not rows:
        return None
    table = dict(zip(_COLUMNS, np.array(rows, dtype=np.int64).T, strict=True))
    return GpuMemorySeries(**{**table, "limit_bytes": int(table["limit_bytes"][-1])})
