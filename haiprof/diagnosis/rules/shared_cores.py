"""Ranks of one host share cores and wait for each other on them."""

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
from haiprof.run_analysis.placement import Placement, sharing_groups

RULE = "shared_cores"


def shared_cores(inputs: RuleInputs) -> Judgement:
    """Fires where ranks with overlapping cores want more than those, and each waits for them.

    Sharing alone is normal: ranks that are not bound may all run anywhere.
    """
    if len(inputs.world) < 2:
        return Abstention(rule=RULE, why="one rank")
    placed = [inputs.placements[rank] for rank in inputs.world if rank in inputs.placements]
    if not placed:
        return Abstention(rule=RULE, why=NO_PLACEMENT)
    groups = [group for group in sharing_groups(placed) if len(group) > 1]
    if not groups:
        return None
    if not any(p.rank in inputs.core_waits for group in groups for p in group):
        return Abstention(rule=RULE, why=NO_WAIT)
    judged = [(group, contention(inputs, _ranks(group), len(_cores(group)))) for group in groups]
    found = [(group, measured) for group, measured in judged if measured and measured.is_their_own]
    if not found:
        return None
    group, measured = max(found, key=lambda pair: pair[1].wait_ratio)
    return _finding(inputs, group, measured)


def _ranks(group: tuple[Placement, ...]) -> list[int]:
    return [placement.rank for placement in group]


def _cores(group: tuple[Placement, ...]) -> frozenset[int]:
    return frozenset().union(*(placement.allowed_cpus or frozenset() for placement in group))


def _finding(inputs: RuleInputs, group: tuple[Placement, ...], measured: Contention) -> Finding:
    node = inputs.node_cpus.get(group[0].host)
    on_node = node.core_count if node is not None else None
    cores = int(measured.core_count)
    spare = on_node is not None and on_node > cores
    return Finding(
        rule=RULE,
        title=f"{ranks_text(_ranks(group))} share {_cores_text(cores)}"
        + (f" of {on_node}" if spare else "")
        + f", and wait for one {ratio_text(measured.wait_ratio)} of the time",
        evidence=(
            *measured.evidence,
            Evidence(name="cores of the node", value=on_node, unit="cores"),
        ),
        remedy="give each rank cores of its own: torchrun --numa-binding=exclusive, srun "
        "--cpus-per-task, mpirun --map-by slot:PE=N; look for a taskset or an affinity that all "
        "ranks inherit"
        if spare
        else "run fewer threads per rank (OMP_NUM_THREADS, DataLoader num_workers), or fewer ranks "
        "per node",
        confidence=0.8 if spare else 0.7,
        lost_ratio=measured.wait_ratio,
        explains=(
            *COMPUTED_BATCHES,
            *SLOWED_ALIKE,
            "ranks_uneven/waits_for_cores",
            "late_rank/waits_for_cores",
            "data_imbalance",
        ),
    )


def _cores_text(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"
