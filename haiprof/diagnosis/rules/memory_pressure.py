"""The node has too little memory: tasks wait for it."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import AVAILABLE_RATIO, PRESSURE_RATIO

RULE = "memory_pressure"


def memory_pressure(inputs: RuleInputs) -> Judgement:
    """Fires where tasks wait for memory a tenth of the time, or the node swaps with little free."""
    nodes = {host: means.get(None, {}) for host, means in inputs.counted.nodes.items()}
    judged = {
        host: node
        for host, node in nodes.items()
        if node.get("pressure_memory_some_ratio") is not None
        or node.get("swap_in_bytes_per_s") is not None
    }
    if not judged:
        return Abstention(rule=RULE, why="neither memory pressure nor swapping was recorded")
    host = max(judged, key=lambda h: (judged[h].get("pressure_memory_some_ratio") or 0.0, h))
    node = judged[host]
    pressure, swapped = node.get("pressure_memory_some_ratio"), node.get("swap_in_bytes_per_s")
    available, total = node.get("memory_available_bytes"), node.get("memory_total_bytes")
    free = available / total if available is not None and total else None
    swaps = bool(swapped) and free is not None and free < AVAILABLE_RATIO
    if (pressure or 0.0) < PRESSURE_RATIO and not swaps:
        return None
    faults = inputs.counted.of("major_page_fault_count_per_s")
    what = f"tasks wait for memory {ratio_text(pressure)} of the time" if not swaps else "it swaps"
    return Finding(
        rule=RULE,
        severity="critical" if swaps else "warning",
        title=f"memory is short on {host}: {what}",
        evidence=(
            Evidence(name="some task waits for memory", value=pressure, unit="ratio"),
            Evidence(name="memory available", value=free, unit="ratio"),
            Evidence(name="read back from swap", value=swapped, unit="bytes/s"),
            Evidence(
                name="page faults from storage, all ranks",
                value=sum(faults.values()) if faults else None,
                unit="count/s",
            ),
        ),
        remedy="fewer or leaner DataLoader workers (each holds its own copies), a smaller cache or "
        "shuffle buffer, memory maps in place of loading files whole, or a node with more memory",
        confidence=0.85,
        lost_ratio=pressure,
    )
