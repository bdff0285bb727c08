"""The mean step of two runs, its positions, ranks and counters against each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TypeVar

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats
from haiprof.base.ledger import POSITIONS
from haiprof.base.statistics import RUN_RATIO, BlockMean, Uncertain, adjust_p_values, block_mean
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.diagnosis.machine_causes import used_by_others
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.thresholds import COMPARE_MIN_STEPS, COMPARE_P_VALUE
from haiprof.run_analysis.counters import host_windows, select_training_samples, training_spans
from haiprof.run_analysis.step_frame import STEP_PHASES

DEVICE_COVERAGE_RATIO = 0.8
"""The device clock is used in a comparison where it has this share of the steps; never both clocks
in one. TraceML asks for all steps, but an evaluation or a skipped step takes some away."""
COMPARE_MAX_RANKS = 32
"""Of more ranks only those that changed most are named with an interval. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """The mean step of two runs; the interval holds the true ratio in 99 of 100 cases."""

    before_ns: float
    """Mean over judged steps and ranks, with all that lies between steps."""
    after_ns: float
    before_median_ns: float
    after_median_ns: float
    before_step_count: int
    after_step_count: int
    ratio: float
    """After by before: 1.1 is 10 % slower."""
    low_ratio: float | None
    high_ratio: float | None
    p_value: float | None
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

    @property
    def least_ns(self) -> float:
        """The end of the difference's interval that is nearer to 0; 0 where nothing is claimed."""
        if self.low_ratio is None or self.high_ratio is None:
            return 0.0
        return max(self.low_ratio - 1, 1 - self.high_ratio, 0.0) * self.before_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One part of the mean step in both runs, in ns per step."""

    title: str
    """For people."""
    before_ns: float
    after_ns: float
    low_ns: float
    """Of the difference, as `high_ns`: it holds the true one in 99 of 100 cases."""
    high_ns: float
    p_value: float
    adjusted_p_value: float | None = None
    """For all parts together (Benjamini and Hochberg)."""

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    @property
    def is_certain(self) -> bool:
        """Beyond chance, with all parts counted."""
        sure = self.adjusted_p_value is not None and self.adjusted_p_value <= COMPARE_P_VALUE
        return sure and not self.low_ns <= 0 <= self.high_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionChange(Change):
    """A position of the step, exact by its spans; those of the host add up to the mean step."""

    name: str
    """Of POSITIONS, without collections, which are one more; on a device, of STEP_PHASES."""
    clock: str
    """`host` or `device`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange(Change):
    """One rank's own time, without waiting for later ranks."""

    rank: int


AnyChange = TypeVar("AnyChange", bound=Change)


def step_change(before: Floats, after: Floats, medians: Sequence[float]) -> StepChange:
    """The ratio of two runs' mean steps, by their judged steps in order; medians stand beside."""
    means = [float(own.mean()) if len(own) else math.nan for own in (before, after)]
    found = StepChange(
        before_ns=means[0], after_ns=means[1],
        before_median_ns=medians[0], after_median_ns=medians[1],
        before_step_count=len(before), after_step_count=len(after), ratio=means[1] / means[0],
        low_ratio=None, high_ratio=None, p_value=None, unknown="",
    )  # fmt: skip
    if min(len(before), len(after)) < COMPARE_MIN_STEPS:
        why = f"{len(before)} and {len(after)} steps after warm-up; {COMPARE_MIN_STEPS} each needed"
        return replace(found, unknown=why)
    error = Uncertain(
        parts=tuple(
            (variance / mean.value**2, freedom)
            for mean in (_mean(before), _mean(after))
            for variance, freedom in mean.error.parts
        )
    )
    middle, width = math.log(found.ratio), error.half_width()
    return replace(
        found,
        low_ratio=math.exp(middle - width),
        high_ratio=math.exp(middle + width),
        p_value=error.p_value(middle),
    )


def difference(before: BlockMean, after: BlockMean) -> dict[str, float]:
    """The fields of a Change."""
    error = Uncertain(parts=(*before.error.parts, *after.error.parts))
    by, width = after.value - before.value, error.half_width()
    return {
        "before_ns": before.value, "after_ns": after.value, "low_ns": by - width,
        "high_ns": by + width, "p_value": error.p_value(by),
    }  # fmt: skip


def certain(changes: Sequence[AnyChange]) -> tuple[AnyChange, ...]:
    """The same with p-values for all of them together, the largest difference first."""
    together = adjust_p_values([one.p_value for one in changes])
    known = [replace(one, adjusted_p_value=p) for one, p in zip(changes, together, strict=True)]
    return tuple(sorted(known, key=lambda one: -abs(one.difference_ns)))


def position_changes(before: ComparedRun, after: ComparedRun) -> tuple[PositionChange, ...]:
    """Positions on the host, and phases on the device where both runs have them."""
    found = []
    for clock, read in (("host", _positions), ("device", _device_phases)):
        sides = [read(side) for side in (before, after)]
        if all(sides):
            for name in sides[0] | sides[1]:
                means = [_mean(side.get(name, np.zeros(4))) for side in sides]
                title = name.replace("_", " ") + (", device" if clock == "device" else "")
                known = difference(*means)
                found.append(PositionChange(title=title, name=name, clock=clock, **known))
    return certain(found)


def rank_changes(before: RunLedger, after: RunLedger) -> tuple[RankChange, ...]:
    """Ranks that both runs have and that changed unlike the middle one; at most 32 of them."""
    means = [
        {rank: _mean(own) for rank, own in zip(found.time.ranks, found.time.own_ns, strict=True)}
        for found in (before, after)
    ]
    both = sorted(means[0].keys() & means[1].keys())
    found = certain([
        RankChange(title=f"rank {rank}", rank=rank, **difference(means[0][rank], means[1][rank]))
        for rank in both
    ])  # fmt: skip
    middle = float(np.median([one.difference_ns for one in found] or [0.0]))
    unlike = [one for one in found if one.is_certain and not one.low_ns <= middle <= one.high_ns]
    return tuple(unlike[:COMPARE_MAX_RANKS])


def _mean(series: Floats) -> BlockMean:
    return block_mean(series, run_ratio=RUN_RATIO)


def _positions(side: ComparedRun) -> dict[str, Floats]:
    """By position: its time in each step, mean over ranks."""
    if side.ledger is None:
        return {}
    time = side.ledger.time
    found = {POSITIONS[p]: time.cell_ns[row].mean(axis=0) for row, p in enumerate(time.used)}
    found["garbage collection"] = time.collected_ns.mean(axis=0)
    return {name: own for name, own in found.items() if own.any()}


def _device_phases(side: ComparedRun) -> dict[str, Floats]:
    """The same on the device, of steps that have all of them; empty where many have not."""
    names = [f"{phase}_device_ns" for phase in STEP_PHASES]
    known = side.inputs.steps.drop_nulls(names)
    if known.height < max(DEVICE_COVERAGE_RATIO * side.inputs.steps.height, COMPARE_MIN_STEPS):
        return {}
    steps = known.group_by("step").agg(pl.col(names).mean()).sort("step")
    columns = ((name.removesuffix("_device_ns"), steps[name].to_numpy()) for name in names)
    return {name: own.astype(np.float64) for name, own in columns if own.any()}


COMPARE_COUNTER_RATIO = 0.10
"""A counter that changed by less is not shown: memory in use, say, is never twice the same. Own
choice."""

_LEAST_SAMPLES = 8
_MOST_SAMPLES = 240  # longer ones are averaged by time: a second more or less tells nothing
_KEY = ("source", "metric", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterChange:
    """One metric of one source: the mean over its entities and over time."""

    source: str
    metric: str
    unit: str
    before: float
    after: float
    low: float
    """Of the difference, as `high`."""
    high: float
    p_value: float
    adjusted_p_value: float | None = None

    @property
    def size(self) -> float:
        """Difference by the larger of both, in [-1, 1]."""
        return (self.after - self.before) / max(abs(self.before), abs(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy others kept the cores of the ranks' nodes."""

    other_cores: float | None
    """Cores used by processes that are not the job's, or by other machines (steal): all nodes'."""
    core_count: float | None
    wait_ratio: float | None
    """Share of time in which a rank's main thread waited for a core; mean over ranks."""
    main_cores: float | None
    """Cores that a rank's own process used; mean over ranks."""

    @property
    def other_ratio(self) -> float | None:
        """Of all cores."""
        known = self.other_cores is not None and self.core_count
        return self.other_cores / self.core_count if known else None  # type: ignore[operator]


def counter_changes(before: ComparedRun, after: ComparedRun) -> tuple[CounterChange, ...]:
    """Metrics that differ beyond chance (all asked together) and by enough, the largest first.

    Needs eight samples of each run. Intervals as those of the mean step, by `block_mean`.
    """
    old, new = _series(before), _series(after)
    found = []
    for key in sorted(old.keys() & new.keys()):
        series = old[key], new[key]
        if min(map(len, series)) < _LEAST_SAMPLES or not np.isfinite(np.concatenate(series)).all():
            continue
        means = difference(*(block_mean(own, run_ratio=0.0) for own in series))
        values = {name.removesuffix("_ns"): value for name, value in means.items()}
        found.append(CounterChange(source=key[0], metric=key[1], unit=key[2], **values))
    together = adjust_p_values([change.p_value for change in found])
    sure = [
        replace(change, adjusted_p_value=p)
        for change, p in zip(found, together, strict=True)
        if p is not None and p <= COMPARE_P_VALUE and abs(change.size) >= COMPARE_COUNTER_RATIO
    ]
    return tuple(sorted(sure, key=lambda c: (-abs(c.size), c.source, c.metric)))


def _series(side: ComparedRun) -> dict[tuple[str, str, str], Floats]:
    spans = training_spans(side.inputs.by_rank.values())
    valid = side.analyzer.counters().drop_nulls("value")
    inside = select_training_samples(valid, host_windows(spans, side.analyzer.ranks()))
    if not inside.height:
        return {}
    times = inside["time_ns"].to_numpy()
    width = max(int(times.max() - times.min()) // _MOST_SAMPLES, 1)
    entity_means = inside.group_by(*_KEY, "time_ns").agg(pl.col("value").mean())
    binned = entity_means.group_by(*_KEY, (pl.col("time_ns") // width).alias("bin")).agg(
        pl.col("value").mean()
    )
    whole = binned.sort("bin").group_by(_KEY, maintain_order=True).agg("value").rows()
    return {(source, metric, unit): np.array(values) for source, metric, unit, values in whole}


def load_of(side: ComparedRun) -> Load:
    """What other processes used of the nodes' cores, and how the ranks waited for one."""
    inputs, others, cores = side.inputs, list[float](), list[float]()
    for host, node in inputs.node_cpus.items():
        used = used_by_others(inputs, host)
        if used is not None and node.core_count is not None:
            stolen = inputs.counted.nodes[host][None].get("cpu_steal_ratio") or 0.0
            others.append(used + stolen * node.core_count)
            cores.append(float(node.core_count))
    return Load(
        other_cores=sum(others) if others else None,
        core_count=sum(cores) if cores else None,
        wait_ratio=fmean(inputs.core_waits.values()) if inputs.core_waits else None,
        main_cores=fmean(inputs.main_cores.values()) if inputs.main_cores else None,
    )
