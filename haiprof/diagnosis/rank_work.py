"""Each rank's own work per step, in the steps that all ranks have: what rules on ranks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Floats, Ints
from haiprof.diagnosis.finding import Abstention
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import (
    LIKE_RATIO,
    MIN_STEPS,
    RANK_EXCESS_WARNING_RATIO,
    SAME_WORK_CORRELATION,
    SIZES_MIN_COUNT,
    STEADY_QUANTILE,
    STEADY_RATIO,
)
from haiprof.run_analysis.step_frame import STEP_PHASES

Flags = npt.NDArray[np.bool_]

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
    steps: Ints
    """[step]: their numbers."""
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
    phases, step_ns, steps = _match_steps(inputs, own)
    if len(step_ns) < MIN_STEPS:
        return Abstention(rule=rule, why="the ranks have no steps in common")
    return RankWork(own=own, waits=waits, phases=phases, steps=steps, step_ns=step_ns)


def _match_steps(inputs: RuleInputs, own: Sequence[str]) -> tuple[Floats, Floats, Ints]:
    """[own phase, rank, step], the longest rank's step, and the steps that all ranks have."""
    columns = [*(f"{phase}_host_ns" for phase in own), "step_ns"]
    common = inputs.by_rank[inputs.world[0]]["step"].to_numpy()
    for steps in inputs.by_rank.values():
        common = np.intersect1d(common, steps["step"].to_numpy(), assume_unique=True)
    table = np.empty((len(columns), len(inputs.world), len(common)))
    for place, steps in enumerate(inputs.by_rank.values()):
        rows = np.searchsorted(steps["step"].to_numpy(), common)
        for row, name in enumerate(columns):
            table[row, place] = steps[name].fill_null(0).to_numpy()[rows]
    return table[:-1], table[-1].max(axis=0, initial=0.0), common


def beyond_typical(work: Floats) -> Floats:
    """Work [rank, step] beyond the lower-median rank's of the same step.

    The lower of two ranks is the one to compare with: the other is the slow one.
    """
    beyond: Floats = work - np.sort(work, axis=0)[(len(work) - 1) // 2]
    return beyond


def steadily_slow(work: RankWork) -> Flags:
    """[rank]: whether its own work exceeds the typical rank's by a tenth of the step, steadily."""
    beyond = beyond_typical(work.whole)
    excess = np.median(beyond, axis=1)
    steady = np.quantile(beyond, STEADY_QUANTILE, axis=1) >= STEADY_RATIO * excess
    slow: Flags = steady & (excess >= RANK_EXCESS_WARNING_RATIO * max(work.step_ns.mean(), 1.0))
    return slow


def uneven_input_ratio(inputs: RuleInputs, work: RankWork) -> float | None:
    """The largest by the smallest of one rank's inputs, where ranks get such at different steps.

    Sizes are looked at once a second, and so seldom on two ranks at the same step: whether a step
    is a large one for all of them is seen by the correlation of their work over the steps.

    Returns:
        Of the rank whose inputs differ most; None where it is not known, where inputs differ by
        less than any load does, and where all ranks have their large ones at the same steps.
    """
    own = inputs.last_attempts.input_sizes.filter(pl.col("number_count") > 0)
    looks = own.group_by("rank", "root").agg(
        count=pl.len(),
        ratio=pl.col("number_count").quantile(0.75) / pl.col("number_count").quantile(0.25),
    )
    ratio = looks.filter(pl.col("count") >= SIZES_MIN_COUNT)["ratio"].max()
    if not isinstance(ratio, float) or ratio < LIKE_RATIO:
        return None
    varied = work.whole[work.whole.std(axis=1) > 0]
    if len(varied) < 2:
        return None
    alike = np.corrcoef(varied)[np.triu_indices(len(varied), k=1)]
    return ratio if float(np.median(alike)) < SAME_WORK_CORRELATION else None
