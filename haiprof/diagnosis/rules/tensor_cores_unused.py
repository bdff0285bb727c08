"""Matrix products on the ordinary cores of a GPU that has tensor cores."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    TENSOR_CORE_CAPABILITY,
    TENSOR_CORE_OFF_RATIO,
    TF32_CAPABILITY,
)
from haiprof.diagnosis.traced_window import at_places, missing_lines, places
from haiprof.trace_analysis.kernel_names import GPU_COMPUTE, short_kernel_name

RULE = "tensor_cores_unused"


def tensor_cores_unused(inputs: RuleInputs) -> Judgement:
    """Fires where such kernels make a fifth of the computing time."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    able = [s.compute_capability for s in patterns.signs.values() if s.compute_capability]
    if not able:
        return Abstention(rule=RULE, why="the traces do not say which NVIDIA GPU it is")
    if max(able) < TENSOR_CORE_CAPABILITY:
        return None
    computing = int(patterns.functions.filter(pl.col("kind") == GPU_COMPUTE)["total_ns"].sum())
    matrix = pl.concat(signs.matrix for signs in patterns.signs.values())
    off = matrix.filter(~pl.col("tensor_cores"))
    share = int(off["time_ns"].sum()) / computing if computing else 0.0
    if share < TENSOR_CORE_OFF_RATIO:
        return None
    longest = off.group_by("kernel").agg(pl.col("time_ns").sum()).sort(-pl.col("time_ns"), "kernel")
    where = places(patterns, "matrix", "time_ns", ~pl.col("tensor_cores"))
    on = int(matrix.filter("tensor_cores")["time_ns"].sum()) / computing
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"{ratio_text(share)} of the computing time are matrix products without tensor cores",
        evidence=(
            Evidence(name="without tensor cores, of computing time", value=share, unit="ratio"),
            Evidence(name="on tensor cores, of computing time", value=on, unit="ratio"),
            Evidence(
                name=f"longest such kernel: {short_kernel_name(longest['kernel'][0])}",
                value=longest["time_ns"][0],
                unit="ns",
            ),
        ),
        remedy=(_TF32 if max(able) >= TF32_CAPABILITY else _HALF) + at_places(where),
        confidence=0.7,
        missing=missing_lines(patterns),
        scope="window",
    )


_TF32 = "torch.set_float32_matmul_precision('high') (TF32), or torch.autocast with bfloat16"
_HALF = "torch.autocast with float16 and a GradScaler; sizes that are multiples of 8"
