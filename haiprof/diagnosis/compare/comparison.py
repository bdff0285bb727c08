"""The comparison of two runs as a whole: what is claimed, and what stands against it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal, TypeVar

import numpy as np
import polars as pl

from haiprof.base import ledger
from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.intervals import Floats
from haiprof.base.statistics import RUN_RATIO, BlockMean, Uncertain, adjust_p_values, block_mean
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.compare import compared_run
from haiprof.diagnosis.compare.compared_run import ComparedRun, Differs, open_compared_run, steady
from haiprof.diagnosis.machine_causes import used_by_others
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.thresholds import COMPARE_MIN_STEPS, COMPARE_P_VALUE
from haiprof.run_analysis import counter_summaries
from haiprof.run_analysis.ledger import ACTIVITIES, ON_CORE, UNKNOWN
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import STEP_PHASES
from haiprof.run_format.manifest import script_words
from haiprof.trace_analysis.diff import TraceDiff
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

DEVICE_COVERAGE_RATIO = 0.8
"""The device clock is used in a comparison where it has this share of the steps; never both clocks
in one. TraceML asks for all steps, but an evaluation or a skipped step takes some away."""
COMPARE_MAX_RANKS = 32
"""Of more ranks only those that changed most are named with an interval. Own choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChange:
    """The mean step of two runs; the interval holds the true ratio in 99 of 100 cases."""

    before_ns: float  # Mean over judged steps and ranks, with all that lies between steps
    after_ns: float
    before_median_ns: float
    after_median_ns: float
    before_step_count: int
    after_step_count: int
    ratio: float  # After by before: 1.1 is 10 % slower
    low_ratio: float | None = None
    high_ratio: float | None = None
    p_value: float | None = None
    unknown: str = ""  # Why there is no interval; empty where there is

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
        slower = max(self.low_ratio - 1, 0.0) * self.before_ns
        return max(slower, (1 / self.high_ratio - 1) * self.after_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One part of the mean step in both runs, in ns per step."""

    title: str  # For people
    before_ns: float
    after_ns: float
    low_ns: float  # Of the difference, as `high_ns`: it holds the true one in 99 of 100 cases
    high_ns: float
    p_value: float
    adjusted_p_value: float | None = None  # For all parts together (Benjamini and Hochberg)

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

    name: str  # Of POSITIONS, without collections, which are one more; on a device, of STEP_PHASES
    clock: str  # `host` or `device`


@dataclass(frozen=True, slots=True, kw_only=True)
class RankChange(Change):
    """One rank's own time, without waiting for later ranks."""

    rank: int


AnyChange = TypeVar("AnyChange", bound="Change | CounterChange")
OfTime = TypeVar("OfTime", bound=Change)


def step_change(before: Floats, after: Floats, medians: Sequence[float]) -> StepChange:
    """The ratio of two runs' mean steps, by their judged steps in order; medians stand beside."""
    means = [float(own.mean()) if len(own) else math.nan for own in (before, after)]
    found = StepChange(
        before_ns=means[0], after_ns=means[1],
        before_median_ns=medians[0], after_median_ns=medians[1],
        before_step_count=len(before), after_step_count=len(after), ratio=means[1] / means[0],
    )  # fmt: skip
    if min(len(before), len(after)) < COMPARE_MIN_STEPS:
        why = f"{len(before)} and {len(after)} steps after warm-up; {COMPARE_MIN_STEPS} each needed"
        return replace(found, unknown=why)
    sides = (_mean(before), _mean(after))
    error = Uncertain(parts=tuple((variance / mean.value**2, freedom) for mean in sides
                                  for variance, freedom in mean.error.parts))  # fmt: skip
    middle, width = math.log(found.ratio), error.half_width()
    low, high = math.exp(middle - width), math.exp(middle + width)
    return replace(found, low_ratio=low, high_ratio=high, p_value=error.p_value(middle))


def difference(before: BlockMean, after: BlockMean) -> dict[str, float]:
    """The fields of a Change."""
    error = Uncertain(parts=(*before.error.parts, *after.error.parts))
    by, width = after.value - before.value, error.half_width()
    return {
        "before_ns": before.value, "after_ns": after.value, "low_ns": by - width,
        "high_ns": by + width, "p_value": error.p_value(by),
    }  # fmt: skip


def _adjust(changes: Sequence[AnyChange]) -> list[AnyChange]:
    """The same with p-values for all of them together."""
    together = adjust_p_values([one.p_value for one in changes])
    return [replace(one, adjusted_p_value=p) for one, p in zip(changes, together, strict=True)]


def certain(changes: Sequence[OfTime]) -> tuple[OfTime, ...]:
    """The same with p-values for all of them together, the largest difference first."""
    return tuple(sorted(_adjust(changes), key=lambda one: -abs(one.difference_ns)))


def position_changes(before: ComparedRun, after: ComparedRun) -> tuple[PositionChange, ...]:
    """Positions on the host, and phases on the device where both runs have them."""
    found = []
    for clock, behind, read in (("host", "", _positions), ("device", ", device", _device_phases)):
        old, new = read(before), read(after)
        for name in old | new if old and new else {}:
            known = difference(*(_mean(side.get(name, np.zeros(4))) for side in (old, new)))
            title = f"{ledger.position_words(name)}{behind}"
            found.append(PositionChange(title=title, name=name, clock=clock, **known))
    return certain(found)


def rank_changes(before: RunLedger, after: RunLedger) -> tuple[RankChange, ...]:
    """Ranks that both runs have and that changed unlike the middle one; at most 32 of them."""
    old, new = (
        {r: _mean(time.each_step(own)) for r, own in zip(time.ranks, time.own_ns, strict=True)}
        for time in (before.time, after.time)
    )
    found = certain([RankChange(title=f"rank {rank}", rank=rank, **difference(old[rank], new[rank]))
                     for rank in sorted(old.keys() & new.keys())])  # fmt: skip
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
    found = {ledger.POSITIONS[p]: time.cell_ns[row].mean(axis=0) for row, p in enumerate(time.used)}
    found["garbage collection"] = time.collected_ns.mean(axis=0)
    each = {name: time.each_step(own) for name, own in found.items() if own.any()}
    return {name: steady(side.ledger, own) for name, own in each.items()}


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
"""A counter that changed by less is not shown: memory in use is never the same. Own choice."""

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
    low: float  # Of the difference, as `high`
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
    main_cores: float | None  # Cores that a rank's own process used; mean over ranks

    @property
    def other_ratio(self) -> float | None:
        """Of all cores."""
        known = self.other_cores is not None and self.core_count
        return self.other_cores / self.core_count if known else None  # type: ignore[operator]


def counter_changes(before: ComparedRun, after: ComparedRun) -> tuple[CounterChange, ...]:
    """Metrics that differ beyond chance (all asked together) and by enough, the largest first."""
    # Needs eight samples of each run. Intervals as those of the mean step, by `block_mean`.
    old, new = _series(before), _series(after)
    found = []
    for key in sorted(old.keys() & new.keys()):
        series = old[key], new[key]
        if min(map(len, series)) < _LEAST_SAMPLES or not np.isfinite(np.concatenate(series)).all():
            continue
        means = difference(*(block_mean(own, run_ratio=0.0) for own in series))
        values = {name.removesuffix("_ns"): value for name, value in means.items()}
        found.append(CounterChange(source=key[0], metric=key[1], unit=key[2], **values))
    sure = [c for c in _adjust(found) if (c.adjusted_p_value or 0.0) <= COMPARE_P_VALUE
            and abs(c.size) >= COMPARE_COUNTER_RATIO]  # fmt: skip
    return tuple(sorted(sure, key=lambda c: (-abs(c.size), c.source, c.metric)))


def _series(side: ComparedRun) -> dict[tuple[str, str, str], Floats]:
    spans = counter_summaries.training_spans(side.inputs.by_rank.values())
    valid = side.analyzer.counters().drop_nulls("value")
    windows = counter_summaries.host_windows(spans, side.analyzer.ranks())
    inside = counter_summaries.select_training_samples(valid, windows)
    if not inside.height:
        return {}
    times = inside["time_ns"].to_numpy()
    width = max(int(times.max() - times.min()) // _MOST_SAMPLES, 1)
    entity_means = inside.group_by(*_KEY, "time_ns").agg(pl.col("value").mean())
    bins = entity_means.group_by(*_KEY, pl.col("time_ns") // width).agg(pl.col("value").mean())
    whole = bins.sort("time_ns").group_by(_KEY, maintain_order=True).agg("value").rows()
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


PROMISED_RATIO = ledger.PROBLEM_RATIO / 5
"""The verdict lists opportunities whose gain is at least this share of the step."""
_Z = 1.96  # of the ledger's intervals, which are 95 % ones
_Group = list[ledger.Account]
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange(Change):
    """One account in both runs; 0 where it was never seen."""

    position: str
    activity: str
    package: str | None
    file: str | None  # Its name, without folders
    function: str | None
    before_line: int | None
    after_line: int | None
    callees: tuple[str, ...]
    when: str  # When it is paid: `each step`, `every 20th step, 131 ms`, `since step 512`
    gain_ns: float
    """What the ledger of the run before promised without it; 0 where it is no opportunity."""
    gain_low_ns: float
    gain_high_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The gain that the run before promised for what the new one has less of, and what came."""

    accounts: tuple[AccountChange, ...]
    promised_ns: float  # Of an account that is smaller: its gain, by the share of it that is gone
    low_ns: float
    high_ns: float
    came_ns: float  # By how much the mean step is shorter
    came_low_ns: float
    came_high_ns: float
    others_more_ns: float  # By how much other accounts are larger, of those whose change is certain
    others_less_ns: float  # By how much such are smaller

    @property
    def others_ns(self) -> float:
        """By how much all of them together are larger."""
        return self.others_more_ns - self.others_less_ns

    @property
    def is_outweighed(self) -> bool:
        """Whether other changes are as large as what was promised: nothing can be said of it."""
        # At the least what other accounts changed by, and what the step is longer by, or shorter by
        # beyond all that was promised.
        accounts_ns = self.others_more_ns + self.others_less_ns
        step_ns = max(-self.came_high_ns, self.came_low_ns - self.high_ns)
        return max(accounts_ns, step_ns) >= self.promised_ns

    @property
    def came_true(self) -> bool | None:
        """Whether what was promised came, less what other accounts take; None: too unsure."""
        # Other changes outweigh it; what came is known less well than by as much as was promised;
        # or, with what others take or without, it may be nothing.
        half_ns, may_be = (self.came_high_ns - self.came_low_ns) / 2, (0.0, -self.others_ns)
        nothing = any(self.came_low_ns <= came <= self.came_high_ns for came in may_be)
        if self.is_outweighed or nothing or half_ns >= self.promised_ns:
            return None
        missed = abs(self.came_ns - (self.promised_ns - self.others_ns))
        return missed <= math.hypot((self.high_ns - self.low_ns) / 2, half_ns)


def account_changes(
    before: RunLedger | None, after: RunLedger | None
) -> tuple[tuple[AccountChange, ...], str]:
    """Accounts of both runs, the largest difference first, and why there are none."""
    # An account is known again by its position, activity, package, file and function. What is left
    # then, by position, file and function alone: what code does most of the time may change.
    sides, accounts = [], []
    for word, found in (("baseline", before), ("new run", after)):
        if found is None or not found.table.count.any():
            return (), f"no stacks were sampled in the steps of the {word}: by position alone"
        sides.append(_RunSide(found))
        accounts.append([a for a in found.ledger.accounts if a.activity != ACTIVITIES[UNKNOWN]])
    changes = [_change(sides, pair) for pair in _pairs(*accounts)]
    least_ns = PROMISED_RATIO * sides[0].found.ledger.mean_ns
    return _with_planned_ones(certain(changes), least_ns), ""


def _with_planned_ones(
    changes: Sequence[AccountChange], least_ns: float
) -> tuple[AccountChange, ...]:
    """Gains of lines that the baseline's verdict promised need no allowance for all others."""
    # They were asked for before: each is tested for itself as long as all larger ones are certain.
    # Source: Maurer, Hothorn and Lehmacher, "Multiple comparisons in drug clinical trials: a-priori
    # ordered hypotheses", 1995.
    planned = [one for one in changes if one.file is not None and one.gain_ns >= least_ns]
    p_values, highest = dict[int, float](), 0.0
    for one in sorted(planned, key=lambda one: -one.gain_ns):
        p_values[id(one)] = highest = max(highest, one.p_value)
    return tuple(
        replace(one, adjusted_p_value=min(one.adjusted_p_value or 1.0, p_values.get(id(one), 1.0)))
        for one in changes
    )


def promise(changes: Sequence[AccountChange], step: StepChange) -> Promise | None:
    """None where nothing that the verdict promised a gain for is gone or smaller for certain."""
    sure = [one for one in changes if one.is_certain]
    kept = [o for o in sure if o.difference_ns < 0 and o.gain_ns >= PROMISED_RATIO * step.before_ns]
    if not kept or step.low_ratio is None or step.high_ratio is None:
        return None
    gone = [(one, -one.difference_ns / one.before_ns) for one in kept]
    others = [one.difference_ns for one in sure if one not in kept]
    promised = sum(one.gain_ns * part for one, part in gone)
    return Promise(
        accounts=tuple(kept), promised_ns=promised,
        low_ns=promised - math.hypot(*((o.gain_ns - o.gain_low_ns) * part for o, part in gone)),
        high_ns=promised + math.hypot(*((o.gain_high_ns - o.gain_ns) * part for o, part in gone)),
        came_ns=-step.difference_ns, came_low_ns=(1 - step.high_ratio) * step.before_ns,
        came_high_ns=(1 - step.low_ratio) * step.before_ns,
        others_more_ns=sum(ns for ns in others if ns > 0),
        others_less_ns=-sum(ns for ns in others if ns < 0),
    )  # fmt: skip


class _RunSide:
    """A run's ledger, with what its accounts may differ by in another run of the same job."""

    def __init__(self, found: RunLedger) -> None:
        self.found = found
        time = found.time
        series = steady(found, time.each_step(time.period_ns.mean(axis=0)))
        step = block_mean(series, run_ratio=RUN_RATIO)
        variance, self._freedom = step.error.parts[-1]
        self._run_ratio = math.sqrt(variance) / step.value
        self._counts = np.bincount(found.table.position, found.table.count, len(ledger.POSITIONS))

    def mean(self, group: _Group, position: str) -> BlockMean:
        """What some accounts take together; none of them: at most so much (Wilson's bound)."""
        value = sum(account.ns_per_step for account in group)
        widths = [max(a.ns_per_step - a.low_ns, a.high_ns - a.ns_per_step) for a in group]
        if not group:
            whole = self.found.ledger.positions.get(position, 0.0)
            widths = [whole * _Z**2 / (self._counts[ledger.POSITIONS.index(position)] + _Z**2)]
        run = ((self._run_ratio * value) ** 2, self._freedom)
        sampled = (sum(width**2 for width in widths) / _Z**2, math.inf)
        return BlockMean(value=value, error=Uncertain(parts=(sampled, run)))


def _pairs(old: _Group, new: _Group) -> Iterator[tuple[_Group, _Group]]:
    for key in (_key, _place_key):
        olds, news = _group_by(old, key), _group_by(new, key)
        both = sorted(olds.keys() & news.keys(), key=str)
        yield from ((olds[found], news[found]) for found in both)
        old, new = ([a for a in side if key(a) not in both] for side in (old, new))
    for account in old:
        same = [other for other in new if _is_one_node(account, other)][:1]
        new = [other for other in new if other not in same]
        yield [account], same
    yield from (([], group) for group in _group_by(new, _key).values())


def _key(account: ledger.Account) -> _Key:
    doing = account.activity, account.package, account.explanation
    return (account.position, _file(account), account.function, *doing)


def _place_key(account: ledger.Account) -> _Key:
    """What the machine or another rank does is one account, in whatever position most of it is."""
    if account.function is not None:
        return account.position, _file(account), account.function, account.explanation
    on_core = account.activity in [ACTIVITIES[activity] for activity in ON_CORE]
    return _key(account) if on_core else (account.activity, account.explanation)


def _is_one_node(one: ledger.Account, other: ledger.Account) -> bool:
    """Whether a function of one calls the other's, for as long: which one names them may change."""
    sizes = sorted([one.ns_per_step, other.ns_per_step])
    if one.position != other.position or 2 * sizes[0] < sizes[1]:
        return False
    names = [f"{_file(each)} {each.function}" for each in (one, other)]
    ways = [[f"{c.split(':')[0]} {c.partition(' ')[2]}" for c in each.callers]
            for each in (other, one)]  # fmt: skip
    return names[0] in ways[0] or names[1] in ways[1]


def _file(account: ledger.Account) -> str | None:
    return account.file and account.file.replace("\\", "/").rpartition("/")[2]


def _group_by(accounts: _Group, key: Callable[[ledger.Account], _Key]) -> dict[_Key, _Group]:
    found: dict[_Key, _Group] = defaultdict(list)
    for account in accounts:
        found[key(account)].append(account)
    return found


def _change(sides: Sequence[_RunSide], pair: tuple[_Group, _Group]) -> AccountChange:
    old, new = pair
    lines = [max(of, key=lambda a: a.ns_per_step).line if of else None for of in pair]
    shown = max((*old, *new), key=lambda a: a.ns_per_step)
    means = [side.mean(group, shown.position) for side, group in zip(sides, pair, strict=True)]
    gain = sum(account.gain_ns for account in old)
    when = [] if shown.when in (ledger.EACH_STEP, ledger.NOT_KNOWN) else [shown.paid]
    return AccountChange(
        title=", ".join([*filter(None, [shown.code_place]), shown.where, shown.does, *when]),
        position=shown.position, activity=shown.activity, package=shown.package, file=_file(shown),
        function=shown.function, before_line=lines[0], after_line=lines[1], callees=shown.callees,
        when=shown.when, gain_ns=gain,
        gain_low_ns=gain - math.hypot(*(a.gain_ns - a.gain_low_ns for a in old)),
        gain_high_ns=gain + math.hypot(*(a.gain_high_ns - a.gain_ns for a in old)),
        **difference(*means),
    )  # fmt: skip


COMPARE_LOAD_RATIO = 0.10
"""Share of the nodes' cores that other processes used in the slower run, from which on it is asked
what that may explain, however much they used in the other one; a change of that share by as much is
said where nothing is asked. TraceML's 10 % of what a step should not hold."""
COMPARE_SHARED_CORE_RATIO = 0.50
"""A busy neighbour on the same physical core makes work on it take up to half again as long: two
hyperthreads do about 1.3 times the work of one (Marr et al., Hyper-Threading Technology
Architecture and Microarchitecture, 2002)."""
_FOREVER_NS = 1 << 62
TRACE_LIMIT_BYTES = 500_000_000
State = Literal["slower", "faster", "same", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A baseline against a new run."""

    before: ComparedRun
    after: ComparedRun
    change: StepChange
    positions: tuple[PositionChange, ...]
    accounts: tuple[AccountChange, ...]
    no_accounts: str  # Why they could not be compared
    promise: Promise | None  # What the baseline's verdict promised for what is gone, and what came
    ranks: tuple[RankChange, ...]  # Ranks that changed unlike the others
    counters: tuple[CounterChange, ...]
    loads: tuple[Load, Load]
    differs: tuple[Differs, ...]
    kernels: TraceDiff | None  # Traces against each other, where both runs have some
    no_kernels: str  # Why there are none
    unknown: tuple[str, ...]  # What could not be compared

    @property
    def unjudged(self) -> str:
        """Why nothing can be claimed, however large the difference; empty where it can."""
        if self.change.unknown:
            return self.change.unknown
        explained_ns = other_load_ns(self.change, self.loads)
        if not explained_ns or self.change.least_ns > explained_ns:
            return ""
        slower = self.loads[self.change.is_slower]
        return (
            f"other processes used {ratio_text(slower.other_ratio)} of the cores in the slower "
            f"run, which may explain up to {duration_text(explained_ns)} per step (waiting for a "
            "core, and two threads that share one)"
        )

    @property
    def load_text(self) -> str:
        """What others used of the cores in both runs; empty where it was little."""
        old, new = (load.other_ratio for load in self.loads)
        if max(old or 0.0, new or 0.0) <= COMPARE_LOAD_RATIO:
            return ""
        return (
            f"other processes used {ratio_text(old)} of the cores in the baseline, "
            f"{ratio_text(new)} in the new run"
        )

    @property
    def most_ratio(self) -> float:
        """No difference is larger than this: the end of the interval that is farther from 0."""
        low, high = self.change.low_ratio, self.change.high_ratio
        return math.inf if low is None or high is None else max(1 - low, high - 1)

    @property
    def state(self) -> State:
        """What is claimed; `same`: no difference as large as what a verdict calls a problem."""
        if self.unjudged:
            return "undecided"
        if self.change.is_slower or self.change.is_faster:
            return "slower" if self.change.is_slower else "faster"
        return "same" if self.most_ratio <= ledger.PROBLEM_RATIO else "undecided"


def compare_runs(
    before: ComparedRun, after: ComparedRun, *, read_traces: bool = True
) -> Comparison:
    """Compares a new run with a baseline; a UsageError where both are the same run."""
    is_one = before.path.samefile(after.path)
    if is_one and before.analyzer.between == after.analyzer.between:
        raise UsageError(
            f"{after.path}: compared with itself, a run never differs",
            hint="name an earlier run as the baseline, or --baseline last-good",
        )
    old, new = before.ledger, after.ledger
    medians = [math.nan if found is None else found.ledger.median_ns for found in (old, new)]
    change = step_change(steady(old, before.step_ns), steady(new, after.step_ns), medians)
    known = not change.unknown
    accounts, no_accounts = account_changes(old, new) if known else ((), "steps are not compared")
    kernels, why = _kernels(before, after) if read_traces else (None, "left out by --no-traces")
    return Comparison(
        before=before, after=after, change=change,
        positions=position_changes(before, after) if known else (), accounts=accounts,
        no_accounts=no_accounts, promise=promise(accounts, change),
        ranks=rank_changes(old, new) if known and old and new else (),
        counters=counter_changes(before, after) if known else (),
        loads=(load_of(before), load_of(after)), differs=compared_run.differences(before, after),
        kernels=kernels, no_kernels=why, unknown=compared_run.unknown(before, after),
    )  # fmt: skip


def compare_steps(analyzer: RunFrames, step: int) -> Comparison:
    """Compares the steps of one run from a step on with those before it."""
    steps = analyzer.steps()
    first = steps["step"].min()
    if isinstance(first, int) and step <= first > 0:
        raise MissingDataError(
            f"{analyzer.run.root}: of steps before {first} only sums are kept",
            hint=f"compare from a step after {first} on; a run started with --detail 0 keeps all",
        )
    later = steps.filter(steps["step"] >= step)["start_ns"].min()
    if not isinstance(later, int):
        raise MissingDataError(f"{analyzer.run.root}: no step {step} was recorded")
    parts = ((0, later), (later, _FOREVER_NS))
    sides = (open_compared_run(RunFrames(analyzer.run.root, between=part)) for part in parts)
    return compare_runs(*sides, read_traces=False)


def exceeds(found: Comparison, limit_ratio: float) -> bool | None:
    """Whether the new run's mean step is longer than a limit allows, and not by chance alone.

    None where nobody can say: it cannot be judged, or the interval reaches beyond the limit, with
    what others on the cores of the earlier run may have hidden.
    """
    change = found.change
    if change.low_ratio is None or change.high_ratio is None:
        return None
    if found.unjudged:
        hidden = other_load_ns(change, found.loads) / max(change.before_ns, 1.0)
        return False if change.high_ratio - 1 + hidden <= limit_ratio else None
    if change.is_slower:
        return change.ratio - 1 > limit_ratio
    return None if change.high_ratio - 1 > limit_ratio else False


def other_load_ns(change: StepChange, loads: tuple[Load, Load]) -> float:
    """How much of a step's difference others on the cores may explain at most; 0 where none."""
    # What they took in the slower run: a full machine looks alike in both, and is not. Time in
    # which the main thread waited for a core, and by how much its work took longer on shared cores,
    # in proportion to the load (`COMPARE_SHARED_CORE_RATIO`).
    load, step_ns = loads[change.is_slower], max(change.before_ns, change.after_ns)
    other = load.other_ratio or 0.0
    if other <= COMPARE_LOAD_RATIO or not (change.is_slower or change.is_faster):
        return 0.0
    waited = load.wait_ratio or 0.0
    worked = min(1.0 - waited, 1.0 if load.main_cores is None else load.main_cores)
    longer = COMPARE_SHARED_CORE_RATIO * other
    return (waited + worked * longer / (1 + longer)) * step_ns


def unlike_scripts(found: Comparison) -> Iterator[str]:
    """That two programs are compared, which a reader must know before any number."""
    scripts = {
        script_words(side.manifest.command)[0]: None
        for side in (found.before, found.after)
        if side.manifest is not None and side.manifest.command
    }
    if len(scripts) > 1:
        names = " and ".join(scripts)
        yield f"the runs are of different scripts, {names}: a step may not be the same work"


def caveats(found: Comparison) -> Iterator[str]:
    """What a reader must know before trusting the claim."""
    yield from unlike_scripts(found)
    for word, manifest in (("baseline", found.before.manifest), ("new run", found.after.manifest)):
        if manifest is not None and manifest.end_wall_ns is None:
            yield f"{word}: it has no end: it still runs, or was killed"
        elif manifest is not None and manifest.exit_status != 0:
            yield f"{word}: it did not end with exit status 0"
    if len(found.before.inputs.world) != len(found.after.inputs.world):
        yield "the runs have different numbers of ranks: a step is not the same work"


def _kernels(before: ComparedRun, after: ComparedRun) -> tuple[TraceDiff | None, str]:
    for word, side in (("baseline", before), ("new run", after)):
        if not side.analyzer.run.traces.is_dir():
            return None, f"no traces in the {word}: --trace records some"
    try:
        analyses = [TraceQuestions(side.path) for side in (before, after)]
        size = sum(analysis.size_bytes() for analysis in analyses)
        if size > TRACE_LIMIT_BYTES:
            return None, f"traces of {size >> 20} MiB are left to haiprof compare --traces"
        return analyses[0].diff(analyses[1]), ""
    except HaiprofError as error:
        return None, str(error)
    except OSError as error:
        return None, f"traces: {error.strerror or error}"
