"""Compares two traces by profiler step and name: what changed, by how much, with p-values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl

from haiprof.base.arrays import Floats
from haiprof.base.errors import MissingDataError
from haiprof.base.statistics.rank_sum import LEAST, Comparison, adjust_p_values, compare_samples
from haiprof.trace_analysis.diff_steps import NOTHING, STEP_ROW, UNLAUNCHED

ADDED, DELETED, INCREASED, DECREASED, UNCHANGED = (
    "added", "deleted", "increased", "decreased", "unchanged",
)  # fmt: skip

_NAMES_SCHEMA = {
    "of": pl.String,
    "name": pl.String,
    "change": pl.String,
    **{f"{samples}_count": pl.Float64 for samples in ("control", "test")},
    **{f"{samples}_ns": pl.Float64 for samples in ("control", "test")},
    "difference_ns": pl.Float64,
    "ratio": pl.Float64,
    **{f"{samples}_step_std_ns": pl.Float64 for samples in ("control", "test")},
    **{f"{samples}_rank_std_ns": pl.Float64 for samples in ("control", "test")},
    "explained_ns": pl.Float64,
    "explained_ratio": pl.Float64,
    "slower_probability": pl.Float64,
    "p_value": pl.Float64,
    "adjusted_p_value": pl.Float64,
    "no_p_value_reason": pl.String,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a profiler step, a mean over steps of the mean over ranks."""

    control_ns: float
    test_ns: float
    control_step_count: int
    """0 where the whole trace is one window."""
    test_step_count: int
    slower_probability: float
    """That a step of the test takes longer than one of the control; a tie counts half."""
    p_value: float | None
    """Two-sided Mann-Whitney U test over steps."""
    no_p_value_reason: str | None

    @property
    def difference_ns(self) -> float:
        """Test minus control."""
        return self.test_ns - self.control_ns

    @property
    def change_ratio(self) -> float:
        """Difference as a part of the control: 0.1 is 10 % slower."""
        return self.difference_ns / self.control_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceDiff:
    """Control against test."""

    names: pl.DataFrame
    """See `compare_traces`."""
    steps: pl.DataFrame
    """One row per step: `control_step`, `test_step`, `control_ns`, `test_ns`, `difference_ns`;
    steps of the same number side by side if there are any, else the first beside the first."""
    step_time: StepTime
    notes: tuple[str, ...]
    """Notes for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the test is slower, for a person or a continuous integration job."""

    is_slower: bool | None
    """None where it cannot be decided: too few steps for a significance test."""
    text: str


class _JobSamples(NamedTuple):
    """One side's samples as arrays; `rank_place` and `step_place` are the places in them."""

    samples: pl.DataFrame
    unlaunched_count: int
    ranks: list[int]
    steps: list[int | None]
    recorded: npt.NDArray[np.bool_]
    """Shape (ranks, steps)."""
    step_ns: Floats
    """Time of each step in ns, the mean over ranks; shape (steps,)."""

    def cube(self, names: pl.DataFrame, column: str) -> Floats:
        """Values by name, rank and step; 0 where a name did not occur, NaN where no step was."""
        found = np.zeros((len(names), *self.recorded.shape))
        rows = self.samples.join(names, on=["of", "name"])
        places = (rows[place].to_numpy() for place in ("at", "rank_place", "step_place"))
        found[tuple(places)] = rows[column].to_numpy()
        found[:, ~self.recorded] = np.nan
        return found


def compare_traces(control: pl.DataFrame, test: pl.DataFrame) -> TraceDiff:
    """Compares what each name took in two sets of traces.

    `names`: one row per name, largest difference first: `of`; `name`; `change`; then per step,
    as means over ranks and steps: `control_count`, `test_count`, `control_ns`, `test_ns`,
    `difference_ns` (test minus control), `ratio` (test by control, null for what the control
    has not); spread: `control_step_std_ns`, `test_step_std_ns` over steps (of means over
    ranks) and `control_rank_std_ns`, `test_rank_std_ns` over ranks (of means over steps), null
    with a single one; `explained_ns`, the difference in its share of the step's time, and
    `explained_ratio` of the difference of step times: for kernels as for operators these add
    up to 1 with `(GPU idle)` and `(no operator)`, null for other events and for equal step
    times; `slower_probability`; `p_value` of a two-sided Mann-Whitney U test over steps,
    `adjusted_p_value` for all names of a kind (Benjamini and Hochberg), both null with
    `no_p_value_reason`.

    `change` compares counts per step: `added`, `deleted`, `increased`, `decreased` or
    `unchanged`.

    Source: HTA TraceDiff.compare_traces and ops_diff (`+` there is added or increased here,
    `-` deleted or decreased). HTA compares sums over the first step of the first rank alone
    unless told otherwise, cannot tell a difference from chance, counts the marks of steps,
    and sums over as many steps as each side has. Tests over steps take these as independent,
    and a step of several ranks as one measurement, as the ranks wait for each other.
    """
    before, after = _read_samples(control), _read_samples(test)
    if (before.steps == [None]) != (after.steps == [None]):
        without = "control" if before.steps == [None] else "test"
        raise MissingDataError(
            f"the {without} has no profiler steps, the other has: they cannot be compared per step",
            hint="call profiler.step() once per step, or compare with by_step=False",
        )
    step_time = _step_time(before, after)
    names = _names(before, after, step_time.difference_ns)
    return TraceDiff(
        names=names.sort(pl.col("difference_ns").abs(), "of", "name",
                         descending=[True, False, False], nulls_last=True),
        steps=_steps(before, after),
        step_time=step_time,
        notes=tuple(_notes(before, after)),
    )  # fmt: skip


def verdict(
    diff: TraceDiff, *, tolerance_ratio: float = 0.0, significance: float = 0.05
) -> Verdict:
    """Decides whether the test's steps are slower."""
    time = diff.step_time
    change = time.change_ratio
    direction = "slower" if change > 0 else "faster"
    words = f"{direction} by {abs(change):.1%}".replace("%", " %") if change else "equally fast"
    if time.p_value is None:
        return Verdict(is_slower=None, text=f"{words}, by chance or not: {time.no_p_value_reason}")
    counts = f"{time.control_step_count} and {time.test_step_count} steps"
    evidence = f"(p = {time.p_value:.2g}, {counts})"
    agree = (time.slower_probability > 0.5) == (change > 0)
    if time.p_value > significance or not agree:
        return Verdict(is_slower=False, text=f"no significant difference: {words} {evidence}")
    return Verdict(is_slower=change > tolerance_ratio, text=f"{words} {evidence}")


def _read_samples(samples: pl.DataFrame) -> _JobSamples:
    marks = samples.filter(pl.col("of") == STEP_ROW)
    ranks = marks.select(pl.col("rank").unique().sort()).with_row_index("rank_place")
    steps = marks.select(pl.col("step").unique().sort()).with_row_index("step_place")
    # Idle time has no count and no duration of its own: its share is its time.
    filled = samples.filter(pl.col("of") != UNLAUNCHED).with_columns(
        pl.coalesce("total_ns", "share_ns").cast(pl.Float64),
        pl.col("count", "share_ns").fill_null(0).cast(pl.Float64),
    )
    placed = filled.join(ranks, on="rank").join(steps, on="step", nulls_equal=True)
    shape = (len(ranks), len(steps))
    own = placed.filter(pl.col("of") == STEP_ROW)
    times = np.full(shape, np.nan)
    times[own["rank_place"].to_numpy(), own["step_place"].to_numpy()] = own["total_ns"].to_numpy()
    lost = samples.filter(pl.col("of") == UNLAUNCHED)["count"].sum()
    return _JobSamples(
        placed, int(lost), ranks["rank"].to_list(), steps["step"].to_list(),
        ~np.isnan(times), np.nanmean(times, axis=0),
    )  # fmt: skip


def _step_time(before: _JobSamples, after: _JobSamples) -> StepTime:
    if not before.step_ns.mean() > 0:
        raise MissingDataError("trace-diff: no time passes in the control's steps")
    compared = compare_samples(before.step_ns, after.step_ns)
    return StepTime(
        control_ns=float(before.step_ns.mean()),
        test_ns=float(after.step_ns.mean()),
        control_step_count=_step_count(before),
        test_step_count=_step_count(after),
        slower_probability=compared.greater_probability,
        p_value=compared.p_value,
        no_p_value_reason=None if compared.p_value is not None else _too_few(before, after),
    )


def _step_count(samples: _JobSamples) -> int:
    return sum(step is not None for step in samples.steps)


def _too_few(before: _JobSamples, after: _JobSamples) -> str:
    if not _step_count(before):
        return "without profiler steps each side is one measurement"
    return f"{len(before.steps)} and {len(after.steps)} steps; at least {LEAST} each are needed"


def _names(before: _JobSamples, after: _JobSamples, step_difference_ns: float) -> pl.DataFrame:
    """One row per name, in any order."""
    keys = pl.concat([before.samples, after.samples]).select("of", "name").unique()
    names = keys.filter(pl.col("of") != STEP_ROW).sort("of", "name").with_row_index("at")
    control, control_steps = _measure(before, names, "control")
    test, test_steps = _measure(after, names, "test")
    found = pl.concat([names, control, test], how="horizontal").with_columns(
        _change(before, after, names),
        *_test_names(before, after, names["of"], control_steps, test_steps),
        difference_ns=pl.col("test_ns") - pl.col("control_ns"),
        ratio=pl.when(pl.col("control_ns") > 0).then(pl.col("test_ns") / pl.col("control_ns")),
        explained_ns=pl.when(pl.col("of").is_in(list(NOTHING))).then(
            pl.col("test_share_ns") - pl.col("control_share_ns")
        ),
    ).with_columns(
        pl.when(~pl.col("name").is_in(list(NOTHING.values())))
        .then(pl.col("change", "control_count", "test_count")),
        explained_ratio=pl.col("explained_ns") / (step_difference_ns or None),
    )  # fmt: skip
    return found.select(pl.col(name).cast(dtype) for name, dtype in _NAMES_SCHEMA.items())


def _measure(samples: _JobSamples, names: pl.DataFrame, word: str) -> tuple[pl.DataFrame, Floats]:
    """Means and spreads of one side; and the time of each name in each step."""
    times = samples.cube(names, "total_ns")
    per_step = np.nanmean(times, axis=1)
    columns = {
        "count": np.nanmean(samples.cube(names, "count"), axis=1).mean(axis=1),
        "ns": per_step.mean(axis=1),
        "step_std_ns": _spread(per_step),
        "rank_std_ns": _spread(np.nanmean(times, axis=2)),
        "share_ns": np.nanmean(samples.cube(names, "share_ns"), axis=1).mean(axis=1),
    }
    frame = pl.DataFrame({f"{word}_{name}": values for name, values in columns.items()})
    return frame.fill_nan(None), per_step


def _spread(values: Floats) -> Floats:
    """Sample standard deviation of each row; NaN of a single value."""
    if values.shape[1] < 2:
        return np.full(len(values), np.nan)
    found: Floats = values.std(axis=1, ddof=1)
    return found


def _change(before: _JobSamples, after: _JobSamples, names: pl.DataFrame) -> pl.Expr:
    """By counts per step and rank, compared as whole numbers."""
    old, new = (
        pl.Series(np.nansum(samples.cube(names, "count"), axis=(1, 2)).astype(np.int64))
        * int(other.recorded.sum())
        for samples, other in ((before, after), (after, before))
    )
    return (
        pl.when((old == 0) & (new > 0)).then(pl.lit(ADDED))
        .when((old > 0) & (new == 0)).then(pl.lit(DELETED))
        .when(new > old).then(pl.lit(INCREASED))
        .when(new < old).then(pl.lit(DECREASED))
        .otherwise(pl.lit(UNCHANGED)).alias("change")
    )  # fmt: skip


def _test_names(
    before: _JobSamples, after: _JobSamples, kinds: pl.Series, control: Floats, test: Floats
) -> list[pl.Series]:
    """Probabilities and p-values of each name, or why they are missing."""
    pairs = zip(control, test, strict=True)
    compared: list[Comparison] = [compare_samples(old, new) for old, new in pairs]
    p_values = [one.p_value for one in compared]
    together: list[float | None] = [None] * len(p_values)
    for kind in kinds.unique():
        places = (kinds == kind).arg_true().to_list()
        of_kind = adjust_p_values([p_values[place] for place in places])
        for place, value in zip(places, of_kind, strict=True):
            together[place] = value
    likely = [None if one.p_value is None else one.greater_probability for one in compared]
    reasons = [_too_few(before, after) if p is None else None for p in p_values]
    return [
        pl.Series("slower_probability", likely, dtype=pl.Float64),
        pl.Series("p_value", p_values, dtype=pl.Float64),
        pl.Series("adjusted_p_value", together, dtype=pl.Float64),
        pl.Series("no_p_value_reason", reasons, dtype=pl.String),
    ]


def _steps(before: _JobSamples, after: _JobSamples) -> pl.DataFrame:
    """The steps of both jobs in one frame."""
    parts = []
    for word, samples in (("control", before), ("test", after)):
        own = {
            f"{word}_step": pl.Series(samples.steps, dtype=pl.Int64),
            f"{word}_ns": samples.step_ns,
        }
        parts.append(pl.DataFrame(own).with_row_index("place"))
    if set(before.steps) & set(after.steps) - {None}:
        parts[0] = parts[0].with_columns(place=pl.col("control_step"))
        parts[1] = parts[1].with_columns(place=pl.col("test_step"))
    joined = parts[0].join(parts[1], on="place", how="full", coalesce=True).sort("place")
    return joined.select(
        "control_step", "test_step", "control_ns", "test_ns",
        difference_ns=pl.col("test_ns") - pl.col("control_ns"),
    )  # fmt: skip


def _notes(before: _JobSamples, after: _JobSamples) -> Iterator[str]:
    for word, samples in (("control", before), ("test", after)):
        if samples.unlaunched_count:
            yield (
                f"{samples.unlaunched_count} GPU events of the {word} have no launch in its trace: "
                "launched before it began, or the record is lost: they belong to none of its steps"
            )
        if not samples.recorded.all():
            yield f"not every rank of the {word} has every step"
    if not _step_count(before):
        yield "no profiler steps: totals of whole traces are compared, however long each is"
    if len(before.ranks) != len(after.ranks):
        yield f"the control has {len(before.ranks)} ranks, the test {len(after.ranks)}"
