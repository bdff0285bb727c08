"""A slow rank's hardware beside the others': throttled, starved of cores, far memory."""

from __future__ import annotations

from dataclasses import dataclass

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Evidence
from haiprof.diagnosis.numa_binding import find_misplacement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import DRIFT_PHASE_RATIO, HARDWARE_DIFFERENCE_RATIO

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
    """Slug: `throttled`, `waits_for_cores` or `far_memory`."""
    text: str
    """For the title, with a leading comma."""
    remedy: str
    evidence: tuple[Evidence, ...]


def state_of(inputs: RuleInputs, rank: int, share: float) -> RankState | None:
    """The first difference that would make a rank slow; None where its hardware is as others'.

    Args:
        inputs: The run.
        rank: The slow one.
        share: What it loses, of a step.
    """
    return (
        _find_throttling(inputs, rank)
        or _find_starvation(inputs, rank, share)
        or _far(inputs, rank)
    )


def _beyond(inputs: RuleInputs, metric: str, rank: int) -> float:
    """A rank's ratio beyond the lower-median rank's; 0 where it is not known."""
    values = inputs.counted.of(metric)
    if rank not in values or len(values) < 2:
        return 0.0
    return values[rank] - sorted(values.values())[(len(values) - 1) // 2]


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
    also waits more, and is not starved by that.
    """
    hungers = {r: _hunger(inputs, r) for r in inputs.core_waits}
    if rank not in hungers or len(hungers) < 2:
        return None
    wait = inputs.core_waits[rank]
    beyond = hungers[rank] - sorted(hungers.values())[(len(hungers) - 1) // 2]
    if beyond < HARDWARE_DIFFERENCE_RATIO or wait < DRIFT_PHASE_RATIO * share:
        return None
    return RankState(
        cause="waits_for_cores",
        text=f", it waits for a core {ratio_text(wait)} of the time",
        remedy=f"see what else runs on the cores of rank {rank} (top, another rank with the same "
        "affinity), and give it cores of its own",
        evidence=(Evidence(name=f"rank {rank}: waits for a core", value=wait, unit="ratio"),),
    )


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
