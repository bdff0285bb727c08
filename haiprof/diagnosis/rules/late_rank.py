"""One rank begins its collectives later than the others: slow, wherever in the step it is."""

from __future__ import annotations

from dataclasses import replace

import polars as pl

from haiprof.base.statistics.medians import lower_median
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.collective_time import (
    BETWEEN_PHASES,
    least_waiting_for,
    waiting_for,
)
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, median, usual_share
from haiprof.diagnosis.slow_rank import state_of
from haiprof.diagnosis.steal import explain_by_steal
from haiprof.diagnosis.thresholds import (
    COSTLY_CRITICAL_RATIO,
    CRITICAL_MIN_STEPS,
    EXPLAINED_RATIO,
    MIN_STEPS,
    NOTE_SURE,
    RANK_EXCESS_WARNING_RATIO,
    STEADILY_LAST_RATIO,
)

RULE = "late_rank"
_FROM_ONE = ("broadcast", "scatter", "broadcastoop", "send")
"""Collectives that one rank feeds: who is late there has made something before it."""
_OWN_PHASES = ("dataloader", "forward", "backward", "optimizer")
_BEFORE = "before its collectives"
"""Where it is not known where they are begun."""


def late_rank(inputs: RuleInputs) -> Judgement:
    """Fires where a rank holds the others up for a tenth of the step, and its phases do not say so.

    Time inside backward is work on the slow rank and waiting on the others, and looks the same on
    all of them; the time at which each begins a collective does not.
    """
    if len(inputs.world) < 2:
        return Abstention(rule=RULE, why="one rank")
    known = inputs.lateness.filter(pl.col("late_ns_per_step").is_not_null())
    if not known.height:
        return Abstention(rule=RULE, why="no collectives that ranks have in common were recorded")
    worst = known.row(0, named=True)
    step_ns = inputs.usual_step_ns
    if not step_ns or worst["step_count"] < MIN_STEPS:
        return Abstention(rule=RULE, why="too few steps with collectives")
    share = min(worst["late_ns_per_step"] / step_ns, 1.0)
    if share < RANK_EXCESS_WARNING_RATIO:
        return None
    lost = inputs.stolen.get(worst["rank"], 0.0)
    if share - lost < RANK_EXCESS_WARNING_RATIO:
        return Abstention(rule=RULE, why=explain_by_steal(ratio_text(share), lost))
    found = _finding(inputs, worst, share)
    state = state_of(inputs, worst["rank"], _mean_share(inputs, worst, share))
    if state is None:
        return found
    return replace(
        found,
        title=found.title + state.text,
        remedy=state.remedy,
        evidence=(*found.evidence, *state.evidence),
        cause=state.cause,
    )


def _mean_share(inputs: RuleInputs, worst: dict[str, object], share: float) -> float:
    """What a rank loses on average, as counters have it: its lateness less the others'.

    Of ranks that are late by turns the median step says more than that. Not less than half of the
    median: a single late step of the others' says nothing of what makes this one late.
    """
    of_group = inputs.lateness.filter(pl.col("group") == worst["group"])
    others = of_group.filter(pl.col("rank") != worst["rank"])["late_ns"]
    trained_ns = inputs.trained_ns.get(int(str(worst["rank"])), 0.0)
    if not len(others) or not trained_ns:
        return share
    mean = (int(str(worst["late_ns"])) - lower_median(others.to_list())) / trained_ns
    return min(max(mean, EXPLAINED_RATIO * share), share)


def _finding(inputs: RuleInputs, worst: dict[str, object], share: float) -> Finding:
    rank, late = int(str(worst["rank"])), float(str(worst["late_ns_per_step"]))
    kind, count = worst["kind"], int(str(worst["step_count"]))
    others = inputs.lateness.filter((pl.col("group") == worst["group"]) & (pl.col("rank") != rank))[
        "late_ns_per_step"
    ].max()
    of_median = min(late / max(median(inputs.steps["step_ns"]) or 0.0, 1.0), 1.0)  # as waits are
    alone = str(kind).lower().replace("_", "") in _FROM_ONE
    title = f"rank {rank} prepares alone what the others wait for" if alone else (
        f"rank {rank} is slow {_where(inputs, rank, late, of_median)}"
    )  # fmt: skip
    gpu = "its GPU's clock and temperature, " if inputs.uses_gpu else ""
    steady = float(str(worst["last_ratio"])) >= STEADILY_LAST_RATIO
    of_group = float(inputs.lateness.filter(pl.col("group") == worst["group"])["late_ns"].sum())
    always = steady or int(str(worst["late_ns"])) >= STEADILY_LAST_RATIO * of_group
    sure = 0.85 if count >= CRITICAL_MIN_STEPS else 0.6
    return Finding(
        rule=RULE,
        title=f"{title}{'' if always else ' at times'}: it begins {kind} "
        f"{duration_text(late)} ({ratio_text(share)} of the step) later than the others",
        evidence=(
            Evidence(name=f"rank {rank}: lateness per step", value=late, unit="ns"),
            Evidence(name="the same, share of the step", value=share, unit="ratio"),
            Evidence(
                name="most of any other rank",
                value=None if others is None else float(str(others)),
                unit="ns",
            ),
            Evidence(
                name=f"collectives at which rank {rank} alone was last",
                value=float(str(worst["last_ratio"])),
                unit="ratio",
            ),
        ),
        remedy=f"compare rank {rank} with another: {gpu}its host's load, the work that its data "
        "makes; a trace of both shows the operators (--trace). The other ranks only wait for it",
        confidence=sure if steady or share >= COSTLY_CRITICAL_RATIO else NOTE_SURE,
        lost_ratio=min(share, 1.0),
        cause=None if always else "now_and_then",
        rank=rank,
        explains=_consequences(inputs, rank, of_median),
    )


def _where(inputs: RuleInputs, rank: int, late_ns: float, share: float) -> str:
    """Where in the step a rank is slow, by the phase in which the collectives are begun.

    Between the phases a rank may also come late that was slow in one of them: its own is longer.
    """
    own = {phase: _beyond_others(inputs, rank, phase) for phase in _OWN_PHASES}
    if all(excess is None for excess in own.values()):
        return _BEFORE
    waits = waiting_for(inputs, rank, BETWEEN_PHASES, late_ratio=share)
    if waits >= EXPLAINED_RATIO * share:
        longest = max(own, key=lambda phase: own[phase] or 0.0)
        slow = (own[longest] or 0.0) >= EXPLAINED_RATIO * late_ns
        return f"in {longest}" if slow else "between the phases"
    if inputs.marked_by and inputs.steps["backward_host_ns"].null_count():
        return _BEFORE
    if inputs.sharded:
        return "inside forward or backward"
    return "inside backward" if inputs.backward_work.height else _BEFORE


def _beyond_others(inputs: RuleInputs, rank: int, phase: str) -> float | None:
    """Time in a phase of the median step beyond the typical other rank's; None: not measured."""
    known = {r: median(steps[f"{phase}_host_ns"]) for r, steps in inputs.by_rank.items()}
    own = known.pop(rank, None)
    others = [ns for ns in known.values() if ns is not None]
    return None if own is None or not others else own - lower_median(others)


def _consequences(inputs: RuleInputs, rank: int, share: float) -> tuple[str, ...]:
    """Rules whose finding is mostly waiting for this rank in collectives."""
    outside = usual_share(inputs, "other") or 0.0
    waits = waiting_for(inputs, rank, ("other",), late_ratio=share)
    found = []
    if waits and waits >= EXPLAINED_RATIO * outside:
        found.append("outside_the_model")
    if least_waiting_for(inputs, rank, BETWEEN_PHASES) >= EXPLAINED_RATIO:
        found.append("blocking_collectives")
    return tuple(found)
