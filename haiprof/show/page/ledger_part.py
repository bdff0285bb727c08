"""The ledger as the page shows it: bars of positions, a row per account, its series over steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from haiprof.base.ledger import Account, Ledger
from haiprof.base.units import NS_PER_MS, duration_text
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.show.card import gain_text
from haiprof.show.figures.panels import thin_points
from haiprof.show.page.counter_data import half_floats, single_floats
from haiprof.show.text import printable, share_text

SHOWN_BARS = 32
"""Bars of more ranks than this are folded in."""
_LEAST_RATIO = 0.002
"""Accounts below this share of the step are one row."""
_POINT_LIMIT = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionBar:
    """The mean step of the job, or of one rank."""

    name: str
    mean_ns: float
    stretches: tuple[tuple[str, float], ...]
    """(position, percent of the longest bar)."""
    what: str
    """Its positions with their times, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One account, or several small ones; cells of text."""

    number: int | None
    """Of the ledger, where it is one account that has details."""
    position: str
    activity: str
    place: str
    inside: str
    """What of the line ran, and what it called."""
    ns: float
    share: str
    gain: str
    when: str
    kind: str
    """`critical` or `warning`: a problem; `info`: another opportunity; empty: what is needed."""
    callers: str
    finding: Finding | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPart:
    """The accounts of the mean step; they add up to it."""

    mean_ns: float
    median_ns: float
    positions: tuple[tuple[str, float, str], ...]
    """(position, ns, share of the step)."""
    bars: tuple[PositionBar, ...]
    """The job, then ranks, slowest first, where there are several."""
    rows: tuple[AccountRow, ...]
    rests_on: str
    data: Mapping[str, Any]
    """By account with details: `count` points; and for all together `step` and `ms`."""


def ledger_part(verdict: Verdict, found: RunLedger | None) -> LedgerPart | None:
    """The ledger of a run; None without one."""
    ledger = verdict.ledger
    if ledger is None:
        return None
    rows = tuple(_rows(ledger, verdict.findings))
    details = [row.number for row in rows if row.number is not None]
    return LedgerPart(
        mean_ns=ledger.mean_ns,
        median_ns=ledger.median_ns,
        positions=tuple(
            (name, ns, share_text(ns, ledger.mean_ns)) for name, ns in ledger.positions.items()
        ),
        bars=tuple(_bars(ledger, found)),
        rows=rows,
        rests_on=ledger.rests_on,
        data=_series(found, details) if found else {"counts": {}},
    )


def _bars(ledger: Ledger, found: RunLedger | None) -> Iterator[PositionBar]:
    ranks = found.rank_positions() if found else {}
    shown = {"all ranks": ledger.positions} if len(ranks) > 1 else {"": ledger.positions}
    if len(ranks) > 1:
        shown |= {f"rank {rank}": positions for rank, positions in ranks.items()}
    longest = max(sum(positions.values()) for positions in shown.values()) or 1.0
    for name, positions in shown.items():
        yield PositionBar(
            name=name,
            mean_ns=sum(positions.values()),
            stretches=tuple((key, round(100 * ns / longest, 3)) for key, ns in positions.items()),
            what=", ".join(f"{_words(key)} {duration_text(ns)}" for key, ns in positions.items()),
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
        opportunity = "info" if number in ledger.opportunities else ""
        yield _row(ledger, number, account, finding, finding.severity if finding else opportunity)
    for what, ns in (("smaller accounts", small), ("not sampled", ledger.residual_ns)):
        if ns >= 1:
            yield AccountRow(
                number=None, position=what, activity="", place="", inside="", ns=ns, gain="",
                share=share_text(ns, ledger.mean_ns), when="", kind="", callers="", finding=None,
            )  # fmt: skip


def _row(
    ledger: Ledger, number: int, account: Account, finding: Finding | None, kind: str
) -> AccountRow:
    who = f"rank {account.ranks[0]}: " if len(account.ranks) == 1 else ""
    callees = f"in {' > '.join(account.callees)}" if account.callees else ""
    inside = " · ".join(part for part in (account.expression or "", callees) if part)
    return AccountRow(
        number=number,
        position=who + _words(account.position),
        activity=_activity(account),
        place=printable(account.code_place or ""),
        inside=printable(inside),
        ns=account.ns_per_step,
        share=share_text(account.ns_per_step, ledger.mean_ns),
        gain=gain_text(finding).replace(" a step", "") if finding else "",
        when="" if account.needed else account.when,
        kind=kind,
        callers=printable(" < ".join(account.callers)),
        finding=finding,
    )


def _activity(account: Account) -> str:
    """`Python in numpy`, `torch operators`, `wait: loader`."""
    package = account.package
    if account.activity == "operators":
        return "torch operators"
    if account.activity not in ("python", "native") or package is None:
        return account.activity if account.activity != "unknown" else "not sampled"
    word = {"python": "Python", "native": "native code"}[account.activity]
    return word if package == "job" else f"{word} in {printable(package)}"


def _words(position: str) -> str:
    return position.replace("_", " ")


def _series(found: RunLedger, accounts: Sequence[int]) -> dict[str, Any]:
    """Of many steps the longest and the shortest of each stretch."""
    counts: dict[str, int] = {}
    steps, times = [np.empty(0)], [np.empty(0)]
    for number in accounts:
        series = found.series(number)
        kept = thin_points(series, limit=_POINT_LIMIT)
        counts[str(number)] = len(kept)
        steps.append(found.time.step[kept].astype(np.float64))
        times.append(series[kept] / NS_PER_MS)
    return {
        "counts": counts,
        "step": single_floats(np.concatenate(steps)),
        "ms": half_floats(np.concatenate(times)),
    }
