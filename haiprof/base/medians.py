"""Medians of few values, in plain Python: the lower, the upper, and the mean of the two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

_Number = TypeVar("_Number", int, float)
MAD_TO_SIGMA = 1.4826  # a normal distribution's standard deviation by its median absolute deviation


def lower_median(values: Iterable[float]) -> float:
    """The middle value, of an even count the lower of the two: of two ranks the slow one is not it.

    As `statistics.median_low`, whose module takes 8 ms to load. TraceML's typical rank is this.
    """
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def upper_median(values: Iterable[_Number]) -> _Number:
    """The middle value, of an even count the upper of the two."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def mean_median(values: Sequence[float]) -> float:
    """The middle value, of an even count the mean of the two, as `statistics.median`."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
