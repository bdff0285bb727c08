"""Step times of two runs against each other: a ratio with its interval, and the parts of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from haiprof.base.intervals import Floats
from haiprof.base.statistics import Resampled, Uncertain, adjust_p_values, resample, segment_spread
from haiprof.diagnosis.compare.compared_run import DEVICE_PHASES, HOST_PHASES, PAUSES, ComparedRun
from haiprof.diagnosis.thresholds import (
    COMPARE_MAX_RANKS,
    COMPARE_MIN_EFFECTIVE,
    COMPARE_MIN_STEPS,
    COMPARE_P_VALUE,
    COMPARE_RUN_RATIO,
)

_RANK_REPLICATES = 300
MEAN_STEP = "mean step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The median step of two runs; the interval holds the true ratio in 99 of 100 cases."""

    before_ns: float
    after_ns: float
    before_step_count: int
    after_step_count: int
    ratio: float
    """After by before: 1.1 is 10 % slower."""
    low_ratio: float | None
    high_ratio: float | None
    p_value: float | None
    before_effective_count: float | None
    """Independent steps that tell as much."""
    after_effective_count: float | None
    before_drift_ratio: float | None
    """Last third of the run's steps against the first: 0.1 is 10 % slower; None for few steps."""
    after_drift_ratio: float | None
    unknown: str
    """Why there is no interval; empty where there is."""

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    @property
    def is_slower(self) -> bool:
        """Beyond chance."""
        return self.low_ratio is not None and self.low_ratio > 1

    @property
    def is_faster(self) -> bool:
        """Beyond chance."""
        return self.high_ratio is not None and self.high_ratio < 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one part of a step takes in both runs."""

    name: str
    """A phase, `gc`, `save`, or `mean step`."""
    clock: str
    """`host` or `device`."""
    statistic: str
    """`middle`: over the middle half of the steps by length; `mean`: over all."""
    before_ns: float
    after_ns: float
    low_ns: float
    """Of the difference, as `high_ns`."""
    high_ns: float
    p_value: float
    adjusted_p_value: float | None = None
    """For all parts together (Benjamini and Hochberg)."""
    share_ratio: float | None = None
    """Of the difference of steps; of host phases, which add up to 1."""

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    @property
    def is_significant(self) -> bool:
        """Beyond chance, with all parts counted."""
        return self.adjusted_p_value is not None and self.adjusted_p_value <= COMPARE_P_VALUE


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange:
    """One rank in both runs."""

    rank: int
    change: Change


def step_change(before: Floats, after: Floats, *, replicates: int = 1000) -> Change:
    """The ratio of two runs' median steps.

    Args:
        before: Step times in ns after warm-up, in order.
        after: Of the other run.
        replicates: Of the bootstrap.

    Returns:
        The interval is Student's t with the bootstrap's standard errors of the log of both medians
        (`base.statistics`), and with what two runs of the same code
        differ by: as much as parts
        of these runs do beyond chance, and no less than `COMPARE_RUN_RATIO`. Null with its reason
        where there are too few steps, or too few that are independent of each other; a run that
        drifts remembers, and so has few.
    """
    found = Change(
        before_ns=_median(before), after_ns=_median(after),
        before_step_count=len(before), after_step_count=len(after),
        ratio=_median(after) / _median(before) if len(before) and len(after) else math.nan,
        low_ratio=None, high_ratio=None, p_value=None,
        before_effective_count=None, after_effective_count=None,
        before_drift_ratio=_drift(before), after_drift_ratio=_drift(after), unknown="",
    )  # fmt: skip
    least = min(len(before), len(after))
    if least < COMPARE_MIN_STEPS:
        why = f"{len(before)} and {len(after)} steps after warm-up; {COMPARE_MIN_STEPS} each needed"
        return replace(found, unknown=why)
    return _with_interval(found, [np.log(before), np.log(after)], replicates)


def _with_interval(found: Change, logs: list[Floats], replicates: int) -> Change:
    """From the logs of both runs' steps; or why there is none."""
    drawn = [resample(log, log[:, None], replicates=replicates) for log in logs]
    found = replace(
        found,
        before_effective_count=drawn[0].effective_count,
        after_effective_count=drawn[1].effective_count,
    )
    effective = min(own.effective_count for own in drawn)
    if effective < COMPARE_MIN_EFFECTIVE:
        why = f"steps depend on those before: they tell as much as {effective:.0f} independent ones"
        return replace(found, unknown=f"{why}, {COMPARE_MIN_EFFECTIVE} are needed")
    error = _ratio_error(drawn, logs)
    log_ratio, width = drawn[1].median - drawn[0].median, error.half_width()
    return replace(
        found,
        low_ratio=math.exp(log_ratio - width),
        high_ratio=math.exp(log_ratio + width),
        p_value=error.p_value(log_ratio),
    )


def _median(values: Floats) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _drift(series: Floats) -> float | None:
    third = len(series) // 3
    if third < COMPARE_MIN_STEPS // 2:
        return None
    return _median(series[-third:]) / _median(series[:third]) - 1


def _ratio_error(drawn: list[Resampled], logs: list[Floats]) -> Uncertain:
    parts = [(own.median_sd**2, own.freedom) for own in drawn]
    variance, freedom = run_spread(logs)
    return Uncertain(parts=(*parts, (2 * variance, freedom)))


def run_spread(logs: list[Floats]) -> tuple[float, float]:
    """Variance of the log of one run's median from run to run, and its degrees of freedom."""
    found = [segment_spread(log) for log in logs]
    variance = sum(each for each, _ in found) / len(found)
    if variance < COMPARE_RUN_RATIO**2:
        return COMPARE_RUN_RATIO**2, math.inf
    return variance, sum(freedom for _, freedom in found)


def step_parts(before: ComparedRun, after: ComparedRun, change: Change) -> tuple[Part, ...]:
    """What makes the difference, the largest first; only what both runs have.

    Phases are means over ranks and over the middle half of the steps by their length, where they
    add up; their intervals count within-run straying and run-to-run differences as those of the
    step. Garbage collections and saves are means over all steps, and part of the phases in which
    they came; so is the mean step, which feels stalls that the median does not.
    """
    if change.unknown:
        return ()
    found = [
        *_of_columns(before, after, HOST_PHASES, "host"),
        *_of_columns(before, after, DEVICE_PHASES, "device"),
        *_of_columns(before, after, (*PAUSES, "mean_step_ns"), "host"),
    ]
    together = adjust_p_values([part.p_value for part in found])
    total = sum(part.difference_ns for part in found if _adds_up(part))
    finished = [
        replace(
            part,
            adjusted_p_value=p,
            share_ratio=part.difference_ns / total if _adds_up(part) and total else None,
        )
        for part, p in zip(found, together, strict=True)
    ]
    return tuple(sorted(finished, key=lambda part: -abs(part.difference_ns)))


def _adds_up(part: Part) -> bool:
    return part.clock == "host" and part.statistic == "middle"


def _of_columns(
    before: ComparedRun, after: ComparedRun, names: tuple[str, ...], clock: str
) -> Iterator[Part]:
    shared = tuple(n for n in names if all(_has(side, n) for side in (before, after)))
    held = [side.columns(shared) for side in (before, after)]
    if not shared or held[0] is None or held[1] is None:
        return
    if min(len(held[0][0]), len(held[1][0])) < COMPARE_MIN_STEPS:
        return
    logs = [np.log(own[0]) for own in held if own is not None]
    drawn = [resample(log, own[1]) for log, own in zip(logs, held, strict=True) if own is not None]
    variance, freedom = run_spread(logs)
    means = names[0] in PAUSES
    for place, name in enumerate(shared):
        values = [float((own.means if means else own.middles)[place]) for own in drawn]
        sds = [float((own.mean_sds if means else own.middle_sds)[place]) for own in drawn]
        parts = [(sd**2, own.freedom) for sd, own in zip(sds, drawn, strict=True)]
        parts += [(variance * value**2, freedom) for value in values]
        error, difference = Uncertain(parts=tuple(parts)), values[1] - values[0]
        yield Part(
            name=_name(name), clock=clock, statistic="mean" if means else "middle",
            before_ns=values[0], after_ns=values[1],
            low_ns=difference - error.half_width(), high_ns=difference + error.half_width(),
            p_value=error.p_value(difference),
        )  # fmt: skip


def _has(side: ComparedRun, name: str) -> bool:
    return side.columns((name,)) is not None


def _name(column: str) -> str:
    if column == "mean_step_ns":
        return MEAN_STEP
    return column.removesuffix("_ns").removesuffix("_host").removesuffix("_device")


def rank_changes(before: ComparedRun, after: ComparedRun) -> tuple[RankChange, ...]:
    """Ranks that both runs have, by how much they changed; none where there is only one rank.

    Of more than `COMPARE_MAX_RANKS` those that changed most.
    """
    old, new = before.of_ranks(), after.of_ranks()
    both = sorted(old.keys() & new.keys())
    if len(both) < 2:
        return ()
    moved = sorted(both, key=lambda rank: -abs(math.log(_median(new[rank]) / _median(old[rank]))))
    found = [
        RankChange(rank=rank, change=step_change(old[rank], new[rank], replicates=_RANK_REPLICATES))
        for rank in moved[:COMPARE_MAX_RANKS]
    ]
    return tuple(found)
