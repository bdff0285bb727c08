"""Memory grows for as long as the job trains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.base.statistics import growth_p_value
from haiprof.base.units import NS_PER_S, bytes_text, duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    CREEP_LAST_RATIO,
    CREEP_MIN_STEPS,
    CREEP_RATIO,
    TREND_MIN_POINTS,
    TREND_P_VALUE,
)
from haiprof.run_analysis.gpu_memory import LEAK_REMEDY

RULE = "memory_creep"
SOON_NS = 24 * 3600 * NS_PER_S
"""A limit that is so near is said in the title."""
ENDS_NS = 3600 * NS_PER_S
"""With a limit so near the job is about to end: no loss of time is graver."""
GPU_METRIC = "memory_used_bytes"
_METRICS = {"memory_rss_bytes": "host memory", GPU_METRIC: "GPU memory"}
_REMEDIES = {
    "memory_rss_bytes": "look for what is kept from each step: losses added up without .item() or "
    ".detach() (they hold the whole graph), lists of outputs or metrics, a dataset that caches "
    "samples in each worker (copy on write)",
    GPU_METRIC: LEAK_REMEDY,
}
_NO_LINE = "which line keeps it: two snapshots of tracemalloc, some hundred steps apart, would say"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Growth:
    rank: int
    metric: str
    first_bytes: float
    last_bytes: float
    per_step_bytes: float

    @property
    def share(self) -> float:
        return (self.last_bytes - self.first_bytes) / max(self.first_bytes, 1.0)


def memory_creep(inputs: RuleInputs) -> Judgement:
    """Fires where memory grows by a tenth, beyond chance, and still does at the end.

    No line of code is named: stacks are sampled by time, and keeping something takes none; only
    tracemalloc would say who allocated what stays, and it makes Python code slower by a multiple.
    """
    if max(steps.height for steps in inputs.by_rank.values()) < CREEP_MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {CREEP_MIN_STEPS} steps")
    series = inputs.counted.points.filter(pl.col("metric").is_in(list(_METRICS)))
    counted = list(
        inputs.last_attempts.gpu_memory
    )  # by its allocator: `gpu_memory_limit` judges that
    series = series.filter((pl.col("metric") != GPU_METRIC) | ~pl.col("rank").is_in(counted))
    long = [
        (int(str(rank)), str(metric), _by_step(inputs, int(str(rank)), rows))
        for (rank, metric), rows in series.group_by("rank", "metric", maintain_order=True)
        if rows.height >= TREND_MIN_POINTS
    ]
    if not long:
        return Abstention(rule=RULE, why=f"fewer than {TREND_MIN_POINTS} samples of memory")
    found = [_growth(inputs, *each) for each in long if _grows(each[2])]
    if not found:
        return None
    worst = max(found, key=lambda growth: (growth.share, -growth.rank))
    return _finding(worst, len(found), _until_limit_ns(inputs, series, worst))


def _until_limit_ns(inputs: RuleInputs, series: pl.DataFrame, worst: _Growth) -> float | None:
    """When the host memory of a rank's node is used up, if its ranks go on to grow as they did.

    The limit is that of the tightest control group, else the node's memory; None where neither is
    known, and for GPU memory, whose allocator takes what it needs in pieces.
    """
    hosts = dict(inputs.ranks.select("rank", "host").rows())
    host = hosts.get(worst.rank)
    means = inputs.counted.nodes.get(host or "", {})
    limits = [m["memory_limit_bytes"] for m in means.values() if m.get("memory_limit_bytes")]
    limits = limits or [means.get(None, {}).get("memory_total_bytes")]
    limit = min((each for each in limits if each), default=None)
    if worst.metric != "memory_rss_bytes" or limit is None:
        return None
    there = [rank for rank, own in hosts.items() if own == host]
    own = series.filter((pl.col("metric") == worst.metric) & pl.col("rank").is_in(there))
    ends = own.sort("time_ns").group_by("rank").agg(
        pl.col("value").last().alias("last"),
        (pl.col("value").last() - pl.col("value").first()).alias("grown"),
        (pl.col("time_ns").last() - pl.col("time_ns").first()).alias("ns"),
    )  # fmt: skip
    rate = float((ends["grown"] / ends["ns"].clip(lower_bound=1)).sum())
    left = limit - float(ends["last"].sum())
    return max(left, 0.0) / rate if rate > 0 else None


def _by_step(inputs: RuleInputs, rank: int, rows: pl.DataFrame) -> Floats:
    """Samples as at equal distances of steps: what is kept of each step grows with them.

    Over time, a leak looks like something that fills where steps become slower meanwhile.
    """
    values: Floats = rows["value"].to_numpy()
    steps = np.searchsorted(inputs.of_rank(rank)["start_ns"].to_numpy(), rows["time_ns"].to_numpy())
    return np.interp(np.linspace(steps[0], steps[-1], len(steps)), steps, values)


def _grows(values: Floats) -> bool:
    third = max(len(values) // 3, 1)
    first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
    growth = last - first
    if growth < CREEP_RATIO * first or growth_p_value(values) >= TREND_P_VALUE:
        return False
    whole = values[-1] - values[0]
    return bool(values[-1] - values[-third - 1] >= CREEP_LAST_RATIO * whole)


def _growth(inputs: RuleInputs, rank: int, metric: str, values: Floats) -> _Growth:
    return _Growth(
        rank=rank,
        metric=metric,
        first_bytes=float(values[0]),
        last_bytes=float(values[-1]),
        per_step_bytes=float(values[-1] - values[0]) / max(inputs.of_rank(rank).height, 1),
    )


def _finding(worst: _Growth, count: int, until_limit_ns: float | None) -> Finding:
    what = _METRICS[worst.metric]
    soon = until_limit_ns is not None and until_limit_ns < SOON_NS
    ends = until_limit_ns is not None and until_limit_ns < ENDS_NS
    at_limit = f"; its limit is {duration_text(until_limit_ns)} away" if soon else ""
    until = Evidence(name="until its limit, if it goes on so", value=until_limit_ns, unit="ns")
    return Finding(
        rule=RULE,
        severity="critical" if ends else "warning",
        title=f"{what} grows by {bytes_text(round(worst.per_step_bytes))} per step on rank "
        f"{worst.rank}, {ratio_text(worst.share)} so far{at_limit}",
        evidence=(
            Evidence(name="at the beginning", value=worst.first_bytes, unit="bytes"),
            Evidence(name="at the end", value=worst.last_bytes, unit="bytes"),
            Evidence(name="growth per step", value=worst.per_step_bytes, unit="bytes"),
            *([until] if until_limit_ns is not None else []),
            Evidence(name="p of no trend (Mann-Kendall), below", value=TREND_P_VALUE, unit=""),
            Evidence(name="series that grow so", value=float(count), unit="count"),
        ),
        remedy=_REMEDIES[worst.metric],
        confidence=0.8,
        rank=worst.rank,
        missing=(_NO_LINE,),
    )
