"""Ranks that take turns in being the slowest; and one of them that always is, from some step on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from haiprof.base.arrays import Floats, Ints
from haiprof.diagnosis.rank_work import RankWork, beyond_typical, steadily_slow
from haiprof.diagnosis.thresholds import (
    CRITICAL_MIN_STEPS,
    IMBALANCE_MAIN_RATIO,
    IMBALANCE_TURN_RATIO,
    ONSET_MIN_STEPS,
    RANK_EXCESS_WARNING_RATIO,
    STEADY_QUANTILE,
    STEADY_RATIO,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Which rank is the slowest of each step, where it is not always the same."""

    slowest: Ints
    """[step]: place of the slowest rank."""
    lost: Floats
    """[step]: its work beyond the typical rank's, without what it always has, ns."""
    share: float
    """The typical loss, of a step."""
    most: float
    """Share of the steps in which the same rank is the slowest, at most."""


def find_turns(work: RankWork) -> Turns | None:
    """Ranks that take turns; None where they lose too little, or one rank is the slow one."""
    count = len(work.step_ns)
    if count < CRITICAL_MIN_STEPS:
        return None
    beyond = beyond_typical(work.whole)
    steady = np.quantile(beyond, STEADY_QUANTILE, axis=1).clip(0)  # what a slow rank always loses
    beyond = beyond - steady[:, None]
    slowest = beyond.argmax(axis=0)
    lost = beyond.max(axis=0)
    share = float(np.median(lost) / max(work.step_ns.mean(), 1.0))
    turns = np.bincount(slowest, minlength=len(beyond)) / count
    often = int((turns >= IMBALANCE_TURN_RATIO).sum())
    always = turns.max() >= IMBALANCE_MAIN_RATIO or (len(turns) <= 8 and often < 2)
    if share < RANK_EXCESS_WARNING_RATIO or always:
        return None
    return Turns(slowest=slowest, lost=lost, share=share, most=float(turns.max()))


def work_since_one_is_late(work: RankWork) -> RankWork | None:
    """The second part of a run in which ranks seem to take turns, where one is slow from then on.

    A rank that becomes slow in the middle is the slowest in its second part, and whichever it is
    in the first: over the whole run that looks like turns.

    Returns:
        The work of the steps from that one on; None where ranks take turns until the end, or do
        not take turns.
    """
    count = len(work.step_ns)
    if count < 2 * ONSET_MIN_STEPS or find_turns(work) is None:
        return None
    beyond = beyond_typical(work.whole)
    last = beyond[:, -ONSET_MIN_STEPS:]
    place = int(np.median(last, axis=1).argmax())
    late = beyond[place] >= STEADY_RATIO * np.median(last[place])
    first = _onset(late)
    tail = replace(
        work,
        phases=work.phases[..., first:],
        step_ns=work.step_ns[first:],
        steps=work.steps[first:],
    )
    if count - first < max(ONSET_MIN_STEPS, STEADY_QUANTILE * count) or first < CRITICAL_MIN_STEPS:
        return None
    is_slowest = beyond.argmax(axis=0) == place
    before, after = (late & is_slowest)[:first].mean(), (late & is_slowest)[first:].mean()
    if after < IMBALANCE_MAIN_RATIO or before > after / 2 or not steadily_slow(tail)[place]:
        return None
    return tail


def _onset(late: npt.NDArray[np.bool_]) -> int:
    """The step that best divides those in which a rank is not late from those in which it is."""
    signs = np.where(late, 1, -1)
    return int(np.argmin(np.concatenate([[0], np.cumsum(signs)])))
