"""Kernels so short that launching them takes longer: the GPU waits for launches."""

from __future__ import annotations

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import GPU_IDLE_RATIO, SHORT_LAUNCH_RATIO
from haiprof.diagnosis.traced_window import at_places, missing_lines, places

RULE = "launch_bound"


def launch_bound(inputs: RuleInputs) -> Judgement:
    """Fires where the GPU is idle for half the window and half the kernels are short."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    known = {rank: signs for rank, signs in patterns.signs.items() if signs.launch_count}
    if not known:
        return Abstention(rule=RULE, why="no launch of a kernel in the traces")
    rank = max(known, key=lambda r: (known[r].gpu_idle_ratio or 0.0, -r))
    signs = known[rank]
    idle, count = signs.gpu_idle_ratio or 0.0, signs.launch_count or 1
    short = (signs.short_count or 0) / count
    if idle < GPU_IDLE_RATIO or short < SHORT_LAUNCH_RATIO:
        return None
    where = places(patterns, "short", "count")
    kernel, call = duration_text(signs.kernel_median_ns), duration_text(signs.launch_median_ns)
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"launch-bound: {ratio_text(short)} of the kernels are shorter than their launch, "
        f"the GPU is idle {ratio_text(idle)} of the time",
        evidence=(
            Evidence(name="GPU idle", value=idle, unit="ratio"),
            Evidence(name="kernels shorter than their launch", value=short, unit="ratio"),
            Evidence(name="launches", value=count, unit="count"),
            Evidence(name="median kernel", value=signs.kernel_median_ns, unit="ns"),
            Evidence(name="median launch", value=signs.launch_median_ns, unit="ns"),
        ),
        remedy=f"a launch takes {call}, a kernel {kernel}: launch fewer and larger ones with "
        "torch.compile(mode='reduce-overhead'), CUDA graphs, fused or foreach optimizers, larger "
        f"batches{at_places(where)}",
        confidence=0.75,
        missing=missing_lines(patterns),
        rank=rank,
        scope="window",
    )
