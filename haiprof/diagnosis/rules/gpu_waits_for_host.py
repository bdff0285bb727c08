"""The GPU is idle because one Python thread cannot launch work fast enough."""

from __future__ import annotations

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, usual_share
from haiprof.diagnosis.thresholds import (
    CPU_FULL_CORES,
    DATALOADER_WARNING_RATIO,
    GPU_IDLE_RATIO,
)

RULE = "gpu_waits_for_host"


def gpu_waits_for_host(inputs: RuleInputs) -> Judgement:
    """Fires where the GPU is mostly idle, the rank's process fills a core, and no batch is late."""
    if not inputs.gpu_use:
        return Abstention(rule=RULE, why="no GPU utilization of a rank")
    both = sorted(set(inputs.gpu_use) & set(inputs.main_cores))
    if not both:
        return Abstention(rule=RULE, why="no CPU use of a rank with a GPU")
    rank = min(both, key=lambda r: inputs.gpu_use[r])
    gpu, cores = inputs.gpu_use[rank], inputs.main_cores[rank]
    loader = usual_share(inputs, "dataloader") or 0.0
    if gpu >= GPU_IDLE_RATIO or cores < CPU_FULL_CORES or loader >= DATALOADER_WARNING_RATIO:
        return None
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"the GPU waits for the host: used {ratio_text(gpu)}, while the process fills "
        f"{cores:.1f} cores",
        evidence=(
            Evidence(name="GPU utilization", value=gpu, unit="ratio"),
            Evidence(name="CPU cores used by the process", value=cores, unit="cores"),
            Evidence(name="waiting for batches, share of the step", value=loader, unit="ratio"),
        ),
        remedy="launch less and larger work: torch.compile (mode='reduce-overhead'), fused "
        "optimizers, larger batches; remove .item() and print of tensors from the loop",
        confidence=0.7,
        missing=("which Python code runs meanwhile",),
        rank=rank,
    )
