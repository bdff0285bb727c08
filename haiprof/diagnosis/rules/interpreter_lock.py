"""Another Python thread holds the interpreter lock, and the training thread waits for it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from haiprof.base.units import ratio_text
from haiprof.diagnosis.causes import PHASE_RULES
from haiprof.diagnosis.finding import Abstention, Evidence, Finding, Judgement
from haiprof.diagnosis.rule_inputs import RuleInputs, typical_rank
from haiprof.diagnosis.thresholds import LOCK_WAIT_RATIO, LOCK_WAIT_SAMPLES
from haiprof.run_analysis.code_samples import OTHER_THREADS, CodeSamples
from haiprof.run_analysis.lines import wilson
from haiprof.run_format.stack_lines import LOCK_WAITED_FOR

RULE = "interpreter_lock"


def interpreter_lock(inputs: RuleInputs) -> Judgement:
    """Fires where the training thread was found waiting for the lock in a tenth of the samples.

    Where another thread holds CPython's lock when a sample is due, the kernel is asked whether the
    training thread sleeps on it (`in_job/sample_clock.c`): it then waits for that thread, whatever
    that one does, and not for a queue, a disk or a core. Beazley, Understanding the Python GIL
    (PyCon 2010), shows how an operator that lets go of the lock for microseconds loses 5 ms each
    time, and all of a long call of C code that does not let go.
    """
    found = {rank: inputs.load_samples(rank) for rank in _asked_ranks(inputs)}
    shares = {rank: _share(samples) for rank, samples in found.items()}
    waits = {rank: share for rank, share in shares.items() if share is not None}
    if not waits:
        return Abstention(rule=RULE, why="too few samples say whether the lock was waited for")
    rank = max(waits, key=lambda each: waits[each].least)
    share, least = waits[rank].share, waits[rank].least
    if least < LOCK_WAIT_RATIO:
        return None
    one = min(wait.share for wait in waits.values()) < LOCK_WAIT_RATIO / 2
    whom = f"rank {rank}" if one else "the training thread"
    return Finding(
        rule=RULE,
        rank=rank if one else None,
        title=f"another Python thread holds the interpreter lock: {whom} waits for it "
        f"{ratio_text(share)} of the time",
        evidence=(
            Evidence(name="waiting for the interpreter lock (GIL)", value=share, unit="ratio"),
            Evidence(name="of the time, at least (95 %)", value=least, unit="ratio"),
            Evidence(
                name="CPU of other Python threads", value=_other_cores(found[rank]), unit="cores"
            ),
        ),
        remedy="move that thread's work to another process (multiprocessing, subprocess, a "
        "DataLoader worker), do less of it, or have it call code that lets go of the lock",
        confidence=0.9,
        lost_ratio=share,
        explains=(
            *PHASE_RULES,
            "host_bound",
            "gpu_waits_for_host",
            "launch_bound",
            "evaluation_heavy",
            "blocking_collectives",
            "small_batches",
            "ranks_uneven",
            "late_rank",
            "data_imbalance",
            "jitter",
            "step_time_drift",
        ),
    )


def _asked_ranks(inputs: RuleInputs) -> tuple[int, ...]:
    """The first, the typical and the last one: reading the samples of all would take too long."""
    return tuple(dict.fromkeys((inputs.world[0], typical_rank(inputs), inputs.world[-1])))


class _Waits(NamedTuple):
    """Of the time of a rank's steps, that in which its training thread waited for the lock."""

    share: float
    least: float
    """With 95 % certainty."""


def _share(samples: CodeSamples) -> _Waits | None:
    """By the time that each sample stands for: a long run is sampled less often later.

    Returns:
        None where too few samples say whether the thread waited.
    """
    known = samples.take((samples.lock_wait >= 0) & (samples.worker < 0))
    weight, waits = known.weight_ns, known.lock_wait == LOCK_WAITED_FOR
    if len(weight) < LOCK_WAIT_SAMPLES or not weight.sum():
        return None
    share = float(weight[waits].sum() / weight.sum())
    count = float(weight.sum() ** 2 / (weight**2).sum())  # Kish's effective number of samples
    low, _ = wilson(np.array([share * count]), np.array([count]))
    return _Waits(share, float(low[0]))


def _other_cores(samples: CodeSamples) -> float | None:
    """Of the time of the samples, what other threads of the process were on a core."""
    others = (samples.phase == OTHER_THREADS) & (samples.worker < 0)
    if not others.any():
        return None
    seconds = float(samples.time_ns.max() - samples.time_ns.min())
    return float(samples.weight_ns[others].sum()) / seconds if seconds else None
