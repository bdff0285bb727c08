"""Python's garbage collector stops training."""

from __future__ import annotations

import polars as pl

from haiprof.base.intervals import total, union
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    ASKED_MAIN_RATIO,
    DRIFT_PHASE_RATIO,
    MIN_STEPS,
    PAUSE_WARNING_RATIO,
)
from haiprof.run_analysis.phases import GC_PHASE

RULE = "garbage_collection"


def garbage_collection(inputs: RuleInputs) -> Judgement:
    """Fires where pauses in steps, those of all ranks together, take a twentieth of the time.

    Ranks collect at different steps, and each pause is a wait for all others: so they add up, but
    for what they share.
    """
    if inputs.steps.height < MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {MIN_STEPS} steps")
    pauses = inputs.pauses.filter((pl.col("phase") == GC_PHASE) & pl.col("step").is_not_null())
    begin = pauses["start_ns"].to_numpy()
    spent = float(total(union(begin, begin + pauses["duration_ns"].to_numpy())))
    whole = max(float(steps["step_ns"].sum()) for steps in inputs.by_rank.values())
    share = min(spent / max(whole, 1.0), 1.0)
    if share < PAUSE_WARNING_RATIO:
        return None
    longest = float(pauses["duration_ns"].max() or 0)  # type: ignore[arg-type]
    once = (spent - longest) / max(whole, 1.0) < PAUSE_WARNING_RATIO
    other = float(inputs.steps["other_host_ns"].sum())  # of all ranks, as the pauses in it
    stopped = float(pauses["duration_ns"].sum())
    asked = _asked_ratio(inputs, whole) >= ASKED_MAIN_RATIO * share
    device = ", and memory of the GPU only where such a cycle holds it" * inputs.uses_gpu
    outside = ("outside_the_model",) if stopped >= DRIFT_PHASE_RATIO * other else ()
    return Finding(
        rule=RULE,
        cause="explicit" if asked else None,
        title=f"one garbage collection took {duration_text(longest)}, {ratio_text(share)} of the "
        "time recorded"
        if once
        else f"garbage collection stops training {ratio_text(share)} of the time, up to "
        f"{duration_text(longest)} at once",
        evidence=(
            Evidence(name="pauses in steps, all ranks, of the time", value=share, unit="ratio"),
            Evidence(name="pauses of 0.2 ms and more", value=float(pauses.height), unit="count"),
            Evidence(name="longest pause", value=longest, unit="ns"),
        ),
        remedy="take gc.collect() out of the loop, or call it every few hundred steps; it frees "
        f"nothing but reference cycles{device}"
        if asked
        else "call gc.freeze() once the model and data are built; then gc.disable(), and "
        "gc.collect(1) every few hundred steps on all ranks alike; look for what makes reference "
        "cycles in each step (closures, kept exceptions), and for gc.collect() in the loop",
        confidence=0.9,
        lost_ratio=share,
        is_one_event=once,
        explains=(
            *outside,
            "jitter",
            "step_time_drift",
            "forward_bound",
            "late_rank",
            "data_imbalance",
        ),
    )


def _asked_ratio(inputs: RuleInputs, whole_ns: float) -> float:
    """What gc.collect() took of the time in steps, of the rank that called it most."""
    spent = [each.looks.collect_ns or 0 for each in inputs.settings.values()]
    return max(spent, default=0) / max(whole_ns, 1.0)
