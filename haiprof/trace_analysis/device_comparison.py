"""Two traces by what the device did: busy and idle time, and operators paired by their role."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from haiprof.trace_analysis.device_ledger import CONVERSIONS, IDLE
from haiprof.trace_analysis.device_verdict import DeviceLedger, OperatorRole, call_nodes

_LINE = re.compile(r"\((?:\d+|\?)\)")
_EQUAL_RATIO = 0.01
"""Less than this is no difference, however sure."""
OPERATORS, IDLE_TIME, OTHER = "operators", "idle", "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRow:
    """One thing that the device did, per mean step, before and after."""

    of: str
    """`operators`, `idle`, or `other`: communication and copies."""
    role: str
    """The outermost operator that both have, else the kind of work; of the others the activity."""
    before_ns: float
    after_ns: float
    before: tuple[tuple[str, float], ...] = ()
    """Operators and their ns, the longest first."""
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
    on_device: bool
    """Whether both are of GPUs; else the host's training threads are compared."""
    is_different: bool
    """Whether the busy time differs, by more than chance where several steps tell."""
    rows: tuple[ComparedRow, ...]
    """The largest difference first."""
    damage: tuple[str, ...] = ()
    """What of the files could not be read."""
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
    rows = _operator_rows(before.roles, after.roles, tops)
    activities = defaultdict[str, float](float), defaultdict[str, float](float)  # not computing
    for found, side in zip(activities, sides, strict=True):
        for account in side.ledger.accounts:
            if not account.needed and account.activity not in CONVERSIONS:
                found[account.activity] += account.ns_per_step
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


def _operator_rows(
    before: Iterable[OperatorRole], after: Iterable[OperatorRole], tops: set[str | None]
) -> list[ComparedRow]:
    found: dict[str, tuple[dict[str, float], ...]] = {}
    for side, roles in enumerate((before, after)):
        for role in roles:
            top = str(role.top if role.top in tops else role.kind)
            operators = found.setdefault(top, (defaultdict(float), defaultdict(float)))[side]
            operators[role.name] += role.ns_per_step
    rows = []
    for top, sides in found.items():
        old, new = (tuple(sorted(each.items(), key=lambda pair: -pair[1])) for each in sides)
        rows.append(ComparedRow(
            of=OPERATORS, role=top, before_ns=sum(sides[0].values()),
            after_ns=sum(sides[1].values()), before=old, after=new,
        ))  # fmt: skip
    return rows
