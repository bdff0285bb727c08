"""The comparison of two runs as a whole: what is claimed, and what stands against it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.ledger import POSITIONS, PROBLEM_RATIO, Account
from haiprof.base.statistics import RUN_RATIO, BlockMean, Uncertain, block_mean
from haiprof.base.units import duration_text, ratio_text
from haiprof.diagnosis.compare.compared_run import (
    ComparedRun,
    Differs,
    compared_run_of,
    differences,
    unknown,
)
from haiprof.diagnosis.compare.step_change import (
    Change,
    CounterChange,
    Load,
    PositionChange,
    RankChange,
    StepChange,
    certain,
    counter_changes,
    difference,
    load_of,
    position_changes,
    rank_changes,
    step_change,
)
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.run_analysis.ledger import ACTIVITIES, ON_CORE, UNKNOWN
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_analysis.diff import TraceDiff
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

PROMISED_RATIO = PROBLEM_RATIO / 5
"""The verdict lists opportunities whose gain is at least this share of the step."""
_Z = 1.96  # of the ledger's intervals, which are 95 % ones
_Group = list[Account]
_Key = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountChange(Change):
    """One account in both runs; 0 where it was never seen."""

    position: str
    activity: str
    package: str | None
    file: str | None
    """Its name, without folders."""
    function: str | None
    before_line: int | None
    after_line: int | None
    callees: tuple[str, ...]
    when: str
    """When it is paid: `each step`, `every 20th step, 131 ms`, `since step 512`."""
    gain_ns: float
    """What the ledger of the run before promised without it; 0 where it is no opportunity."""
    gain_low_ns: float
    gain_high_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The gain that the run before promised for what the new one has less of, and what came."""

    accounts: tuple[AccountChange, ...]
    promised_ns: float
    """Of an account that is smaller: its gain, by the share of it that is gone."""
    low_ns: float
    high_ns: float
    came_ns: float
    """By how much the mean step is shorter."""
    came_low_ns: float
    came_high_ns: float
    others_ns: float
    """By how much all other accounts are larger, of those whose change is certain."""

    @property
    def came_true(self) -> bool | None:
        """Whether what was promised came, less what other accounts take; None: too noisy."""
        if self.came_low_ns <= 0 <= self.came_high_ns:
            return None
        missed = abs(self.came_ns - (self.promised_ns - self.others_ns))
        widths = self.high_ns - self.low_ns, self.came_high_ns - self.came_low_ns
        return missed <= math.hypot(*widths) / 2


def account_changes(
    before: RunLedger | None, after: RunLedger | None
) -> tuple[tuple[AccountChange, ...], str]:
    """Accounts of both runs, the largest difference first, and why there are none.

    An account is known again by its position, activity, package, file and function. What is left
    then, by position, file and function alone: what code does most of the time may change.
    """
    sides = []
    for word, found in (("baseline", before), ("new run", after)):
        if found is None or not found.table.count.any():
            return (), f"no stacks were sampled in the steps of the {word}: by position alone"
        sides.append(_RunSide(found))
    accounts = [[a for a in s.found.ledger.accounts if a.activity != ACTIVITIES[UNKNOWN]]
                for s in sides]  # fmt: skip
    pairs = _pairs(accounts[0], accounts[1])
    return certain([_change(sides[0], sides[1], old, new) for old, new in pairs]), ""


def promise(changes: Sequence[AccountChange], step: StepChange) -> Promise | None:
    """None where nothing that the verdict promised a gain for is gone or smaller for certain."""
    sure = [one for one in changes if one.is_certain]
    kept = [o for o in sure if o.difference_ns < 0 and o.gain_ns >= PROMISED_RATIO * step.before_ns]
    if not kept or step.low_ratio is None or step.high_ratio is None:
        return None
    gone = [(one, -one.difference_ns / one.before_ns) for one in kept]
    promised = sum(one.gain_ns * part for one, part in gone)
    return Promise(
        accounts=tuple(kept),
        promised_ns=promised,
        low_ns=promised - math.hypot(*((o.gain_ns - o.gain_low_ns) * part for o, part in gone)),
        high_ns=promised + math.hypot(*((o.gain_high_ns - o.gain_ns) * part for o, part in gone)),
        came_ns=-step.difference_ns,
        came_low_ns=(1 - step.high_ratio) * step.before_ns,
        came_high_ns=(1 - step.low_ratio) * step.before_ns,
        others_ns=sum(one.difference_ns for one in sure if one not in kept),
    )


class _RunSide:
    """A run's ledger, with what its accounts may differ by in another run of the same job."""

    def __init__(self, found: RunLedger) -> None:
        self.found = found
        step = block_mean(found.time.period_ns.mean(axis=0), run_ratio=RUN_RATIO)
        variance, self._freedom = step.error.parts[-1]
        self._run_ratio = math.sqrt(variance) / step.value
        self._counts = np.bincount(found.table.position, found.table.count, len(POSITIONS))

    def mean(self, group: _Group, position: str) -> BlockMean:
        """What some accounts take together; none of them: at most so much (Wilson's bound)."""
        value = sum(account.ns_per_step for account in group)
        widths = [max(a.ns_per_step - a.low_ns, a.high_ns - a.ns_per_step) for a in group]
        if not group:
            whole = self.found.ledger.positions.get(position, 0.0)
            widths = [whole * _Z**2 / (self._counts[POSITIONS.index(position)] + _Z**2)]
        run = ((self._run_ratio * value) ** 2, self._freedom)
        sampled = (sum(width**2 for width in widths) / _Z**2, math.inf)
        return BlockMean(value=value, error=Uncertain(parts=(sampled, run)))


def _pairs(old: _Group, new: _Group) -> Iterator[tuple[_Group, _Group]]:
    for key in (_key, _place_key):
        groups = [_group_by(side, key) for side in (old, new)]
        both = groups[0].keys() & groups[1].keys()
        yield from ((groups[0][found], groups[1][found]) for found in sorted(both, key=str))
        old, new = ([a for a in side if key(a) not in both] for side in (old, new))
    for account in old:
        same = [other for other in new if _is_one_node(account, other)][:1]
        new = [other for other in new if other not in same]
        yield [account], same
    yield from (([], group) for group in _group_by(new, _key).values())


def _key(account: Account) -> _Key:
    doing = account.activity, account.package, account.explanation
    return (account.position, _file(account), account.function, *doing)


def _place_key(account: Account) -> _Key:
    """What the machine or another rank does is one account, in whatever position most of it is."""
    if account.function is not None:
        return account.position, _file(account), account.function, account.explanation
    on_core = account.activity in [ACTIVITIES[activity] for activity in ON_CORE]
    return _key(account) if on_core else (account.activity, account.explanation)


def _is_one_node(one: Account, other: Account) -> bool:
    """Whether a function of one calls the other's, for as long: which one names them may change."""
    sizes = sorted([one.ns_per_step, other.ns_per_step])
    if one.position != other.position or 2 * sizes[0] < sizes[1]:
        return False
    ways = [
        (
            f"{_file(a)} {a.function}",
            [f"{c.split(':')[0]} {c.partition(' ')[2]}" for c in a.callers],
        )
        for a in (one, other)
    ]
    return ways[0][0] in ways[1][1] or ways[1][0] in ways[0][1]


def _file(account: Account) -> str | None:
    return account.file and account.file.replace("\\", "/").rpartition("/")[2]


def _group_by(accounts: _Group, key: Callable[[Account], _Key]) -> dict[_Key, _Group]:
    found: dict[_Key, _Group] = defaultdict(list)
    for account in accounts:
        found[key(account)].append(account)
    return found


def _change(before: _RunSide, after: _RunSide, old: _Group, new: _Group) -> AccountChange:
    most = [max(side, key=lambda a: a.ns_per_step) if side else None for side in (old, new)]
    shown = most[1] or max(old, key=lambda a: a.ns_per_step)
    gain = sum(account.gain_ns for account in old)
    when = [] if shown.when == "each step" else [shown.paid]
    return AccountChange(
        title=", ".join([*filter(None, [shown.code_place]), shown.where, shown.does, *when]),
        position=shown.position,
        activity=shown.activity,
        package=shown.package,
        file=_file(shown),
        function=shown.function,
        before_line=most[0].line if most[0] else None,
        after_line=most[1].line if most[1] else None,
        callees=shown.callees,
        when=shown.when,
        gain_ns=gain,
        gain_low_ns=gain - math.hypot(*(a.gain_ns - a.gain_low_ns for a in old)),
        gain_high_ns=gain + math.hypot(*(a.gain_high_ns - a.gain_ns for a in old)),
        **difference(before.mean(old, shown.position), after.mean(new, shown.position)),
    )


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
    no_accounts: str
    """Why they could not be compared."""
    promise: Promise | None
    """What the baseline's verdict promised for what is gone, and what came."""
    ranks: tuple[RankChange, ...]
    """Ranks that changed unlike the others."""
    counters: tuple[CounterChange, ...]
    loads: tuple[Load, Load]
    differs: tuple[Differs, ...]
    kernels: TraceDiff | None
    """Traces against each other, where both runs have some."""
    no_kernels: str
    """Why there are none."""
    unknown: tuple[str, ...]
    """What could not be compared."""

    @property
    def unjudged(self) -> str:
        """Why nothing can be claimed, however large the difference; empty where it can."""
        if self.change.unknown:
            return self.change.unknown
        explained_ns = other_load_ns(self.change, self.loads)
        if not explained_ns or self.change.least_ns > explained_ns:
            return ""
        slower = self.loads[1] if self.change.is_slower else self.loads[0]
        return (
            f"other processes used {ratio_text(slower.other_ratio)} of the cores in the slower "
            f"run, which may explain up to {duration_text(explained_ns)} per step (waiting for a "
            "core, and two threads that share one)"
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
        return "same" if self.most_ratio <= PROBLEM_RATIO else "undecided"


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
    change = step_change(before.step_ns, after.step_ns, medians)
    known = not change.unknown
    accounts, no_accounts = account_changes(old, new) if known else ((), "steps are not compared")
    kernels, why = _kernels(before, after) if read_traces else (None, "left out by --no-traces")
    return Comparison(
        before=before,
        after=after,
        change=change,
        positions=position_changes(before, after) if known else (),
        accounts=accounts,
        no_accounts=no_accounts,
        promise=promise(accounts, change),
        ranks=rank_changes(old, new) if known and old and new else (),
        counters=counter_changes(before, after) if known else (),
        loads=(load_of(before), load_of(after)),
        differs=differences(before, after),
        kernels=kernels,
        no_kernels=why,
        unknown=unknown(before, after),
    )


def compare_steps(analyzer: RunFrames, step: int) -> Comparison:
    """Compares the steps of one run from a step on with those before it."""
    steps = analyzer.steps()
    later = steps.filter(steps["step"] >= step)["start_ns"].min()
    if not isinstance(later, int):
        raise MissingDataError(f"{analyzer.run.root}: no step {step} was recorded")
    sides = [
        compared_run_of(RunFrames(analyzer.run.root, between=between))
        for between in ((0, later), (later, _FOREVER_NS))
    ]
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
    """How much of a step's difference others on the cores may explain at most; 0 where none.

    What they took in the slower run: a full machine looks alike in both, and is not. Time in which
    the main thread waited for a core, and its work on cores that are shared, in proportion to the
    load (`COMPARE_SHARED_CORE_RATIO`).
    """
    if not change.is_slower and not change.is_faster:
        return 0.0
    load = loads[1] if change.is_slower else loads[0]
    step_ns = max(change.before_ns, change.after_ns)
    other = load.other_ratio or 0.0
    if other <= COMPARE_LOAD_RATIO:
        return 0.0
    busy = 1.0 if load.main_cores is None else min(1.0, load.main_cores)
    return ((load.wait_ratio or 0.0) + COMPARE_SHARED_CORE_RATIO * other * busy) * step_ns


def caveats(found: Comparison) -> Iterator[str]:
    """What a reader must know before trusting the claim."""
    for word, side in (("baseline", found.before), ("new run", found.after)):
        if side.manifest is not None and side.manifest.end_wall_ns is None:
            yield f"{word}: it has no end: it still runs, or was killed"
        elif side.manifest is not None and side.manifest.exit_status != 0:
            yield f"{word}: it did not end with exit status 0"
    old, new = (load.other_ratio for load in found.loads)
    if old is not None and new is not None and abs(new - old) > COMPARE_LOAD_RATIO:
        word = "more" if new > old else "less"
        share = ratio_text(abs(new - old))
        yield f"other processes used {share} {word} of the cores in the new run"
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
