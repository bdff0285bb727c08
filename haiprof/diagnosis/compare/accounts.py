"""The accounts of two ledgers against each other, and whether the promised gain came true."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from haiprof.base.ledger import POSITIONS, PROBLEM_RATIO, Account
from haiprof.base.statistics import RUN_RATIO, BlockMean, Uncertain, block_mean
from haiprof.diagnosis.compare.step_change import Change, StepChange, certain, difference
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.verdict import place_text
from haiprof.run_analysis.ledger import ACTIVITIES, ON_CORE, UNKNOWN

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
    at = [place_text(shown.file, shown.line or 0, shown.function or "?")] if shown.file else []
    when = [] if shown.when == "each step" else [shown.when]
    return AccountChange(
        title=", ".join([*at, shown.where, shown.activity, *when]),
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
