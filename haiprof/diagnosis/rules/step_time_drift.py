"""Steps became slower over the run."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.analysis.step_frame import STEP_PHASES
from haiprof.diagnosis.facts import Facts, Floats
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rank_test import larger_p_value
from haiprof.diagnosis.thresholds import (
    DRIFT_MIN_STEPS,
    DRIFT_P_VALUE,
    DRIFT_PHASE_RATIO,
    DRIFT_RATIO,
    DRIFT_SMOOTH_PARTS,
)
from haiprof.units import duration_text, ratio_text

RULE = "step_time_drift"


def step_time_drift(facts: Facts) -> Judgement:
    """Fires where the last third of the steps is a tenth slower than the first, beyond chance."""
    columns = [f"{phase}_host_ns" for phase in STEP_PHASES]
    series = facts.steps.group_by("step").agg(pl.col("step_ns", *columns).mean()).sort("step")
    if series.height < DRIFT_MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {DRIFT_MIN_STEPS} steps after warm-up")
    third = series.height // 3
    step_ns = series["step_ns"].to_numpy()
    first, last = step_ns[:third], step_ns[-third:]
    before, after = float(np.median(first)), float(np.median(last))
    growth = (after - before) / max(before, 1.0)
    p_value = larger_p_value(first, last)
    if growth < DRIFT_RATIO or p_value >= DRIFT_P_VALUE:
        return None
    grown = {phase: _growth(series[f"{phase}_host_ns"], third) for phase in STEP_PHASES}
    phase = max(grown, key=lambda name: grown[name])
    named = grown[phase] >= DRIFT_PHASE_RATIO * (after - before)
    where = f"most of it in {phase}" if named else "in several phases alike"
    since = int(series["step"][_since(step_ns, (before + after) / 2)])
    return Finding(
        rule=RULE,
        severity="warning",
        title=f"steps became {ratio_text(growth)} slower, since about step {since}, " + where,
        evidence=(
            Evidence(name="median step, first third", value=before, unit="ns"),
            Evidence(name="median step, last third", value=after, unit="ns"),
            Evidence(name=f"growth of {phase}", value=grown[phase], unit="ns"),
            Evidence(name="slower since step", value=float(since), unit="count"),
            Evidence(name="p (Mann-Whitney U), at most", value=DRIFT_P_VALUE, unit=""),
        ),
        remedy=_remedy(phase, grown[phase]) if named else _ALIKE,
        confidence=0.55 if named else 0.4,  # it says when, seldom why: a cause comes first
        missing=("whether the work per step changed (sequence length, curriculum)",),
    )


_ALIKE = (
    "all phases grew: look at the machine, not the code: other load on its CPUs, clocks, "
    "temperature (haiprof overview shows the node's CPU)"
)


def _growth(values: pl.Series, third: int) -> float:
    """Of the medians, last third against first; 0 where the phase is not measured."""
    numbers = values.fill_null(0.0).to_numpy()
    return float(np.median(numbers[-third:]) - np.median(numbers[:third]))


def _since(step_ns: Floats, level: float) -> int:
    """First step from which a moving median stays above the level."""
    width = max(5, len(step_ns) // DRIFT_SMOOTH_PARTS)
    windows = np.lib.stride_tricks.sliding_window_view(step_ns, width)
    below = np.flatnonzero(np.median(windows, axis=1) < level)
    return min(int(below[-1]) + 1 + width // 2, len(step_ns) - 1) if len(below) else 0


def _remedy(phase: str, growth: float) -> str:
    look = {
        "dataloader": "storage, page cache and worker memory: does the dataset hold on to samples?",
        "forward": "lists or caches that grow, sequence lengths, clocks and temperature",
        "backward": "graphs that are kept (loss added up without .item()), the network, clocks",
        "optimizer": "parameter groups that grow, swapping",
        "other": "logging, metrics and checkpoints between the phases",
    }[phase]
    return f"see what grew by {duration_text(growth)} in {phase}: {look}"
