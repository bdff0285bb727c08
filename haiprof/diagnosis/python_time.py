"""What of a phase is Python of the job's own, and what torch's: from sampled stacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from haiprof.run_analysis.code_samples import CODE_PHASES, CodeSamples

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
