"""Copies to the GPU from memory that is not pinned."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import ABNORMAL_RATIO
from haiprof.diagnosis.traced_window import at_places, missing_lines, places
from haiprof.trace_analysis.kernel_names import MEMORY

RULE = "pageable_copies"
_SIGN = "Pageable -> Device"


def pageable_copies(inputs: RuleInputs) -> Judgement:
    """Fires where such copies take more than 1 % of the window with nothing beside them."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    copies = patterns.functions.filter(
        (pl.col("kind") == MEMORY) & pl.col("name").str.contains(_SIGN, literal=True)
    )
    worst = copies.sort(-pl.col("bottleneck_ratio"), "rank").head(1).to_dicts()
    if not worst or worst[0]["bottleneck_ratio"] <= ABNORMAL_RATIO:
        return None
    row, where = worst[0], places(patterns, "pageable", "time_ns")
    share = row["bottleneck_ratio"]
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"copies from pageable memory take {ratio_text(share)} of the time, hidden by "
        "nothing",
        evidence=(
            Evidence(name="copies that nothing hides", value=share, unit="ratio"),
            Evidence(name="copies", value=row["count"], unit="count"),
            Evidence(name="time in them", value=row["total_ns"], unit="ns"),
            Evidence(name="bandwidth", value=row["bandwidth_bytes_per_s"], unit="bytes/s"),
        ),
        remedy="pin the memory: DataLoader(pin_memory=True) or tensor.pin_memory(), and copy with "
        f".to(device, non_blocking=True){at_places(where)}",
        confidence=0.85,
        missing=missing_lines(patterns),
        scope="window",
    )
