"""The ranks take turns in being the slowest: the work differs, and not the machine."""

from __future__ import annotations

import numpy as np

from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rank_turns import find_turns, work_since_one_is_late
from haiprof.diagnosis.rank_work import beyond_typical, rank_work, uneven_input_ratio
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    RANK_PHASE_COVERAGE_RATIO,
)

RULE = "data_imbalance"


def data_imbalance(inputs: RuleInputs) -> Judgement:
    """Fires where the slowest rank of each step holds the others up, and it is not always the same.

    A machine that is slow is slow in each step; a batch that is long is another rank's next time.
    Of one that becomes slow in the middle of the run `ranks_uneven` speaks.
    """
    work = rank_work(inputs, RULE)
    if isinstance(work, Abstention):
        return work
    if len(work.step_ns) < CRITICAL_MIN_STEPS:
        return Abstention(rule=RULE, why=f"fewer than {CRITICAL_MIN_STEPS} steps in common")
    turns = find_turns(work)
    if turns is None or work_since_one_is_late(work) is not None:
        return None
    slowest, lost, share = turns.slowest, turns.lost, turns.share
    by_phase = {
        phase: float(np.median(beyond_typical(times)[slowest, np.arange(len(slowest))]))
        for phase, times in zip(work.own, work.phases, strict=True)
    }
    phase = max(by_phase, key=lambda name: by_phase[name])
    named = by_phase[phase] >= RANK_PHASE_COVERAGE_RATIO * float(np.median(lost))
    uneven = uneven_input_ratio(inputs, work)
    return Finding(
        rule=RULE,
        title=f"uneven work: the slowest rank of a step, now one and now another, takes "
        f"{duration_text(float(np.median(lost)))} ({ratio_text(share)} of it) longer"
        + (f", in {phase}" if named else ""),
        evidence=(
            Evidence(name="slowest rank beyond the typical one", value=share, unit="ratio"),
            Evidence(name=f"of it in {phase}", value=by_phase[phase], unit="ns"),
            Evidence(
                name="steps in which the same rank is the slowest, at most",
                value=turns.most,
                unit="ratio",
            ),
            Evidence(name="inputs of one rank, the largest by the smallest", value=uneven, unit=""),
        ),
        remedy="give all ranks batches of equal cost: group samples by length and deal each group "
        "to all ranks (length-bucketing sampler), cap tokens per batch in place of samples, or "
        "pack sequences",
        confidence=0.7 if named else 0.6,
        lost_ratio=min(share, 1.0),
        missing=() if uneven else ("the size of each rank's batches",),
        is_own_work=uneven is not None,
        cause=phase if named else None,
        explains=("late_rank/now_and_then",),
    )
