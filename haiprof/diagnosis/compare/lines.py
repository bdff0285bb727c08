"""Lines of user code in two runs: which take more or less time per step, beyond chance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats, Ints
from haiprof.base.errors import RunFormatError
from haiprof.base.statistics.bootstrap import Resampled, Uncertain, resample
from haiprof.base.statistics.rank_sum import adjust_p_values
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.diagnosis.compare.step_time import Change, run_spread
from haiprof.diagnosis.thresholds import (
    COMPARE_LINE_RANKS,
    COMPARE_LINE_RATIO,
    COMPARE_LINE_SAMPLES,
    COMPARE_P_VALUE,
)
from haiprof.run_analysis.code_samples import CODE_PHASES, WORKER, CodeSamples
from haiprof.run_analysis.flame_graph import own_path
from haiprof.run_analysis.lines import functions_of, innermost_stack
from haiprof.run_analysis.nesting import Bools
from haiprof.run_analysis.step_frame import STEP_PHASES

_REPLICATES = 300
Key = tuple[str, str, str]
"""Phase, file as it is named from where the job was started, function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChange:
    """A function of the user's in one phase, with the libraries that it calls; ns per step."""

    phase: str
    """Of a training step, or `worker`: DataLoader workers while they load."""
    file: str
    function: str
    before_line: int | None
    """Its line that was seen most often; None where it was never seen."""
    after_line: int | None
    before_ns: float
    """Mean over steps and ranks."""
    after_ns: float
    low_ns: float
    """Of the difference, as `high_ns`: it holds the true one in 99 of 100 cases."""
    high_ns: float
    before_sample_count: int
    after_sample_count: int
    p_value: float
    adjusted_p_value: float | None = None
    """For all functions together (Benjamini and Hochberg)."""

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns

    @property
    def is_significant(self) -> bool:
        """Beyond chance, with all functions counted."""
        sure = self.adjusted_p_value is not None and self.adjusted_p_value <= COMPARE_P_VALUE
        return sure and not self.low_ns <= 0 <= self.high_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sampled:
    """The samples of one run in the steps that are compared."""

    step_ns: Floats
    step: Ints
    """Per sample: its row in the steps."""
    key: Ints
    """Per sample: number in `keys`."""
    weight_ns: Floats
    """Per sample: time, shared among the ranks."""
    line: Ints
    keys: Sequence[Key]

    def rows(self, key: Key) -> Bools:
        """Which samples are of a function."""
        found: Bools = self.key == (self.keys.index(key) if key in self.keys else -1)
        return found


def line_changes(
    before: ComparedRun, after: ComparedRun, change: Change
) -> tuple[tuple[LineChange, ...], str]:
    """Functions whose time per step differs beyond chance, the largest difference first.

    The time of a phase is shared among its samples; that of a function in each step is a series,
    and its mean has an interval as the parts of a step have: block bootstrap and what two runs of
    the same code differ by. One sample's time is added to its straying, so that a function that was
    never seen is not known to take nothing.

    Returns:
        The functions, and why there are none to compare; empty where there are.
    """
    if change.unknown:
        return (), "steps are not compared"
    found = []
    for word, side in (("baseline", before), ("new run", after)):
        sampled = _load_samples(side)
        if sampled is None:
            return (), f"no stacks were sampled in the steps of the {word}"
        found.append(sampled)
    changes = list(_compare(found[0], found[1]))
    together = adjust_p_values([one.p_value for one in changes])
    known = [replace(one, adjusted_p_value=p) for one, p in zip(changes, together, strict=True)]
    sure = [one for one in known if one.is_significant]
    return tuple(sorted(sure, key=lambda one: -abs(one.difference_ns))), ""


def _load_samples(side: ComparedRun) -> _Sampled | None:
    """None where no sample fell into a step that is compared."""
    ranks = side.world[:: max(len(side.world) // COMPARE_LINE_RANKS, 1)]
    samples = side.analyzer.code_samples(set(ranks))
    row = _rows(samples, side)
    phases = [CODE_PHASES.index(phase) for phase in (*STEP_PHASES, "checkpoint")] + [WORKER]
    samples = samples.take(chosen := (row >= 0) & np.isin(samples.phase, phases))
    if not len(samples.stack):
        return None
    functions, number = functions_of(samples.tree)
    inner = innermost_stack(samples.tree)[samples.stack]
    place = samples.tree.place[inner]
    pairs, key = np.unique(np.stack([samples.phase, number[place]]), axis=1, return_inverse=True)
    folder = _folder(side)
    keys = [
        (CODE_PHASES[phase], own_path(functions[f][0], folder), functions[f][1])
        if f >= 0 else (CODE_PHASES[phase], "", "")
        for phase, f in pairs.T.tolist()
    ]  # fmt: skip
    lines = np.array([frame.line for frame in samples.tree.frames] or [0])
    return _Sampled(
        step_ns=side.step_ns, step=row[chosen], key=key.ravel(), keys=keys,
        weight_ns=samples.weight_ns / len(ranks), line=lines[place],
    )  # fmt: skip


def _rows(samples: CodeSamples, side: ComparedRun) -> Ints:
    """Per sample: the row of its step in the side's series; -1 for none.

    Samples of workers are of the step that the training process is in at that time.
    """
    steps = side.series["step"].to_numpy()
    found = np.full(len(samples.stack), -1, dtype=np.int64)
    for rank in np.unique(samples.rank).tolist():
        own = side.steps.filter(pl.col("rank") == rank).sort("start_ns")
        start, number = own["start_ns"].to_numpy(), own["step"].to_numpy()
        if not len(start):
            continue
        end = np.append(start[1:], start[-1] + own["step_ns"][-1])
        mine = np.flatnonzero(samples.rank == rank)
        time = samples.time_ns[mine]
        place = np.searchsorted(start, time, side="right") - 1
        inside = (place >= 0) & (time < end[place])
        row = np.clip(np.searchsorted(steps, number[place]), 0, len(steps) - 1)
        found[mine] = np.where(inside & (steps[row] == number[place]), row, -1)
    return found


def _folder(side: ComparedRun) -> str:
    try:
        return side.analyzer.manifest().cwd
    except RunFormatError:
        return ""


def _compare(before: _Sampled, after: _Sampled) -> Iterator[LineChange]:
    """Every function that is worth it, with the interval of its difference."""
    sides = (before, after)
    keys = _worth_comparing(before, after)
    if not keys:
        return
    logs = [np.log(side.step_ns) for side in sides]
    drawn = [
        resample(log, _columns(side, keys), replicates=_REPLICATES)
        for log, side in zip(logs, sides, strict=True)
    ]
    variance, freedom = run_spread(logs)
    for place, key in enumerate(keys):
        rows = [side.rows(key) for side in sides]
        values = [float(own.means[place]) for own in drawn]
        parts = [_own_error(side, own, key, place) for side, own in zip(sides, drawn, strict=True)]
        parts += [(variance * value**2, freedom) for value in values]
        error, difference = Uncertain(parts=tuple(parts)), values[1] - values[0]
        yield LineChange(
            phase=key[0], file=key[1], function=key[2],
            before_line=_top_line(before, rows[0]), after_line=_top_line(after, rows[1]),
            before_ns=values[0], after_ns=values[1],
            low_ns=difference - error.half_width(), high_ns=difference + error.half_width(),
            before_sample_count=int(rows[0].sum()), after_sample_count=int(rows[1].sum()),
            p_value=error.p_value(difference),
        )  # fmt: skip


def _own_error(side: _Sampled, drawn: Resampled, key: Key, place: int) -> tuple[float, float]:
    """Variance of a function's mean within a run, and its degrees of freedom."""
    phase = np.array([own[0] == key[0] for own in side.keys])
    weight = side.weight_ns[phase[side.key]]
    one_ns = float(weight.mean()) / len(side.step_ns) if len(weight) else 0.0
    return float(drawn.mean_sds[place]) ** 2 + one_ns**2, drawn.freedom


def _worth_comparing(before: _Sampled, after: _Sampled) -> list[Key]:
    """Functions that were seen often enough, and take enough of a step, in one of the runs."""
    found = []
    for key in sorted({*before.keys, *after.keys}):
        rows = [side.rows(key) for side in (before, after)]
        share = max(
            float(side.weight_ns[own].sum() / side.step_ns.sum())
            for side, own in zip((before, after), rows, strict=True)
        )
        seen = sum(int(own.sum()) for own in rows)
        if key[1] and share >= COMPARE_LINE_RATIO and seen >= COMPARE_LINE_SAMPLES:
            found.append(key)
    return found


def _columns(side: _Sampled, keys: Sequence[Key]) -> Floats:
    """[step, function]: its time in that step."""
    found = np.zeros((len(side.step_ns), len(keys)))
    for place, key in enumerate(keys):
        rows = side.rows(key)
        found[:, place] = np.bincount(
            side.step[rows], weights=side.weight_ns[rows], minlength=len(side.step_ns)
        )
    return found


def _top_line(side: _Sampled, rows: Bools) -> int | None:
    """The line that was seen most often."""
    return int(np.bincount(side.line[rows]).argmax()) if rows.any() else None
