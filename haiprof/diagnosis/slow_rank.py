"""A slow rank's hardware beside the others': throttled, starved of cores, far memory."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from haiprof.base.medians import lower_median
from haiprof.base.units import NS_PER_S, ratio_text
from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.numa_binding import find_misplacement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    DRIFT_PHASE_RATIO,
    FAULT_NS,
    HARDWARE_DIFFERENCE_RATIO,
    SAME_COUNT_RATIO,
)

KEEP_MEMORY = (
    "memory is given back to the system and faulted in again in each step: keep it in the process "
    "(MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ of glibc; jemalloc or tcmalloc by "
    "LD_PRELOAD), or reuse the tensors"
)
"""Source: PyTorch's performance tuning guide, CPU specific optimizations."""
_THROTTLES = {
    "throttle_thermal_ratio": "temperature",
    "throttle_sw_thermal_ratio": "temperature",
    "throttle_hw_thermal_ratio": "temperature",
    "throttle_power_ratio": "its power cap",
    "throttle_power_brake_ratio": "the power brake",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is different about a slow rank's hardware."""

    cause: str
    """Slug: `throttled`, `waits_for_cores`, `far_memory` or `page_faults`."""
    text: str
    """For the title, with a leading comma."""
    remedy: str
    evidence: tuple[Evidence, ...]


def state_of(inputs: RuleInputs, rank: int, share: float) -> RankState | None:
    """The first difference that would make a rank slow; None where its hardware is as others'."""
    return (
        _find_throttling(inputs, rank)
        or _find_starvation(inputs, rank, share)
        or _far(inputs, rank)
        or _find_faults(inputs, rank, share)
    )


def _beyond(inputs: RuleInputs, metric: str, rank: int) -> float:
    """A rank's ratio beyond the lower-median rank's; 0 where it is not known."""
    values = inputs.counted.of(metric)
    if rank not in values or len(values) < 2:
        return 0.0
    return values[rank] - lower_median(values.values())


def _find_throttling(inputs: RuleInputs, rank: int) -> RankState | None:
    beyond = {name: _beyond(inputs, name, rank) for name in _THROTTLES}
    worst = max(beyond, key=lambda name: beyond[name])
    if beyond[worst] < HARDWARE_DIFFERENCE_RATIO:
        return None
    share = inputs.counted.of(worst)[rank]
    why = _THROTTLES[worst]
    return RankState(
        cause="throttled",
        text=f", its GPU is slowed by {why} {ratio_text(share)} of the time",
        remedy=f"check the GPU of rank {rank}: cooling, dust, its power limit (nvidia-smi -q -d "
        "PERFORMANCE,POWER); move the job off this node until then",
        evidence=(Evidence(name=f"rank {rank}: slowed by {why}", value=share, unit="ratio"),),
    )


def _find_starvation(inputs: RuleInputs, rank: int, share: float) -> RankState | None:
    """Waiting for cores must make most of what the rank loses.

    Ranks are compared by their wait for each second in which they could run: one that works more
    also waits more, and is not starved by that. One that works no more, and waits for longer by
    most of what it loses, is.
    """
    hungers = {r: _hunger(inputs, r) for r in inputs.core_waits}
    if rank not in hungers or len(hungers) < 2:
        return None
    wait, most = inputs.core_waits[rank], DRIFT_PHASE_RATIO * share
    beyond = hungers[rank] - lower_median(hungers.values())
    is_hungrier = beyond >= HARDWARE_DIFFERENCE_RATIO and wait >= most
    waits_on = wait - lower_median(inputs.core_waits.values()) >= most
    if not is_hungrier and not (waits_on and _works_on(inputs, rank) < most):
        return None
    return RankState(
        cause="waits_for_cores",
        text=f", it waits for a core {ratio_text(wait)} of the time",
        remedy=f"see what else runs on the cores of rank {rank} (top, another rank with the same "
        "affinity), and give it cores of its own",
        evidence=(Evidence(name=f"rank {rank}: waits for a core", value=wait, unit="ratio"),),
    )


def _works_on(inputs: RuleInputs, rank: int) -> float:
    """Cores that a rank uses beyond the typical one; infinite where that is not known."""
    if rank not in inputs.main_cores or len(inputs.main_cores) < 2:
        return float("inf")
    return inputs.main_cores[rank] - lower_median(inputs.main_cores.values())


def _hunger(inputs: RuleInputs, rank: int) -> float:
    """Of the time in which its main thread could run, the share in which it got no core."""
    wait = inputs.core_waits[rank]
    could = wait + min(inputs.main_cores.get(rank, 1.0), 1.0)
    return wait / could if could else 0.0


def _far(inputs: RuleInputs, rank: int) -> RankState | None:
    placed = find_misplacement(
        [inputs.placements[r] for r in inputs.world if r in inputs.placements]
    )
    if placed is None or placed.ranks != [rank]:
        return None
    return RankState(
        cause="far_memory",
        text=", it runs far from its GPU or memory",
        remedy=placed.kind.remedy,
        evidence=placed.evidence,
    )


def _find_faults(inputs: RuleInputs, rank: int, share: float) -> RankState | None:
    """The same work with far more page faults, which take most of what it loses.

    What the allocator keeps is chance. Larger inputs have more of them too: where sizes are not
    known, nothing is said.
    """
    if not _is_given_the_same(inputs, rank):
        return None
    beyond = _beyond(inputs, "page_fault_count_per_s", rank)
    if beyond * FAULT_NS / NS_PER_S < DRIFT_PHASE_RATIO * share:
        return None
    own = inputs.counted.of("page_fault_count_per_s")[rank]
    return RankState(
        cause="page_faults",
        text=f", it has {own:,.0f} page faults per second, {beyond:,.0f} more than they",
        remedy=KEEP_MEMORY,
        evidence=(Evidence(name=f"rank {rank}: page faults per second", value=own, unit="count"),),
    )


def _is_given_the_same(inputs: RuleInputs, rank: int) -> bool:
    """Whether a rank's inputs are known, and no larger than the typical rank's."""
    sizes = inputs.last_attempts.input_sizes.group_by("rank").agg(pl.col("number_count").mean())
    known = {rank: size for rank, size in sizes.rows() if rank in inputs.world}
    if rank not in known or len(known) < len(inputs.world):
        return False
    return bool(known[rank] <= (1 + SAME_COUNT_RATIO) * lower_median(known.values()))
