"""The GPU's memory is so full that the allocator gives its cache back to find room."""

from __future__ import annotations

from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import ALLOCATOR_RETRY_MIN_COUNT

RULE = "allocator_retries"


def allocator_retries(inputs: RuleInputs) -> Judgement:
    """Fires where an allocation failed and was tried again, more than once after the start."""
    counted = {
        rank: counts
        for rank, counts in inputs.last_attempts.allocator.items()
        if rank in inputs.world
    }
    if not counted:
        return Abstention(rule=RULE, why="no counts of a GPU's allocator")
    rank = max(counted, key=lambda r: (counted[r][0], -r))
    retries, failures, elapsed = counted[rank]
    if retries < ALLOCATOR_RETRY_MIN_COUNT:
        return None
    per_minute = retries / max(elapsed / NS_PER_S / 60, 1e-9)
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"GPU memory is full on rank {rank}: the allocator emptied its cache {retries} times",
        evidence=(
            Evidence(name="allocations tried again", value=float(retries), unit="count"),
            Evidence(name="the same per minute", value=per_minute, unit="count"),
            Evidence(name="allocations that failed for good", value=float(failures), unit="count"),
        ),
        remedy="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True against fragments; else a smaller "
        "batch, activation checkpointing, or bf16; each retry waits for the GPU and frees memory",
        confidence=0.85,
        rank=rank,
    )  # fmt: skip
