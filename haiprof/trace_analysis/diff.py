"""What changed between two traces: by step and name with p-values, and on the device by role."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Bools, Floats, Ints
from haiprof.base.statistics import LEAST, Comparison, adjust_p_values, compare_samples
from haiprof.trace_analysis.call_tree import nest, uncovered_starts
from haiprof.trace_analysis.device_ledger import CONVERSIONS, IDLE
from haiprof.trace_analysis.device_time import Steps, step_marks, union_of, with_launch
from haiprof.trace_analysis.device_verdict import DeviceLedger, call_nodes
from haiprof.trace_analysis.kernel_names import FULL, name_normalizer, split_geometry, with_geometry
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.rank_trace import STEP_NAME, Trace

KERNEL, OPERATOR, RUNTIME, ANNOTATION = "kernel", "operator", "runtime", "annotation"
EVERYTHING = (KERNEL, OPERATOR, RUNTIME, ANNOTATION)
STEP_ROW, UNLAUNCHED = "step", "unlaunched"
NOTHING = {KERNEL: "(GPU idle)", OPERATOR: "(no operator)"}
"""The name of the time in a step in which none of them ran."""

SAMPLE_SCHEMA = {
    "step": pl.Int64, "of": pl.String, "name": pl.String, "count": pl.Int64, "total_ns": pl.Int64,
    "share_ns": pl.Float64,
}  # fmt: skip


class _StepWindow(NamedTuple):
    """A profiler step, or all of a trace without steps."""

    step: int | None
    start_ns: int
    end_ns: int


def step_samples(
    trace: Trace, *, of: tuple[str, ...] = (KERNEL, OPERATOR), names: str = FULL,
    geometry: bool = False, steps: Steps = None, by_step: bool = True,
) -> pl.DataFrame:  # fmt: skip
    """Count and time of each name in each profiler step.

    An operator belongs to the step in which it began, a kernel to that of its launch. A kernel
    whose launch is not in the trace (it came before, or its record is lost) is in no step:
    rows of `unlaunched` count them. Where the whole trace is one window, and in a trace
    without launches, such kernels count by their own start.
    """
    unknown = set(of) - set(EVERYTHING)
    if unknown:
        raise ValueError(f"no events {sorted(unknown)}: they are of {', '.join(EVERYTHING)}")
    windows = _windows(trace, steps, by_step=by_step)
    rows = [(w.step, STEP_ROW, STEP_ROW, 1, w.end_ns - w.start_ns, None) for w in windows]
    parts = [pl.DataFrame(rows, schema=SAMPLE_SCHEMA, orient="row")]
    for kind in of:
        is_kernel = kind == KERNEL
        gpu = with_geometry(trace.gpu) if is_kernel and geometry else trace.gpu
        events = _events(trace, kind, gpu, by_launch=windows[0].step is not None)
        # With the names that are compared, as codes of an Enum; a kernel's geometry stays behind.
        rename, recorded = name_normalizer(names, is_kernel=is_kernel), events["name"].unique()
        kept = [rename(plain) + geometry for plain, geometry
                in map(split_geometry, recorded.cast(pl.String))]  # fmt: skip
        texts = pl.Series("kept", kept, dtype=pl.Enum(sorted(set(kept))))
        named = events.join(
            pl.DataFrame([recorded, texts]), on="name", how="left", maintain_order="left"
        )
        events = named.drop("name").rename({"kept": "name"})
        if is_kernel:
            lost = events.filter(pl.col("when_ns").is_null())
            parts.append(lost.group_by(pl.lit(None, pl.Int64).alias("step")).agg(
                count=pl.len(), total_ns=pl.col("dur_ns").sum(), share_ns=pl.lit(None, pl.Float64),
                **dict.fromkeys(("of", "name"), pl.lit(UNLAUNCHED)),
            ))  # fmt: skip
        parts.append(_per_window(events, windows, kind))
    typed = [pl.col(name).cast(dtype) for name, dtype in SAMPLE_SCHEMA.items()]
    return pl.concat([part.select(typed) for part in parts])


def _windows(trace: Trace, steps: Steps, *, by_step: bool) -> list[_StepWindow]:
    marks, start, end = step_marks(trace, steps), pl.col("start_ns"), pl.col("end_ns")
    if by_step:
        marks = marks.unique("step", keep="first", maintain_order=True)
    elif steps is not None:
        marks = marks.select(start.min(), end.max(), step=pl.lit(None, pl.Int64))
    rows = [_StepWindow(*row) for row in marks.select("step", start, end).iter_rows()]
    if rows and (by_step or steps is not None):
        return rows
    if trace.checked.window is None:
        raise MissingDataError(f"{trace.path}: neither operators nor GPU events in it")
    first_ns, last_ns = trace.checked.window
    return [_StepWindow(None, first_ns, last_ns + 1)]


def _events(trace: Trace, kind: str, gpu: pl.DataFrame, *, by_launch: bool) -> pl.DataFrame:
    """`name`, `pid`, `tid`, `ts_ns`, `dur_ns`, and `when_ns`, which decides on the step."""
    columns = ["name", "pid", "tid", "ts_ns", "dur_ns"]
    if kind == KERNEL:
        known = with_launch(gpu, trace.runtime)
        no_launches = known["launch_ns"].null_count() == len(known)
        own = not by_launch or no_launches
        when = pl.coalesce("launch_ns", "ts_ns") if own else pl.col("launch_ns")
        return known.select(*columns, when.alias("when_ns"))
    table = {OPERATOR: trace.ops, RUNTIME: trace.runtime}.get(kind, trace.host_ranges)
    events = table.filter(~has_name(table, STEP_NAME))
    return events.select(*columns, pl.col("ts_ns").alias("when_ns"))


def _per_window(events: pl.DataFrame, windows: list[_StepWindow], kind: str) -> pl.DataFrame:
    """Count, time and share of each name in each window."""
    spans = events.sort("pid", "tid", "ts_ns", -pl.col("dur_ns"), maintain_order=True)
    shares = _shares(spans, windows, kind) if kind in NOTHING else repeat(None)
    parts = []
    for window, own in zip(windows, shares, strict=False):
        inside = pl.col("when_ns").is_between(window.start_ns, window.end_ns, closed="left")
        found = spans.filter(inside).group_by("name").agg(
            pl.len().cast(pl.Int64).alias("count"), pl.col("dur_ns").sum().alias("total_ns")
        ).with_columns(pl.col("name").cast(pl.String))  # fmt: skip
        if own is None:
            found = found.with_columns(share_ns=pl.lit(None, pl.Float64))
        else:
            # Events that only reach into this window have no count in it.
            known = pl.when(pl.col("name") != NOTHING[kind])
            found = found.join(own, on="name", how="full", coalesce=True).with_columns(
                pl.col("share_ns").fill_null(0),
                known.then(pl.col("count", "total_ns").fill_null(0)),
            )
        parts.append(found.with_columns(step=pl.lit(window.step, pl.Int64), of=pl.lit(kind)))
    return pl.concat(parts)


def _shares(spans: pl.DataFrame, windows: list[_StepWindow], kind: str) -> Iterator[pl.DataFrame]:
    """Divides the time of each window among the names that are active in it.

    Yields `name` and `share_ns`, with the rest of the window under `NOTHING`.
    """
    starts = spans["ts_ns"].to_numpy()
    ends = starts + spans["dur_ns"].to_numpy()
    parent, active = np.full(len(spans), -1, dtype=np.int64), [(starts, ends)]
    if kind != KERNEL and len(spans):
        parent = nest(spans).parent
        threads = map(union_of, spans.partition_by("pid", "tid"))
        active = [(each.starts, each.ends) for each in threads]
    begins, inner = uncovered_starts(starts, ends, parent), np.flatnonzero(parent >= 0)
    # Times, and the cumulative time until each if k concurrent spans get 1/k each.
    edges = [np.concatenate(each) for each in zip(*active, strict=True)]
    moments, place = np.unique(np.append(*edges), return_inverse=True)
    change = np.repeat([1.0, -1.0], len(edges[0]))
    running = np.cumsum(np.bincount(place, weights=change, minlength=len(moments)))[:-1]
    rate = np.divide(1.0, running, out=np.zeros(len(running)), where=running > 0)
    passed = np.append(0.0, np.cumsum(np.diff(moments) * rate))
    base = int(moments[0]) if len(moments) else 0  # floats hold ns only near 0

    def take_part(starts: Ints, ends: Ints, window: _StepWindow) -> Floats:
        first = np.clip(starts, window.start_ns, window.end_ns)
        last = np.maximum(np.clip(ends, window.start_ns, window.end_ns), first)
        if not len(moments):
            return np.zeros(len(starts))
        until, since = (np.interp(at - base, moments - base, passed) for at in (last, first))
        share: Floats = until - since
        return share

    for window in windows:
        share = take_part(starts, ends, window)
        np.subtract.at(share, parent[inner], take_part(begins[inner], ends[inner], window))
        names = spans.select(pl.col("name"), share_ns=pl.Series(share, dtype=pl.Float64))
        found = names.group_by("name").agg(pl.col("share_ns").sum())
        found = found.filter(pl.col("share_ns") != 0).with_columns(pl.col("name").cast(pl.String))
        rest = window.end_ns - window.start_ns - float(found["share_ns"].sum())
        nothing = pl.DataFrame({"name": [NOTHING[kind]], "share_ns": [max(rest, 0.0)]})
        yield pl.concat([found, nothing])


ADDED, DELETED, INCREASED, DECREASED, UNCHANGED = (
    "added", "deleted", "increased", "decreased", "unchanged",
)  # fmt: skip

_TEXTS = ("of", "name", "change", "no_p_value_reason")
_NAMES_SCHEMA = {name: pl.String if name in _TEXTS else pl.Float64 for name in (
    "of", "name", "change", "control_count", "test_count", "control_ns", "test_ns",
    "difference_ns", "ratio", "control_step_std_ns", "test_step_std_ns", "control_rank_std_ns",
    "test_rank_std_ns", "explained_ns", "explained_ratio", "slower_probability", "p_value",
    "adjusted_p_value", "no_p_value_reason",
)}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of a profiler step, a mean over steps of the mean over ranks."""

    control_ns: float
    test_ns: float
    control_step_count: int  # 0 where the whole trace is one window
    test_step_count: int
    slower_probability: float
    """That a step of the test takes longer than one of the control; a tie counts half."""
    p_value: float | None  # Two-sided Mann-Whitney U test over steps
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

    names: pl.DataFrame  # See `compare_traces`
    steps: pl.DataFrame
    """One row per step: `control_step`, `test_step`, `control_ns`, `test_ns`, `difference_ns`;
    steps of the same number side by side if there are any, else the first beside the first."""
    step_time: StepTime
    notes: tuple[str, ...]  # Notes for people


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether the test is slower, for a person or a continuous integration job."""

    is_slower: bool | None  # None where it cannot be decided: too few steps for a significance test
    text: str


class _JobSamples(NamedTuple):
    """One side's samples as arrays; `rank_place` and `step_place` are the places in them."""

    samples: pl.DataFrame
    unlaunched_count: int
    ranks: list[int]
    steps: list[int | None]
    recorded: Bools  # shape (ranks, steps)
    step_ns: Floats  # time of each step in ns, the mean over ranks; shape (steps,)

    def cube(self, names: pl.DataFrame, column: str) -> Floats:
        """Values by name, rank and step; 0 where a name did not occur, NaN where no step was."""
        found = np.zeros((len(names), *self.recorded.shape))
        rows = self.samples.join(names, on=["of", "name"])
        places = (rows[place].to_numpy() for place in ("at", "rank_place", "step_place"))
        found[tuple(places)] = rows[column].to_numpy()
        found[:, ~self.recorded] = np.nan
        return found


def compare_traces(
    control: pl.DataFrame, test: pl.DataFrame, *, control_name: str = "the control"
) -> TraceDiff:
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
    if not before.step_ns.mean() > 0:
        raise MissingDataError(f"{control_name}: no time passes in its steps")
    compared = compare_samples(before.step_ns, after.step_ns)
    step_time = StepTime(
        control_ns=float(before.step_ns.mean()), test_ns=float(after.step_ns.mean()),
        control_step_count=_step_count(before), test_step_count=_step_count(after),
        slower_probability=compared.greater_probability, p_value=compared.p_value,
        no_p_value_reason=None if compared.p_value is not None else _too_few(before, after),
    )  # fmt: skip
    # The steps of both jobs in one frame.
    in_common = bool(set(before.steps) & set(after.steps) - {None})
    parts = [
        pl.DataFrame({
            "place": each.steps if in_common else range(len(each.steps)),
            f"{word}_step": each.steps, f"{word}_ns": each.step_ns,
        }, schema_overrides=dict.fromkeys(("place", f"{word}_step"), pl.Int64))
        for word, each in (("control", before), ("test", after))
    ]  # fmt: skip
    joined = parts[0].join(parts[1], on="place", how="full", coalesce=True).sort("place")
    names = _names(before, after, step_time.difference_ns)
    return TraceDiff(
        names=names.sort(pl.col("difference_ns").abs(), "of", "name",
                         descending=[True, False, False], nulls_last=True),
        steps=joined.select(
            "control_step", "test_step", "control_ns", "test_ns",
            difference_ns=pl.col("test_ns") - pl.col("control_ns"),
        ),
        step_time=step_time,
        notes=tuple(_notes(before, after)),
    )  # fmt: skip


def verdict(
    diff: TraceDiff, *, tolerance_ratio: float = 0.0, significance: float = 0.05
) -> Verdict:
    """Decides whether the test's steps are slower."""
    time = diff.step_time
    change = time.change_ratio
    direction = "more" if change > 0 else "less"
    words = f"{abs(change):.1%} {direction} time".replace("%", " %") if change else "the same time"
    if time.p_value is None:
        few = "too few measurements to tell a difference from chance"
        return Verdict(is_slower=None, text=f"{words}; {few}: {time.no_p_value_reason}")
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
    # Probabilities and p-values of each name, or why they are missing.
    pairs = zip(control_steps, test_steps, strict=True)
    compared: list[Comparison] = [compare_samples(old, new) for old, new in pairs]
    p_values = [one.p_value for one in compared]
    together: list[float | None] = []
    for own in names["of"].rle().struct.field("len"):  # names stand by their kind
        together += adjust_p_values(p_values[len(together) :][:own])
    likely = [None if one.p_value is None else one.greater_probability for one in compared]
    reasons = [_too_few(before, after) if p is None else None for p in p_values]
    numbers = {"slower_probability": likely, "p_value": p_values, "adjusted_p_value": together}
    # By counts per step and rank, compared as whole numbers.
    old, new = (
        pl.Series(np.nansum(samples.cube(names, "count"), axis=(1, 2)).astype(np.int64))
        * int(other.recorded.sum())
        for samples, other in ((before, after), (after, before))
    )
    change = (
        pl.when((old == 0) & (new > 0)).then(pl.lit(ADDED))
        .when((old > 0) & (new == 0)).then(pl.lit(DELETED))
        .when(new > old).then(pl.lit(INCREASED))
        .when(new < old).then(pl.lit(DECREASED))
        .otherwise(pl.lit(UNCHANGED))
    )  # fmt: skip
    found = pl.concat([names, control, test], how="horizontal").with_columns(
        change=change,
        **{name: pl.Series(values, dtype=pl.Float64) for name, values in numbers.items()},
        no_p_value_reason=pl.Series(reasons, dtype=pl.String),
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


_LINE = re.compile(r"\((?:\d+|\?)\)")
_EQUAL_RATIO = 0.01  # less than this is no difference, however sure
OPERATORS, IDLE_TIME, OTHER = "operators", "idle", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One thing that the device did, per mean step, before and after."""

    of: str  # `operators`, `idle`, or `other`: communication and copies
    role: str
    """The outermost operator that both have, else the kind of work; of the others the activity."""
    before_ns: float
    after_ns: float
    before: tuple[tuple[str, float], ...] = ()  # operators and their ns, the longest first
    after: tuple[tuple[str, float], ...] = ()

    @property
    def difference_ns(self) -> float:
        """After minus before."""
        return self.after_ns - self.before_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedBranch:
    """The part of the call tree in which most of the difference of computing is."""

    path: tuple[str, ...]
    """Calls from the outermost on, without their lines; an operator may be the last."""
    before_ns: float
    after_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceComparison:
    """What changed between two traces on the device."""

    before_busy_ns: float
    after_busy_ns: float
    before_step_ns: float
    after_step_ns: float
    on_device: bool  # whether both are of GPUs; else the host's training threads are compared
    is_different: bool
    """Whether the busy time differs, by more than chance where several steps tell."""
    rows: tuple[ComparedRow, ...]  # the largest difference first
    damage: tuple[str, ...] = ()  # what of the files could not be read
    branch: ComparedBranch | None = None
    """None where no call holds more than half of the difference."""


def compare_devices(before: DeviceLedger, after: DeviceLedger) -> DeviceComparison:
    """Compares the devices' time of two ledgers of traces.

    An operator's role is the outermost operator around it where both traces have that (a layer, or
    scaled_dot_product_attention with whatever kernels are inside), else its kind of work: so that
    fused and unfused forms, and other names for one product on another GPU, stand in one row.
    """
    sides = before, after
    tops = {role.top for role in before.roles} & {role.top for role in after.roles} - {None}
    found: dict[str, tuple[dict[str, float], ...]] = {}
    for side, ledger in enumerate(sides):
        for each in ledger.roles:
            top = str(each.top if each.top in tops else each.kind)
            operators = found.setdefault(top, (defaultdict(float), defaultdict(float)))[side]
            operators[each.name] += each.ns_per_step
    rows = []
    for top, both in found.items():
        first, last = (tuple(sorted(one.items(), key=lambda pair: -pair[1])) for one in both)
        rows.append(ComparedRow(
            of=OPERATORS, role=top, before_ns=sum(both[0].values()),
            after_ns=sum(both[1].values()), before=first, after=last,
        ))  # fmt: skip
    activities = defaultdict[str, float](float), defaultdict[str, float](float)  # not computing
    for sums, ledger in zip(activities, sides, strict=True):
        for account in ledger.ledger.accounts:
            if not account.needed and account.activity not in CONVERSIONS:
                sums[account.activity] += account.ns_per_step
    for activity in dict.fromkeys([*activities[0], *activities[1]]):
        old, new = (each[activity] for each in activities)
        of = IDLE_TIME if activity.startswith(IDLE) else OTHER
        rows.append(ComparedRow(of=of, role=activity, before_ns=old, after_ns=new))
    on_device = before.on_device and after.on_device
    busy = [
        [a for a in each.ledger.accounts
         if (not a.activity.startswith(IDLE) if on_device else a.needed)]
        for each in sides
    ]  # fmt: skip
    old, new = (sum(account.ns_per_step for account in each) for each in busy)
    unsure = sum(
        math.hypot(*((a.high_ns - a.low_ns) / 2 for a in each)) for each in busy
    )  # accounts are taken as independent
    return DeviceComparison(
        before_busy_ns=old, after_busy_ns=new,
        before_step_ns=before.ledger.mean_ns, after_step_ns=after.ledger.mean_ns,
        on_device=on_device,
        is_different=abs(new - old) > max(unsure, _EQUAL_RATIO * max(old, new)),
        rows=tuple(sorted(rows, key=lambda row: -abs(row.difference_ns))),
        damage=(*before.damage, *after.damage),
        branch=_changed_branch(before.branches, after.branches),
    )  # fmt: skip


def _changed_branch(
    before: Mapping[tuple[str, ...], float], after: Mapping[tuple[str, ...], float]
) -> ComparedBranch | None:
    """From the root inwards as long as one call holds more than half of all changes."""
    sides = [Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()]
    for side, branches in zip(sides, (before, after), strict=True):
        for chain, ns in branches.items():
            side[tuple(_LINE.sub("", name) for name in chain)] += round(ns)
    changed = {chain: abs(sides[1][chain] - sides[0][chain]) for chain in sides[0] | sides[1]}
    nodes = call_nodes(changed, sum(changed.values()) / 2)
    path = max(nodes.values(), key=len, default=())
    if not path:
        return None
    old, new = (
        float(sum(ns for chain, ns in side.items() if chain[: len(path)] == path)) for side in sides
    )
    return ComparedBranch(path=path, before_ns=old, after_ns=new)
