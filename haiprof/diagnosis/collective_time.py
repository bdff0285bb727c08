"""Time in collectives that Python calls between the phases, and how much of it one rank causes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from haiprof.base.statistics.medians import lower_median
from haiprof.diagnosis.rule_inputs import RuleInputs, median
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.step_frame import STEP_PHASES

COLLECTIVES = "/torch/distributed/distributed_c10d.py"
BETWEEN_PHASES = ("dataloader", "other")
"""In forward, backward and optimizer they are part of how the model is shared among the ranks."""
MIN_COUNT = 20
"""With fewer samples of a rank nothing is said of it."""
RANK_LIMIT = 8


def looked_at(inputs: RuleInputs) -> tuple[int, ...]:
    """The ranks whose samples are read: of many, some at equal distances."""
    return inputs.world[:: max(len(inputs.world) // RANK_LIMIT, 1)]


def has_samples(samples: CodeSamples) -> bool:
    """Whether a rank's training thread was sampled often enough."""
    return int((samples.worker < 0).sum()) >= MIN_COUNT


def phase_ratio(
    inputs: RuleInputs, rank: int, phases: Sequence[str], called: Bools | None = None
) -> float:
    """What part of a rank's steps passes in collectives that are called in these phases.

    Args:
        inputs: The run.
        rank: One with steps.
        phases: Of `CODE_PHASES`.
        called: Per stack of the rank's samples: whether it counts; None counts every collective.
    """
    samples = inputs.load_samples(rank)
    if called is None:
        called = samples.tree.within(COLLECTIVES)
    numbers = [CODE_PHASES.index(phase) for phase in phases]
    chosen = np.isin(samples.phase, numbers) & (samples.worker < 0) & called[samples.stack]
    whole_ns = float(inputs.of_rank(rank)["step_ns"].sum())
    return min(float(samples.weight_ns[chosen].sum()) / max(whole_ns, 1.0), 1.0)


def waiting_for(
    inputs: RuleInputs, rank: int, phases: Sequence[str], *, late_ratio: float
) -> float:
    """Of a step, how long others wait for this rank in collectives called in these phases.

    Who comes last waits for none: what it is in them itself is transfer, which all ranks have. And
    a wait that is longer than the others' remaining phases together must be in these, also where
    samples are too few.

    Args:
        inputs: The run.
        rank: The late one.
        phases: Of `STEP_PHASES`.
        late_ratio: How late it is, of a step.

    Returns:
        The typical other rank's wait, of the samples or of the phases the longer one.
    """
    others = [other for other in looked_at(inputs) if other != rank]
    if not others:
        return 0.0
    waits = late_ratio - lower_median([_elsewhere_ratio(inputs, r, phases) for r in others])
    if _are_known(inputs, (rank, *others)):
        theirs = lower_median([phase_ratio(inputs, other, phases) for other in others])
        waits = max(waits, theirs - phase_ratio(inputs, rank, phases))
    return max(waits, 0.0)


def least_waiting_for(inputs: RuleInputs, rank: int, phases: Sequence[str]) -> float:
    """Of the least time in such collectives among the ranks looked at, the share that is that wait.

    0 where this rank is one of them: the least time is no longer than its own, and it waits for
    none. Where it is not, all of them may wait for it. 0 also where nothing is known.
    """
    others = looked_at(inputs)
    if rank in others or not _are_known(inputs, (rank, *others)):
        return 0.0
    least = min(phase_ratio(inputs, other, phases) for other in others)
    return max(1.0 - phase_ratio(inputs, rank, phases) / least, 0.0) if least else 0.0


def _are_known(inputs: RuleInputs, ranks: Sequence[int]) -> bool:
    return all(rank in inputs.world and has_samples(inputs.load_samples(rank)) for rank in ranks)


def _elsewhere_ratio(inputs: RuleInputs, rank: int, phases: Sequence[str]) -> float:
    """A rank's other phases, as far as they are measured, by its step."""
    steps = inputs.of_rank(rank)
    rest = [f"{phase}_host_ns" for phase in STEP_PHASES if phase not in (*phases, "other")]
    spent_ns = sum(median(steps[name]) or 0.0 for name in rest)
    return spent_ns / max(median(steps["step_ns"]) or 0.0, 1.0)
