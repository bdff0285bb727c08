"""What of a phase is Python of the job's own, and what torch's: from sampled stacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats
from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples
from haiprof.run_analysis.lines import innermost_frame, wilson
from haiprof.run_analysis.nesting import Bools
from haiprof.run_format.stack_lines import LOCK_HELD

MIN_COUNT = 20
"""With fewer samples of a phase nothing is said of it."""
FREE_RATIO = 0.5
"""Of no smaller share of the samples is judged what is held of them: it would be chance."""
DISPATCH_RATIO = 1 / 3
"""Of an operator that takes a microsecond, what Python needs to call it: it holds the lock so long.
Measured on `torch.add` of ten numbers, CPython 3.11."""
_TORCH = "/torch/"


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTime:
    """Shares of one phase's time."""

    own_ratio: float
    """The innermost frame is not of torch: Python, a call that waits, another library; also
    operators that the job's own code calls by itself."""
    held_ratio: float
    """Of that, while the thread held the interpreter lock for more than calls of operators: Python,
    and C of other libraries. 0 where nobody looked who held it."""


def python_time(samples: CodeSamples, phase: str) -> PythonTime | None:
    """How a phase of the training threads is shared; None with too few samples.

    Whoever calls an operator holds the lock until it runs: as often as in torch's own frames, or
    for DISPATCH_RATIO of the time, where that is more. Where Python beside that takes a share h,
    the lock is held in h + (1 - h) of it.
    """
    chosen = (samples.phase == CODE_PHASES.index(phase)) & (samples.worker < 0)
    if int(chosen.sum()) < MIN_COUNT:
        return None
    own, weight = ~ends_in_torch(samples)[chosen], samples.weight_ns[chosen]
    held = samples.lock_wait[chosen] == LOCK_HELD
    usual = float(held[~own].mean()) if (~own).any() else 0.0
    usual = max(usual, DISPATCH_RATIO)
    beyond = float(held[own].mean()) - usual if own.any() else 0.0
    python = max(beyond, 0.0) / max(1.0 - usual, FREE_RATIO)
    share = float(weight[own].sum()) / max(float(weight.sum()), 1.0)
    return PythonTime(own_ratio=share, held_ratio=share * python)


def ends_in_torch(samples: CodeSamples) -> Bools:
    """Per sample: whether the innermost frame is torch's own code, or none is known."""
    of_torch = [*(_TORCH in frame.file for frame in samples.tree.frames), True]
    found: Bools = np.array(of_torch, dtype=np.bool_)[samples.tree.place[samples.stack]]
    return found


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
