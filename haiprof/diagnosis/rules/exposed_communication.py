"""Communication that computation does not hide, with waiting and transfer apart."""

from __future__ import annotations

import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    EXPOSED_WARNING_RATIO,
    WAITING_RATIO,
)
from haiprof.diagnosis.traced_window import typical
from haiprof.trace_analysis.kernel_names import COMMUNICATION

RULE = "exposed_communication"


def exposed_communication(inputs: RuleInputs) -> Judgement:
    """Fires where communication that nothing hides takes a tenth of the window or more."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    talk = patterns.functions.filter(pl.col("kind") == COMMUNICATION)
    if talk.is_empty():
        return Abstention(rule=RULE, why="no communication kernel in the traces")
    share = typical(patterns.totals["communication_ratio"])
    if share is None:
        return Abstention(rule=RULE, why="some ranks' traces have no GPU event")
    if share < EXPOSED_WARNING_RATIO:
        return None
    timed = talk.filter(pl.col("transfer_ns").is_not_null())
    wait, transfer = (int(timed[name].sum()) for name in ("wait_ns", "transfer_ns"))
    waiting = wait / (wait + transfer) if wait + transfer else None
    late = waiting is not None and waiting >= WAITING_RATIO
    return Finding(
        rule=RULE,
        title=f"communication takes {ratio_text(share)} of the time with nothing beside it"
        + (f", {ratio_text(waiting)} of that waiting for late ranks" if late else ""),
        evidence=(
            Evidence(name="communication that nothing hides", value=share, unit="ratio"),
            Evidence(
                name="share of communication that computing hides",
                value=typical(patterns.totals["overlap_ratio"]),
                unit="ratio",
            ),
            Evidence(name="share of collectives spent waiting", value=waiting, unit="ratio"),
            Evidence(name="transfers, all ranks", value=float(transfer) or None, unit="ns"),
        ),
        remedy=_LATE if late else _OVERLAP,
        confidence=0.8 if waiting is not None else 0.6,
        lost_ratio=share,
        missing=() if waiting is not None else ("waiting and transfer apart: traces of all ranks",),
        scope="window",
    )


_LATE = (
    "the transfers are not the problem: one rank arrives late. `haiprof functions RUN --only "
    "communication` names it; balance its data, or look at its host and GPU"
)
_OVERLAP = (
    "let computing hide it: DDP with larger or earlier buckets (bucket_cap_mb, "
    "gradient_as_bucket_view), FSDP with prefetching, gradient accumulation under no_sync(), "
    "bf16 gradients"
)
