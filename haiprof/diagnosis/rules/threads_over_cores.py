"""Operators are computed by more threads than the rank has cores."""

from __future__ import annotations

from math import ceil

from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import MIN_STEPS, THREADS_PER_CORE
from haiprof.run_analysis.settings import RankSettings, sharing_groups

RULE = "threads_over_cores"
_UNKNOWN = "what it costs: it depends on what else wants the cores, and on how threads wait"


def threads_over_cores(inputs: RuleInputs) -> Judgement:
    """Fires where a rank on CPUs has twice as many threads per operator as cores or CPU quota.

    The threads of an operator wait for the last one of them (OpenMP's barrier), which then stands
    in line for a core.
    """
    if not inputs.settings:
        return Abstention(rule=RULE, why="no settings were recorded")
    if inputs.uses_gpu or inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why="the ranks use a GPU, or there are too few steps")
    found = {rank: _factor(each) for rank, each in inputs.settings.items()}
    rank = max(found, key=lambda r: (found[r], -r))
    if found[rank] < THREADS_PER_CORE:
        return None
    settings = inputs.settings[rank]
    cores = settings.usable_cores or 1.0
    limited = (settings.cpu_limit_cores or cores + 1) <= cores
    sharing = _sharing_count(inputs, rank)
    where = "the CPU limit of its control group" if limited else "its CPU affinity"
    return Finding(
        rule=RULE,
        title=f"{settings.operator_threads} threads per operator on {cores:g} cores",
        evidence=(
            Evidence(
                name="threads per operator",
                value=float(settings.operator_threads or 0),
                unit="count",
            ),
            Evidence(name=f"cores, by {where}", value=cores, unit="cores"),
        ),
        remedy=f"OMP_NUM_THREADS={max(int(cores) // sharing, 1)} or torch.set_num_threads"
        + (f", as {sharing} ranks share the cores" if sharing > 1 else "")
        + (": torch counts the machine's cores, and knows no limit" if limited else ""),
        confidence=0.7,
        severity="info",
        missing=(_UNKNOWN,),
        rank=rank if len(found) > 1 and sum(f >= THREADS_PER_CORE for f in found.values()) == 1
        else None,
    )  # fmt: skip


def _factor(settings: RankSettings) -> float:
    cores = settings.usable_cores
    return (settings.operator_threads or 0) / ceil(cores) if cores else 0.0


def _sharing_count(inputs: RuleInputs, rank: int) -> int:
    """Ranks that may run on this one's cores, itself among them."""
    groups = sharing_groups(inputs.placements[each] for each in inputs.world
                            if each in inputs.placements)  # fmt: skip
    return next((len(group) for group in groups if rank in {p.rank for p in group}), 1)
