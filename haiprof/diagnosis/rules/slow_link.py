"""One rank's transfers are slower than the others': its link, or its bus to the host."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import rate_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.functions.communication import communication_report
from haiprof.diagnosis.functions.memory import SLOW, memory_report
from haiprof.diagnosis.functions.report import ABNORMAL
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import FAR_MIN_RANKS

RULE = "slow_link"
_OWN, _USUAL = "bandwidth_bytes_per_s", "others_bandwidth_bytes_per_s"


def slow_link(inputs: RuleInputs) -> Judgement:
    """Fires where a rank's collectives or copies run far below the other ranks' bandwidth."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    count = int(patterns.totals["has_gpu"].sum())
    if count < FAR_MIN_RANKS:
        return Abstention(rule=RULE, why=f"GPU traces of {count} ranks; it takes {FAR_MIN_RANKS}")
    talk = communication_report(patterns).tables[ABNORMAL]
    copies = memory_report(patterns).tables[ABNORMAL].filter(pl.col("why") == SLOW)
    copies = copies.drop_nulls([_OWN, _USUAL])
    if talk.is_empty() and copies.is_empty():
        return None
    found, what = (talk, "type") if len(talk) else (copies, "name")
    rank, name, own, usual, share = found.select(
        "rank", what, _OWN, _USUAL, "bottleneck_ratio"
    ).row(0)
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"rank {rank} transfers slowly: {name} at {rate_text(own)}, elsewhere "
        f"{rate_text(usual)}",
        evidence=(
            Evidence(name=f"bandwidth of rank {rank}", value=own, unit="bytes/s"),
            Evidence(name="the ranks' median", value=usual, unit="bytes/s"),
            Evidence(name="its transfers, share of the window", value=share, unit="ratio"),
        ),
        remedy=_LINK if len(talk) else _BUS,
        confidence=0.7,
        missing=("which link: NVLink, PCIe or network",) if len(talk) else (),
        rank=rank,
        scope="window",
    )


_LINK = (
    "check the rank's links: nvidia-smi nvlink -s, PCIe width, the port's error counters "
    "(`haiprof overview` shows them), and who else uses them"
)
_BUS = (
    "check the rank's PCIe generation and width (nvidia-smi -q -d PERFORMANCE), and that its "
    "process runs on the NUMA node of its GPU"
)
