"""The job's own code calls collectives between the phases of a step, and waits in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from haiprof.base.units import ratio_text
from haiprof.diagnosis.collective_time import (
    BETWEEN_PHASES,
    COLLECTIVES,
    has_samples,
    looked_at,
    phase_ratio,
)
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, typical_rank
from haiprof.diagnosis.thresholds import COSTLY_WARNING_RATIO, MIN_STEPS
from haiprof.run_analysis.code_samples import CodeTree
from haiprof.run_analysis.lines import innermost_stack
from haiprof.run_analysis.nesting import Bools

RULE = "blocking_collectives"
_THROUGH = (
    COLLECTIVES, "/torch/distributed/c10d_logger.py", "/torch/utils/_contextlib.py",
    "/accelerate/accelerator.py", "/accelerate/state.py", "/accelerate/utils/operations.py",
)  # fmt: skip
"""Files through which the job's own code calls them; what DDP, FSDP and the like call is theirs."""


def blocking_collectives(inputs: RuleInputs) -> Judgement:
    """Fires where every rank spends a twentieth of the step in such calls.

    Ranks wait there for the last one, which waits for none: of a slow rank's cost nothing is in the
    least share of all ranks, and that is what counts; less what a rank waited for a core, as the
    others then wait for it.
    """
    if len(inputs.world) < 2 or inputs.marked_by:
        return Abstention(rule=RULE, why="no training on several ranks")
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    shares = []
    for rank in looked_at(inputs):
        samples = inputs.load_samples(rank)
        if not has_samples(samples):
            return Abstention(rule=RULE, why=f"too few stacks of rank {rank} were sampled")
        shares.append(phase_ratio(inputs, rank, BETWEEN_PHASES, _own_calls(samples.tree)))
    lost = min(shares) * (1 - max(inputs.core_waits.values(), default=0.0))
    if lost < COSTLY_WARNING_RATIO:
        return None
    return _finding(shares, lost, inputs.count_collectives(typical_rank(inputs)))


def _own_calls(tree: CodeTree) -> Bools:
    """Per stack: whether the job's own code is in a collective there, through `_THROUGH` alone."""
    through = [any(part in frame.file for part in _THROUGH) for frame in tree.frames]
    outer = tree.ends_outside(COLLECTIVES)
    inner = innermost_stack(tree)
    found = np.zeros(len(outer), dtype=np.bool_)
    for stack in np.flatnonzero(tree.within(COLLECTIVES)).tolist():
        at = int(outer[stack])
        while at and through[tree.place[at]]:
            at = int(tree.parent[at])
        found[stack] = bool(at) and inner[at] == at
    return found


def _finding(shares: Sequence[float], lost: float, count: float | None) -> Finding:
    least = min(shares)
    return Finding(
        rule=RULE,
        title="collectives that the job's own code calls between the phases: at least "
        f"{ratio_text(least)} of each rank's step",
        evidence=(
            Evidence(name="in these calls, least of all ranks", value=least, unit="ratio"),
            Evidence(name="in these calls, most of all ranks", value=max(shares), unit="ratio"),
            Evidence(name="collectives per step, with those of gradients", value=count, unit=""),
        ),
        remedy="metrics: sum them on the rank, and reduce them once every many steps, or with "
        "async_op=True; objects: a tensor is cheaper; a barrier is seldom needed, as collectives "
        "wait by themselves; gradients: DistributedDataParallel reduces them during backward",
        confidence=0.8,
        lost_ratio=lost,
        missing=() if count is not None else ("how many collectives a step begins",),
        supersedes=("outside_the_model",),
    )
