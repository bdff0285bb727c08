"""The ledger as the page shows it: bars of positions, a row per account, its series over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from haiprof.base.code_places import place_text
from haiprof.base.ledger import Account, Ledger
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.show.figures.panels import thin_points
from haiprof.show.page.counter_data import half_floats, single_floats

_LEAST_RATIO = 0.002
"""Accounts below this share of the step are one row."""
_POINT_LIMIT = 500
_ACTIVITIES = {"operators": "torch operators", "python": "Python", "native": "native code",
               "unknown": "not sampled"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One account, or several small ones together."""

    label: str
    ns: float
    account: Account | None = None
    number: int | None = None
    """Of the ledger."""
    finding: Finding | None = None
    kind: str = ""
    """`critical` or `warning`: a problem; `info`: another opportunity; empty: what is needed."""

    @property
    def code_place(self) -> str:
        """`train.py:88 load_image`; empty where no code is known."""
        at = self.account
        if at is None or at.file is None:
            return ""
        return place_text(at.file, at.line, at.function or "")

    @property
    def activity(self) -> str:
        """`Python in numpy`, `torch operators`, `wait: loader`."""
        if self.account is None:
            return ""
        did, package = self.account.activity, self.account.package
        inside = did in ("python", "native") and package not in (None, "job")
        whose = "Python's own library" if package == "python" else package
        return _ACTIVITIES.get(did, did) + (f" in {whose}" if inside else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPart:
    """The accounts of the mean step; they add up to it."""

    ledger: Ledger
    bars: tuple[tuple[str, Mapping[str, float]], ...]
    """The job's positions, then those of ranks, slowest first, where there are several."""
    rows: tuple[AccountRow, ...]
    data: Mapping[str, Any]
    """By account: `counts` of points; and for all together `step` and `ms`."""

    @property
    def longest_ns(self) -> float:
        """Of the bars."""
        return max(sum(positions.values()) for _, positions in self.bars) or 1.0


def ledger_part(verdict: Verdict, found: RunLedger | None) -> LedgerPart | None:
    """The ledger of a run; None without one."""
    ledger = verdict.ledger
    if ledger is None or found is None:
        return None
    ranks = found.rank_positions()
    of_ranks = [(f"rank {rank}", own) for rank, own in ranks.items()] if len(ranks) > 1 else []
    rows = tuple(_rows(ledger, verdict.findings))
    return LedgerPart(
        ledger=ledger,
        bars=(("all ranks" if of_ranks else "", ledger.positions), *of_ranks),
        rows=rows,
        data=_series(found, [row.number for row in rows if row.number is not None]),
    )


def _rows(ledger: Ledger, findings: Sequence[Finding]) -> Iterator[AccountRow]:
    """Accounts in the order of the ledger, then what is small, then what is not explained."""
    of_account = {each.account: each for each in findings if each.account is not None}
    small = 0.0
    for number, account in enumerate(ledger.accounts):
        finding = of_account.get(number)
        if finding is None and account.ns_per_step < _LEAST_RATIO * ledger.mean_ns:
            small += account.ns_per_step
            continue
        who = f"rank {account.ranks[0]}: " if len(account.ranks) == 1 else ""
        kind = "info" if number in ledger.opportunities else ""
        yield AccountRow(
            label=who + account.where, ns=account.ns_per_step,
            account=account, number=number, finding=finding,
            kind=finding.severity if finding else kind,
        )  # fmt: skip
    for label, ns in (("smaller accounts", small), ("not sampled", ledger.residual_ns)):
        if ns >= 1:
            yield AccountRow(label=label, ns=ns)


def _series(found: RunLedger, accounts: Sequence[int]) -> dict[str, Any]:
    """Of many steps the longest and the shortest of each stretch."""
    series = {number: found.series(number) for number in accounts}
    kept = {number: thin_points(ns, limit=_POINT_LIMIT) for number, ns in series.items()}
    steps = [found.time.step[points] for points in kept.values()]
    times = [series[number][points] / NS_PER_MS for number, points in kept.items()]
    return {
        "counts": {str(number): len(points) for number, points in kept.items()},
        "step": single_floats(np.concatenate([np.empty(0), *steps])),
        "ms": half_floats(np.concatenate([np.empty(0), *times])),
    }
