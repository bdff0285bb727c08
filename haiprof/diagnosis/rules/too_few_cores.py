"""A rank has cores of its own, and too few of them for its threads and workers."""

from __future__ import annotations

from haiprof.base.units import ranks_text, ratio_text
from haiprof.diagnosis.core_contention import (
    NO_PLACEMENT,
    NO_WAIT,
    SLOWED_ALIKE,
    Contention,
    contention,
)
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.loader_causes import COMPUTED_BATCHES
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import CORE_WAIT_CRITICAL_RATIO
from haiprof.run_analysis.placement import Placement, sharing_groups

RULE = "too_few_cores"


def too_few_cores(inputs: RuleInputs) -> Judgement:
    """Fires where a rank with more threads than cores wants more than those, and waits for them.

    Less sure, and only where it is bound to a part of the node: that it has more processes than
    cores and waits a good part of the time. How long workers wait is not recorded.

    Ranks that share cores are `shared_cores`' business; a limit in cores, `cpu_throttled`'s.
    """
    placed = [inputs.placements[rank] for rank in inputs.world if rank in inputs.placements]
    if not placed:
        return Abstention(rule=RULE, why=NO_PLACEMENT)
    alone = [group[0] for group in sharing_groups(placed) if len(group) == 1]
    if not any(placement.rank in inputs.core_waits for placement in placed):
        return Abstention(rule=RULE, why=NO_WAIT)
    judged = [(placement, _contention(inputs, placement)) for placement in alone]
    found = [(placement, measured) for placement, measured in judged if measured is not None]
    if not found:
        return None
    worst, measured = max(found, key=lambda pair: pair[1].wait_ratio)
    return _finding(inputs, worst, measured, ranks=[placement.rank for placement, _ in found])


def _contention(inputs: RuleInputs, placement: Placement) -> Contention | None:
    cores = len(placement.allowed_cpus or ())
    processes = inputs.process_counts.get(placement.rank, 0.0)
    measured = contention(inputs, [placement.rank], cores)
    if measured is None or max(placement.thread_count or 0, processes) <= cores:
        return None
    bound = cores < (_cores_of_node(inputs, placement) or 0)
    likely = bound and processes > cores and measured.wait_ratio >= CORE_WAIT_CRITICAL_RATIO
    return measured if measured.is_their_own or likely else None


def _cores_of_node(inputs: RuleInputs, placement: Placement) -> int | None:
    node = inputs.node_cpus.get(placement.host)
    return None if node is None else node.core_count


def _finding(
    inputs: RuleInputs, worst: Placement, measured: Contention, *, ranks: list[int]
) -> Finding:
    on_node, sure = _cores_of_node(inputs, worst), measured.is_their_own
    cores, processes = int(measured.core_count), inputs.process_counts.get(worst.rank)
    spare = on_node is not None and on_node > cores
    return Finding(
        rule=RULE,
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
        confidence=0.7 if sure else 0.5,
        lost_ratio=measured.wait_ratio,
        missing=() if sure else ("whether something else runs on these cores",),
        rank=worst.rank,
        explains=(
            *COMPUTED_BATCHES,
            *SLOWED_ALIKE,
            "ranks_uneven/waits_for_cores",
            "late_rank/waits_for_cores",
        ),
    )
