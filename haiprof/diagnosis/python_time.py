"""What of a phase is Python of the job's own, and what torch's: from sampled stacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.lines import innermost_frame, wilson

MIN_COUNT = 20
"""With fewer samples of a phase nothing is said of it."""
LATE_NS = 2_000_000
FREE_RATIO = 0.5
"""Of no smaller share of the samples is judged what is late of them: it would be chance."""
_TORCH = "/torch/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTime:
    """Shares of one phase's time."""

    own_ratio: float
    """The innermost frame is not of torch: Python, a call that waits, another library; also
    operators that the job's own code calls by itself."""
    held_ratio: float
    """Of that, while the interpreter was held: samples came late there, which operators of torch
    and calls that wait let through."""


def python_time(samples: CodeSamples, phase: str, *, core_wait: float = 0.0) -> PythonTime | None:
    """How a phase of the training threads is shared; None with too few samples.

    Samples come late also where the sampler itself waits for a core: as often as those of torch, or
    as the training thread waited (`core_wait`), where that is more. Where the interpreter is held
    for a share h of the time, h + (1 - h) w of the samples are late.
    """
    chosen = (samples.phase == CODE_PHASES.index(phase)) & (samples.worker < 0)
    if int(chosen.sum()) < MIN_COUNT:
        return None
    tree = samples.tree
    of_torch = np.array([_TORCH in frame.file for frame in tree.frames] or [False], dtype=np.bool_)
    leaf, weight = tree.place[samples.stack[chosen]], samples.weight_ns[chosen]
    own, late = ~of_torch[leaf], samples.late_ns[chosen] > LATE_NS
    usual = float(late[~own].mean()) if (~own).any() else 0.0
    usual = max(usual, core_wait)
    beyond = float(late[own].mean()) - usual if own.any() else 0.0
    held = max(beyond, 0.0) / max(1.0 - usual, FREE_RATIO)
    share = float(weight[own].sum()) / max(float(weight.sum()), 1.0)
    return PythonTime(own_ratio=share, held_ratio=share * held)


def new_code_ratio(samples: CodeSamples, phase: str, since_step: int) -> float:
    """How much of a phase's growth is in one line of the job that was no such part of it before.

    What takes cores away makes each line longer by its own length, so that the longest has the same
    share of the growth as of the phase before. Code that is new there has far more.

    Args:
        samples: Of one rank.
        phase: Of the training thread.
        since_step: The first step that was longer.

    Returns:
        The line's share of the growth less its share of the phase before, the most that this may
        have been with 95 % certainty; 0 where the phase is seen too seldom.
    """
    chosen = (samples.phase == CODE_PHASES.index(phase)) & (samples.worker < 0)
    earlier = samples.take(chosen & (samples.step < since_step) & (samples.step >= 0))
    later = samples.take(chosen & (samples.step >= since_step))
    if not len(earlier.stack) or len(later.stack) < MIN_COUNT:
        return 0.0
    first, last = int(earlier.step.min()), int(later.step.max())
    before = _time_by_line(earlier)
    grown = _time_by_line(later) - before * (last - since_step + 1) / max(since_step - first, 1)
    line, whole = int(grown.argmax()), float(grown.clip(0.0).sum())
    if not whole:
        return 0.0
    count = np.array([float(len(earlier.stack))])
    _, most = wilson(before[line : line + 1] / max(float(before.sum()), 1.0) * count, count)
    return max(float(grown[line]) / whole - float(most[0]), 0.0)


def _time_by_line(samples: CodeSamples) -> Floats:
    """[frame of the tree]: time with that frame as the job's innermost one; the last: none."""
    tree = samples.tree
    frame = innermost_frame(tree)[samples.stack]
    frame = np.where(frame < 0, len(tree.frames), frame)
    return np.bincount(frame, samples.weight_ns, minlength=len(tree.frames) + 1).astype(np.float64)
