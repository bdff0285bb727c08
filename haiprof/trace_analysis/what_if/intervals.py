"""What a change makes of the step, as a share of it, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from haiprof.base.arrays import Floats, Ints
from haiprof.base.statistics.bootstrap import resample, student_quantile
from haiprof.trace_analysis.what_if.joining import Job

_LEAST_STEPS = 4
"""Of fewer, the spread between steps is not known."""
_LEAST_PART = 0.5
"""Batches that were waited for must span so much of the window to stand for it."""
_INEXACT_RATIO = 0.05
"""Of what a change gains: a real change is seldom exactly the one that is asked for, and tracing
makes short calls longer. Own choice; `benchmarks/whatif_reruns.py` tries it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The step with a change, over the step as it was replayed."""

    value: float
    low: float | None
    """Of the interval (95 %); None where too few steps were traced."""
    high: float | None


def step_shares(
    job: Job, reached: Ints, spans: Ints, *, error_ratio: float, unexplained_ratio: float
) -> list[Share]:
    """The share of each change."""
    steps = _steps(job, reached)
    covered = steps[:, 0].sum() / spans[0]
    by_batches = job.by_batches and len(steps) > 1 and covered >= _LEAST_PART
    sums = steps.sum(axis=0) if by_batches else spans
    values = sums[1:] / sums[0]
    return [
        _share(float(value), steps[:, column], steps[:, 0], abs(error_ratio), unexplained_ratio)
        for column, value in enumerate(values, start=1)
    ]


def _steps(job: Job, reached: Ints) -> Ints:
    """Time in ns from bound to bound, shape (bounds - 1, 1 + changes).

    A bound is reached when the host is there and all that it launched before has run.
    """
    order = np.argsort(job.caused_ns, kind="stable")
    latest = np.maximum.accumulate(reached[order], axis=0)
    at = np.searchsorted(job.caused_ns[order], job.bounds_ns, side="right") - 1
    found: Ints = np.diff(latest[at], axis=0)
    return found


def _share(
    value: float, changed: Ints, before: Ints, error_ratio: float, unexplained_ratio: float
) -> Share:
    if len(before) < _LEAST_STEPS or before.sum() <= 0:
        return Share(value=value, low=None, high=None)
    residuals: Floats = changed - value * before
    gain = abs(1 - value)
    inexact = math.hypot(_mean_error(residuals) / before.mean(), error_ratio, _INEXACT_RATIO * gain)
    return Share(
        value=value,
        low=max(value - inexact - unexplained_ratio * max(1 - value, 0.0), 0.0),
        high=value + inexact,
    )


def _mean_error(residuals: Floats) -> float:
    """Half the width of the interval of their mean."""
    if not residuals.any():
        return 0.0
    drawn = resample(residuals, residuals[:, None])
    return student_quantile(0.975, drawn.freedom) * float(drawn.mean_sds[0])
