"""Python's garbage collector stops training."""

from __future__ import annotations

import polars as pl

from haiprof.analysis.phases import GC_PHASE
from haiprof.diagnosis.facts import Facts
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import (
    DRIFT_PHASE_RATIO,
    MIN_STEPS,
    PAUSE_CRITICAL_RATIO,
    PAUSE_WARNING_RATIO,
)
from haiprof.units import duration_text, ratio_text

RULE = "garbage_collection"


def garbage_collection(facts: Facts) -> Judgement:
    """Fires where pauses in steps, those of all ranks together, take a twentieth of the time.

    Ranks collect at different steps, and each pause is a wait for all others: so they add up.
    """
    if facts.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    pauses = facts.pauses.filter((pl.col("phase") == GC_PHASE) & pl.col("step").is_not_null())
    spent = float(pauses["duration_ns"].sum())
    whole = max(float(steps["step_ns"].sum()) for steps in facts.by_rank.values())
    share = min(spent / max(whole, 1.0), 1.0)
    if share < PAUSE_WARNING_RATIO:
        return None
    longest = float(pauses["duration_ns"].max() or 0)  # type: ignore[arg-type]
    other = float(facts.steps["other_host_ns"].sum())
    outside = ("outside_the_model",) if spent >= DRIFT_PHASE_RATIO * other else ()
    return Finding(
        rule=RULE,
        severity="critical" if share >= PAUSE_CRITICAL_RATIO else "warning",
        title=f"garbage collection stops training {ratio_text(share)} of the time, up to "
        f"{duration_text(longest)} at once",
        evidence=(
            Evidence(name="pauses in steps, all ranks, of the time", value=share, unit="ratio"),
            Evidence(name="pauses of 0.2 ms and more", value=float(pauses.height), unit="count"),
            Evidence(name="longest pause", value=longest, unit="ns"),
        ),
        remedy="call gc.freeze() once the model and data are built; then gc.disable(), and "
        "gc.collect(1) every few hundred steps on all ranks alike; look for what makes reference "
        "cycles in each step (closures, kept exceptions), and for gc.collect() in the loop",
        confidence=0.9,
        explains=(*outside, "jitter", "step_time_drift", "forward_bound", "late_rank"),
    )
