"""A rank has cores of its own, and too few of them for its threads and workers."""

from __future__ import annotations

from haiprof.analysis.placement import Placement, sharing_groups
from haiprof.diagnosis.cores import (
    NO_PLACEMENT,
    NO_WAIT,
    Contention,
    contention,
    ranks_text,
    severity_of_wait,
)
from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.units import ratio_text

RULE = "too_few_cores"


def too_few_cores(facts: Facts) -> Judgement:
    """Fires where a rank with more threads than cores fills its cores and waits for them.

    Ranks that share cores are `shared_cores`' business; a limit in cores, `cpu_throttled`'s.
    """
    placed = [facts.placements[rank] for rank in facts.world if rank in facts.placements]
    if not placed:
        return Abstention(rule=RULE, why=NO_PLACEMENT)
    alone = [group[0] for group in sharing_groups(placed) if len(group) == 1]
    if not any(placement.rank in facts.core_waits for placement in placed):
        return Abstention(rule=RULE, why=NO_WAIT)
    judged = [(placement, _contention(facts, placement)) for placement in alone]
    found = [(placement, measured) for placement, measured in judged if measured is not None]
    if not found:
        return None
    worst, measured = max(found, key=lambda pair: pair[1].wait_ratio)
    return _finding(facts, worst, measured, ranks=[placement.rank for placement, _ in found])


def _contention(facts: Facts, placement: Placement) -> Contention | None:
    cores = len(placement.allowed_cpus or ())
    threads = placement.thread_count or 0
    if max(threads, facts.process_counts.get(placement.rank, 0.0)) <= cores:
        return None
    return contention(facts, [placement.rank], cores)


def _finding(facts: Facts, worst: Placement, measured: Contention, *, ranks: list[int]) -> Finding:
    node = facts.node_cpus.get(worst.host)
    on_node = node.core_count if node is not None else None
    cores, processes = int(measured.core_count), facts.process_counts.get(worst.rank)
    spare = on_node is not None and on_node > cores
    return Finding(
        rule=RULE,
        severity=severity_of_wait(facts, measured.wait_ratio),
        title=f"too few cores: {ranks_text(ranks)} may use {cores}"
        + (f" of {on_node}" if spare else "")
        + f", and none is free {ratio_text(measured.wait_ratio)} of the time",
        evidence=(
            *measured.evidence,
            Evidence(name="processes of the rank, workers included", value=processes, unit="count"),
            Evidence(
                name="threads of the rank",
                value=None if worst.thread_count is None else float(worst.thread_count),
                unit="count",
            ),
            Evidence(name="cores of the node", value=on_node, unit="cores"),
        ),
        remedy="allow the rank more cores (srun --cpus-per-task, docker --cpuset-cpus, a wider "
        "taskset), or run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers)"
        if spare
        else "run fewer threads and workers (OMP_NUM_THREADS, DataLoader num_workers), or take a "
        "node with more cores",
        confidence=0.7,
        rank=worst.rank,
    )
