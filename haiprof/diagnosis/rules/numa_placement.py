"""A rank's cores, its memory, its GPU or its network adapters are on different NUMA nodes."""

from __future__ import annotations

from haiprof.diagnosis.finding import Abstention, Finding, Judgement
from haiprof.diagnosis.numa_binding import find_misplacement
from haiprof.diagnosis.rule_inputs import RuleInputs

RULE = "numa_placement"


def numa_placement(inputs: RuleInputs) -> Judgement:
    """Fires where a rank's cores exclude its GPU's node, or most of its pages are elsewhere."""
    placed = [inputs.placements[rank] for rank in inputs.world if rank in inputs.placements]
    if not placed:
        return Abstention(rule=RULE, why="no placement of a rank was recorded")
    if not any(placement.cpu_nodes for placement in placed):
        return Abstention(rule=RULE, why="the NUMA nodes of the ranks' cores are not known")
    found = find_misplacement(placed)
    if found is None:
        return None
    return Finding(
        rule=RULE,
        severity="warning" if found.kind.weight >= 2 else "info",
        title=found.title,
        evidence=found.evidence,
        remedy=found.kind.remedy,
        confidence=0.7 if found.is_sure else 0.5,
        missing=("what it costs: counters of memory read from other nodes would say",),
        rank=found.ranks[0] if len(found.ranks) == 1 else None,
    )
