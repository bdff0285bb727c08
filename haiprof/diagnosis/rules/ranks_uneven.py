"""One rank does more work per step than the others, which wait for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from haiprof.base.units import duration_text, ranks_text, ratio_text
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rank_turns import work_since_one_is_late
from haiprof.diagnosis.rank_work import RankWork, beyond_typical, rank_work, steadily_slow
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.slow_rank import state_of
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    RANK_PHASE_COVERAGE_RATIO,
)

RULE = "ranks_uneven"
_PLACES = {"other": "what it does between the phases: logging, metrics, data of its own"}
_ALONE = (
    "see what rank {rank} does alone between the phases: logging, printing, metrics, uploads, data "
    "that it makes for the others; do it less often, on another thread, or share it among the "
    "ranks, which wait for it in {waits}"
)


def ranks_uneven(inputs: RuleInputs) -> Judgement:
    """Fires where a rank's own work exceeds the median rank's by a tenth of the step, steadily.

    Of a run in which ranks seem to take turns, and one of them is slow from some step on, the steps
    from that one on are judged.
    """
    whole = rank_work(inputs, RULE)
    if isinstance(whole, Abstention):
        return whole
    if steadily_slow(whole).any():
        return _judge(inputs, whole, since=None, part=1.0)
    tail = work_since_one_is_late(whole)
    if tail is None:
        return None
    part = float(tail.step_ns.sum() / max(whole.step_ns.sum(), 1.0))
    return _judge(inputs, tail, since=int(tail.steps[0]), part=part)


def _judge(inputs: RuleInputs, work: RankWork, *, since: int | None, part: float) -> Finding:
    """The finding on the slowest of the slow ranks.

    Args:
        inputs: The run.
        work: Its steps, or those from `since` on.
        since: Their first; None where all of them are meant.
        part: Their share of the run's time.
    """
    excess = np.median(beyond_typical(work.whole), axis=1)
    slow = np.flatnonzero(steadily_slow(work))
    place = int(slow[excess[slow].argmax()])
    share = min(float(excess[place]) / max(inputs.usual_step_ns, 1.0), 1.0)
    by_phase = {
        name: float(np.median(beyond_typical(times)[place]))
        for name, times in zip(work.own, work.phases, strict=True)
    }
    rank = inputs.world[place]
    state = state_of(inputs, rank, share * part)
    found = _finding(
        inputs, rank, float(excess[place]), share=share, by_phase=by_phase,
        count=len(work.step_ns), waits=work.waits, since=since, lost=share * part,
    )  # fmt: skip
    others = [inputs.world[each] for each in slow if each != place]
    if others:
        found = replace(found, title=f"{found.title}; so {_is(others)} {ranks_text(others)}")
    if state is None:
        return found
    return replace(
        found,
        title=found.title + state.text,
        remedy=state.remedy,
        evidence=(*found.evidence, *state.evidence),
        cause=state.cause,
    )


def _is(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _finding(
    inputs: RuleInputs, rank: int, excess: float, *, share: float, by_phase: Mapping[str, float],
    count: int, waits: Sequence[str], since: int | None, lost: float,
) -> Finding:  # fmt: skip
    main = max(by_phase, key=lambda phase: by_phase[phase])
    named = by_phase[main] >= RANK_PHASE_COVERAGE_RATIO * excess
    enough = count >= CRITICAL_MIN_STEPS
    where = f" in {_PLACES.get(main, main)}" if named else ""
    begun = "" if since is None else f" from step {since} on"
    gpu = ", its GPU's clock and temperature" if inputs.uses_gpu else ""
    return Finding(
        rule=RULE,
        title=f"rank {rank} is slow{begun}: {duration_text(excess)} of each step "
        f"({ratio_text(share)}) more than the others{where}",
        evidence=(
            Evidence(name=f"rank {rank}: work beyond the median rank", value=excess, unit="ns"),
            Evidence(name="the same, share of the step", value=share, unit="ratio"),
            *(
                Evidence(name=f"of it in {phase}", value=extra, unit="ns")
                for phase, extra in by_phase.items()
            ),
        ),
        remedy=_ALONE.format(rank=rank, waits=" and ".join(waits))
        if named and main == "other"
        else f"compare rank {rank} with another: its data shard, its host's load{gpu}; the others "
        f"wait for it in {' and '.join(waits)}",
        confidence=(0.85 if named else 0.7) if enough else 0.5,
        lost_ratio=min(lost, 1.0),
        missing=(f"slowness inside {' or '.join(waits)} itself: waiting there looks the same",),
        rank=rank,
        cause=main if named else None,
        explains=("late_rank",),
        supersedes=("late_rank",),  # where it is the same rank: this one names the phase as well
    )
