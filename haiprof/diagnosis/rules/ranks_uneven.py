"""One rank does more work per step than the others, which wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from haiprof.units import duration_text, ratio_text

RULE = "ranks_uneven"
# Where a rank waits for the others, time is not its own work (TraceML: backward; with FSDP both).
_WAITS, _SHARDED_WAITS = ("backward",), ("forward", "backward")


def ranks_uneven(facts: Facts) -> Judgement:
    """Fires where a rank's own work exceeds the median rank's by a tenth of the step."""
    if len(facts.world) < 2:
        return Abstention(rule=RULE, why="one rank")
    if any(facts.of_rank(rank)["backward_host_ns"].null_count() for rank in facts.world):
        return Abstention(rule=RULE, why="backward, where ranks wait, is not measured on all ranks")
    waits = _SHARDED_WAITS if facts.sharded else _WAITS
    own = [phase for phase in STEP_PHASES if phase not in waits]
    phases, step_ns = _matched(facts, own)
    count = len(step_ns)
    if count < MIN_STEPS:
        return Abstention(rule=RULE, why="the ranks have no steps in common")
    excess = _excess(phases.sum(axis=0))
    place = int(excess.argmax())
    share = float(excess[place] / max(step_ns.mean(), 1.0))
    if share < RANK_EXCESS_WARNING_RATIO:
        return None
    by_phase = {name: float(_excess(work)[place]) for name, work in zip(own, phases, strict=True)}
    rank = facts.world[place]
    return _finding(rank, float(excess[place]), share, by_phase=by_phase, count=count, waits=waits)


def _matched(facts: Facts, own: Sequence[str]) -> tuple[Floats, Floats]:
    """[own phase, rank, step] and the median rank's step, for the steps that all ranks have."""
    columns = [*(f"{phase}_host_ns" for phase in own), "step_ns"]
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


def _finding(
    rank: int, excess: float, share: float, *, by_phase: Mapping[str, float], count: int,
    waits: Sequence[str],
) -> Finding:  # fmt: skip
    main = max(by_phase, key=lambda phase: by_phase[phase])
    named = by_phase[main] >= RANK_PHASE_COVERAGE_RATIO * excess
    enough = count >= CRITICAL_MIN_STEPS
    critical = share >= RANK_EXCESS_CRITICAL_RATIO and enough
    where = f" in {main}" if named else ""
    return Finding(
        rule=RULE,
        severity="critical" if critical else "warning",
        title=f"rank {rank} is slow: {duration_text(excess)} of each step ({ratio_text(share)}) "
        f"more than the others" + where,
        evidence=(
            Evidence(name=f"rank {rank}: work beyond the median rank", value=excess, unit="ns"),
            Evidence(name="the same, share of the step", value=share, unit="ratio"),
            *(
                Evidence(name=f"of it in {phase}", value=extra, unit="ns")
                for phase, extra in by_phase.items()
            ),
        ),
        remedy=f"compare rank {rank} with another: its data shard, its host's load, its GPU's "
        f"clock and temperature; the others wait for it in {' and '.join(waits)}",
        confidence=(0.85 if named else 0.7) if enough else 0.5,
        missing=(f"slowness inside {' or '.join(waits)} itself: waiting there looks the same",),
        rank=rank,
    )
