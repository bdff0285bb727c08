"""Kernels that are too small to fill the GPU."""

from __future__ import annotations

from haiprof.base.medians import lower_median
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import SMALL_KERNEL_NS, SMALL_OCCUPANCY_RATIO
from haiprof.diagnosis.traced_window import typical

RULE = "small_batches"


def small_batches(inputs: RuleInputs) -> Judgement:
    """Fires where the typical kernel is below 10 us and leaves most of the GPU empty."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    medians = [s.kernel_median_ns for s in patterns.signs.values() if s.kernel_median_ns]
    fill = typical(patterns.totals["occupancy_ratio"])
    if not medians or fill is None:
        return Abstention(rule=RULE, why="kernels' occupancy is not in the traces")
    median = lower_median(medians)
    if median >= SMALL_KERNEL_NS or fill >= SMALL_OCCUPANCY_RATIO:
        return None
    return Finding(
        rule=RULE,
        severity="info",
        title=f"small kernels: half of them are below {duration_text(median)}, and they fill "
        f"{ratio_text(fill)} of the GPU",
        evidence=(
            Evidence(name="median kernel", value=median, unit="ns"),
            Evidence(name="estimated occupancy, over kernel time", value=fill, unit="ratio"),
            Evidence(
                name="estimated SM efficiency, over the window",
                value=typical(patterns.totals["sm_efficiency_ratio"]),
                unit="ratio",
            ),
        ),
        remedy="raise the batch size or the sequence length per step as far as memory allows; "
        "else fuse with torch.compile",
        confidence=0.6,
        missing=("the batch size, which a trace does not name",),
        scope="window",
    )
