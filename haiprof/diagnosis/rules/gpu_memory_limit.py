"""The GPU's memory ran out and the job went on, grows from step to step, or is nearly full."""

from __future__ import annotations

from haiprof.base.units import bytes_text, duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import GPU_MEMORY_FULL_RATIO
from haiprof.run_analysis.gpu_memory import (
    LEAK_REMEDY,
    GpuMemorySeries,
    GpuOutOfMemory,
    growth_per_step,
)

RULE = "gpu_memory_limit"


def gpu_memory_limit(inputs: RuleInputs) -> Judgement:
    """Fires where an allocation failed and was caught, or what steps begin with grows steadily.

    A note where the peak is near the limit.
    """
    caught = {
        rank: failed for rank, failed in inputs.last_attempts.caught.items() if rank in inputs.world
    }
    if caught:
        rank = max(caught, key=lambda r: (caught[r].count, -r))
        return _caught_failure(rank, caught[rank])
    counted = {
        rank: series
        for rank, series in inputs.last_attempts.gpu_memory.items()
        if rank in inputs.world and series.limit_bytes > 0
    }
    if not counted:
        return Abstention(rule=RULE, why="no counts of a GPU's allocator")
    grown = {rank: growth for rank, s in counted.items() if (growth := growth_per_step(s))}
    if grown:
        rank = max(grown, key=lambda r: (grown[r] / counted[r].limit_bytes, -r))
        return _growing(rank, counted[rank], grown[rank], len(grown))
    rank = max(counted, key=lambda r: (_full_ratio(counted[r]), -r))
    return (
        _full(rank, counted[rank]) if _full_ratio(counted[rank]) >= GPU_MEMORY_FULL_RATIO else None
    )


def _caught_failure(rank: int, failed: GpuOutOfMemory) -> Finding:
    sizes = {
        "asked for": failed.requested_bytes,
        "allocated": failed.allocated_bytes,
        "reserved by the allocator": failed.reserved_bytes,
        "limit": failed.limit_bytes,
    }
    known = {name: float(size) for name, size in sizes.items() if size is not None}
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"rank {rank} ran {failed.text}; it went on",
        evidence=(
            Evidence(name="allocations that failed", value=float(failed.count), unit="count"),
            *(Evidence(name=name, value=size, unit="bytes") for name, size in known.items()),
        ),
        remedy=failed.remedy,
        confidence=0.9,
        rank=rank,
    )


def _full_ratio(series: GpuMemorySeries) -> float:
    return float(series.peak_bytes.max()) / series.limit_bytes


def _growing(rank: int, series: GpuMemorySeries, growth: float, count: int) -> Finding:
    peak = float(series.peak_bytes[-1])
    steps_left = max(series.limit_bytes - peak, 0.0) / growth
    steps = max(int(series.step[-1] - series.step[0]), 1)
    step_ns = float(series.time_ns[-1] - series.time_ns[0]) / steps
    left_ns = steps_left * step_ns
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"GPU memory grows by {bytes_text(growth)} per step on rank {rank}: its limit is "
        f"{duration_text(left_ns)} away",
        evidence=(
            Evidence(name="growth per step", value=growth, unit="bytes"),
            Evidence(name="allocated where the last step began",
                     value=float(series.allocated_bytes[-1]), unit="bytes"),
            Evidence(name="peak so far", value=peak, unit="bytes"),
            Evidence(name="limit", value=float(series.limit_bytes), unit="bytes"),
            Evidence(name="steps until then, if it goes on so", value=steps_left, unit="count"),
            Evidence(name="time until then, if it goes on so", value=left_ns, unit="ns"),
            Evidence(name="ranks that grow so", value=float(count), unit="count"),
        ),
        remedy=LEAK_REMEDY,
        confidence=0.85,
        rank=rank,
    )  # fmt: skip


def _full(rank: int, series: GpuMemorySeries) -> Finding:
    peak, limit = float(series.peak_bytes.max()), float(series.limit_bytes)
    return Finding(
        rule=RULE,
        severity="info",
        title=f"GPU memory is nearly full on rank {rank}: {ratio_text(peak / limit)} of it was "
        "allocated at the peak",
        evidence=(
            Evidence(name="peak", value=peak, unit="bytes"),
            Evidence(name="limit", value=limit, unit="bytes"),
            Evidence(name="reserved by the allocator", value=float(series.reserved_bytes[-1]),
                     unit="bytes"),
        ),
        remedy="a longer sequence or a larger batch will not fit; where batches differ in size, "
        "bound the largest, or checkpoint activations",
        confidence=0.9,
        rank=rank,
    )  # fmt: skip
