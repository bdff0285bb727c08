"""Each rank's own work per step, in the steps that all ranks have: what rules on ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats
from haiprof.diagnosis.finding import Abstention
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import MIN_STEPS
from haiprof.run_analysis.step_frame import STEP_PHASES

# Where a rank waits for the others, time is not its own work (TraceML: backward; with FSDP both).
_WAITS, _SHARDED_WAITS = ("backward",), ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """Work of all ranks, side by side."""

    own: tuple[str, ...]
    """Phases in which no rank waits for another."""
    waits: tuple[str, ...]
    """Phases in which they do."""
    phases: Floats
    """[own phase, rank, step] in ns."""
    step_ns: Floats
    """[step]: the longest rank's step, of which what it has beyond the others is a part."""

    @property
    def whole(self) -> Floats:
        """[rank, step]: own work in all these phases."""
        total: Floats = self.phases.sum(axis=0)
        return total


def rank_work(inputs: RuleInputs, rule: str) -> RankWork | Abstention:
    """The work of all ranks, or why a rule cannot compare it."""
    if len(inputs.world) < 2:
        return Abstention(rule=rule, why="one rank")
    if any(steps["backward_host_ns"].null_count() for steps in inputs.by_rank.values()):
        return Abstention(rule=rule, why="backward, where ranks wait, is not measured on all ranks")
    waits = _SHARDED_WAITS if inputs.sharded else _WAITS
    own = tuple(phase for phase in STEP_PHASES if phase not in waits)
    phases, step_ns = _match_steps(inputs, own)
    if len(step_ns) < MIN_STEPS:
        return Abstention(rule=rule, why="the ranks have no steps in common")
    return RankWork(own=own, waits=waits, phases=phases, step_ns=step_ns)


def _match_steps(inputs: RuleInputs, own: Sequence[str]) -> tuple[Floats, Floats]:
    """[own phase, rank, step] and the longest rank's step, for the steps that all ranks have."""
    columns = [*(f"{phase}_host_ns" for phase in own), "step_ns"]
    common = inputs.by_rank[inputs.world[0]]["step"].to_numpy()
    for steps in inputs.by_rank.values():
        common = np.intersect1d(common, steps["step"].to_numpy(), assume_unique=True)
    table = np.empty((len(columns), len(inputs.world), len(common)))
    for place, steps in enumerate(inputs.by_rank.values()):
        rows = np.searchsorted(steps["step"].to_numpy(), common)
        for row, name in enumerate(columns):
            table[row, place] = steps[name].fill_null(0).to_numpy()[rows]
    return table[:-1], table[-1].max(axis=0, initial=0.0)


def beyond_typical(work: Floats) -> Floats:
    """Work [rank, step] beyond the lower-median rank's of the same step.

    The lower of two ranks is the one to compare with: the other is the slow one.
    """
    beyond: Floats = work - np.sort(work, axis=0)[(len(work) - 1) // 2]
    return beyond
