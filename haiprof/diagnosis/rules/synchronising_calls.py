"""The host waits for the GPU in the middle of a step, and the GPU then waits for the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.units import ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import SYNC_IDLE_RATIO
from haiprof.diagnosis.traced_window import at_places, missing_lines, places
from haiprof.trace_format.launch_checks import FREE

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

RULE = "synchronising_calls"
_FREES = pl.col("call").str.contains(FREE)


def synchronising_calls(inputs: RuleInputs) -> Judgement:
    """Fires where the GPU is idle around such calls for a tenth of the window or more."""
    patterns = inputs.traces.of_gpus(RULE)
    if isinstance(patterns, Abstention):
        return patterns
    found = _per_rank(patterns)
    if found.is_empty() or found["idle_ratio"][0] < SYNC_IDLE_RATIO:
        return None
    row = found.row(0, named=True)
    frees = 2 * row["free_ns"] > row["idle_ns"]
    where = places(patterns, "waits", "idle_ns", _FREES if frees else ~_FREES)
    return Finding(
        rule=RULE,
        title=_title(row["idle_ratio"], frees=frees),
        evidence=(
            Evidence(name="GPU idle around these calls", value=row["idle_ratio"], unit="ratio"),
            Evidence(name="calls", value=row["count"], unit="count"),
            Evidence(name="time in them", value=row["time_ns"], unit="ns"),
            Evidence(name="GPU idle around them", value=row["idle_ns"], unit="ns"),
        ),
        remedy=(_FREE if frees else _WAIT) + at_places(where),
        confidence=0.75,
        lost_ratio=row["idle_ratio"],
        missing=missing_lines(patterns),
        rank=row["rank"],
        scope="window",
    )


def _title(share: float, *, frees: bool) -> str:
    if frees:
        return f"GPU memory is freed in training, the GPU idle {ratio_text(share)} of the time"
    return f"the host waits for the GPU in each step, which is then idle {ratio_text(share)}"


def _per_rank(patterns: Patterns) -> pl.DataFrame:
    """Sums per rank, the one that loses most first."""
    windows = dict(patterns.totals.select("rank", "window_ns").rows())
    rows = [
        signs.waits.select(
            rank=pl.lit(rank),
            count=pl.col("count").sum(),
            time_ns=pl.col("time_ns").sum(),
            idle_ns=pl.col("idle_ns").sum(),
            free_ns=pl.col("idle_ns").filter(_FREES).sum(),
            idle_ratio=pl.col("idle_ns").sum() / windows[rank],
        )
        for rank, signs in patterns.signs.items()
        if len(signs.waits)
    ]
    empty = pl.DataFrame(schema={"rank": pl.Int64, "idle_ratio": pl.Float64})
    return pl.concat(rows).sort(-pl.col("idle_ratio"), "rank") if rows else empty


_WAIT = (
    "keep values on the GPU: no .item(), .cpu(), print, nonzero() or boolean masks of GPU tensors "
    "in the loop; log every few steps"
)
_FREE = (
    "the caching allocator gives memory back and takes it again: no torch.cuda.empty_cache() in "
    "the loop, a smaller batch, or PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
)
