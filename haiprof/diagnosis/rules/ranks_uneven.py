"""One rank does more work per step than the others, which wait for it."""

from __future__ import annotations

import numpy as np
import polars as pl

from haiprof.analysis.step_frame import STEP_PHASES
from haiprof.diagnosis.facts import Facts, Floats
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    MIN_STEPS,
    RANK_EXCESS_CRITICAL_RATIO,
    RANK_EXCESS_WARNING_RATIO,
    RANK_PHASE_COVERAGE_RATIO,
)
from haiprof.units import ratio_text

RULE = "ranks_uneven"
# Synchronous data parallel waits for the others inside backward, so backward is not own work.
OWN_PHASES = tuple(phase for phase in STEP_PHASES if phase != "backward")
_MISSING = ("slowness inside backward itself: it cannot be told from waiting there",)


def ranks_uneven(facts: Facts) -> Judgement:
    """Fires where a rank's own work exceeds the median rank's by a tenth of the step."""
    if len(facts.world) < 2:
        return Abstention(rule=RULE, why="one rank")
    if any(facts.of_rank(rank)["backward_host_ns"].null_count() for rank in facts.world):
        return Abstention(rule=RULE, why="backward, where ranks wait, is not measured on all ranks")
    phases, step_ns = _matched(facts)
    count = len(step_ns)
    if count < MIN_STEPS:
        return Abstention(rule=RULE, why="the ranks have no steps in common")
    excess = _excess(phases.sum(axis=0))
    place = int(excess.argmax())
    share = float(excess[place] / max(step_ns.mean(), 1.0))
    if share < RANK_EXCESS_WARNING_RATIO:
        return None
    by_phase = np.array([_excess(phase)[place] for phase in phases])
    return _finding(facts.world[place], float(excess[place]), share, by_phase, count)


def _matched(facts: Facts) -> tuple[Floats, Floats]:
    """[own phase, rank, step] and the median rank's step, for the steps that all ranks have."""
    columns = [*(f"{phase}_host_ns" for phase in OWN_PHASES), "step_ns"]
    steps = facts.steps.select("rank", "step", *columns).fill_null(0)
    common = (
        steps.group_by("step")
        .agg(pl.col("rank").n_unique())
        .filter(pl.col("rank") == len(facts.world))
    )
    rows = steps.join(common, on="step", how="semi").sort("rank", "step")
    table = rows.select(columns).to_numpy().T.astype(np.float64)
    table = table.reshape(len(columns), len(facts.world), -1)
    return table[:-1], np.median(table[-1], axis=0)


def _excess(work: Floats) -> Floats:
    """Per rank: the median over steps of its work beyond the lower-median rank's.

    The lower of two ranks is the one to compare with: the other is the slow one.
    """
    typical = np.sort(work, axis=0)[(len(work) - 1) // 2]
    excess: Floats = np.median(work - typical, axis=1)
    return excess


def _finding(rank: int, excess: float, share: float, by_phase: Floats, count: int) -> Finding:
    main = int(by_phase.argmax())
    named = by_phase[main] >= RANK_PHASE_COVERAGE_RATIO * excess
    enough = count >= CRITICAL_MIN_STEPS
    critical = share >= RANK_EXCESS_CRITICAL_RATIO and enough
    where = f" in {OWN_PHASES[main]}" if named else ""
    return Finding(
        rule=RULE,
        severity="critical" if critical else "warning",
        title=f"rank {rank} is slow: {ratio_text(share)} of a step more work than the others"
        + where,
        evidence=(
            Evidence(name=f"rank {rank}: work beyond the median rank", value=excess, unit="ns"),
            Evidence(name="the same, share of the step", value=share, unit="ratio"),
            *(
                Evidence(name=f"of it in {phase}", value=float(extra), unit="ns")
                for phase, extra in zip(OWN_PHASES, by_phase, strict=True)
            ),
        ),
        remedy=f"compare rank {rank} with another: its data shard, its host's load, its GPU's "
        "clock and temperature; the others wait for it in backward",
        confidence=(0.85 if named else 0.7) if enough else 0.5,
        missing=_MISSING,
        rank=rank,
    )
