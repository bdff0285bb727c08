"""The ledgers as a page shows them: of the run, and of the time of its devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.code_places import place_text
from haiprof.base.ledger import Account, Ledger, activity_words
from haiprof.base.units import NS_PER_MS, number_text, ranks_text, ratio_text, shorten
from haiprof.diagnosis.explanations import main_callee
from haiprof.diagnosis.machine_causes import LARGER_INPUTS
from haiprof.diagnosis.run_ledger import RunLedger
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.show.frame_table import HEADINGS, PageTable, heads, page_table
from haiprof.show.page.counter_data import half_floats, single_floats
from haiprof.show.series import thin_points
from haiprof.show.text import count_text
from haiprof.show.views import device_ledger as view
from haiprof.show.views.functions import kernel_label
from haiprof.trace_analysis.device_ledger import HOST_OPERATORS_REMEDY
from haiprof.trace_analysis.device_verdict import DeviceLedger
from haiprof.trace_analysis.host_activity import parse_place

_LEAST_RATIO = 0.01  # Accounts below this share of the step are one row
_POINT_LIMIT = 500
_ACTIVITIES = {"native": "native code", "unknown": "not sampled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountRow:
    """One account, or several small ones together."""

    label: str
    ns: float
    account: Account | None = None
    number: int | None = None  # Of the ledger
    finding: Finding | None = None
    kind: str = ""
    """`critical` or `warning`: a problem; `info`: another opportunity; empty: what is needed, or
    too small for a gain."""

    @property
    def code_place(self) -> str:
        """`train.py:88 load_image`; empty where no code is known."""
        return (self.account and self.account.code_place) or ""

    @property
    def activity(self) -> str:
        """`Python in numpy`, `torch operators`, `waiting for batches`; as its finding names it."""
        if self.account is None:
            return ""
        if self.finding is not None and self.finding.cause == LARGER_INPUTS:
            times = self.finding.evidence[0].value
            return f"inputs {number_text(times)} times as large" if times else "larger inputs"
        did, package = self.account.activity, self.account.package
        inside = did in ("python", "native") and package not in (None, "job")
        whose = "Python's own library" if package == "python" else package
        if self.finding is not None and did in ("python", "native", "operators"):
            whose = main_callee(self.account) or whose
            inside = inside or bool(self.account.callees)
        said = self.account.does if did == "operators" else activity_words(did)
        return _ACTIVITIES.get(did, said) + (f" in {whose}" if inside else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerPart:
    """The accounts of the mean step; they add up to it."""

    ledger: Ledger
    bars: tuple[tuple[str, Mapping[str, float]], ...]
    """The job's positions, then those of ranks, slowest first, where there are several."""
    rows: tuple[AccountRow, ...]
    data: Mapping[str, Any]  # By account: `counts` of points; and for all together `step` and `ms`

    @property
    def longest_ns(self) -> float:
        """Of the bars."""
        return max(sum(positions.values()) for _, positions in self.bars) or 1.0


def ledger_part(verdict: Verdict, found: RunLedger | None) -> LedgerPart | None:
    """The ledger of a run; None without one."""
    if (ledger := verdict.ledger) is None or found is None:
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
    """Problems in the order of the ledger, then accounts by their time, then what is small."""
    of_account = {each.account: each for each in findings if each.account is not None}
    problems = {at for at, each in of_account.items() if each.severity in ("critical", "warning")}
    numbered = sorted(
        enumerate(ledger.accounts),
        key=lambda each: (0, each[0]) if each[0] in problems else (1, -each[1].ns_per_step),
    )
    small, small_count = 0.0, 0
    for number, account in numbered:
        finding = of_account.get(number)
        if finding is None and account.ns_per_step < _LEAST_RATIO * ledger.mean_ns:
            small, small_count = small + account.ns_per_step, small_count + 1
            continue
        late = "straggler " if account.explanation == "ranks_uneven" else ""
        who = f"{late}{ranks_text(account.ranks)}: " if late or len(account.ranks) == 1 else ""
        yield AccountRow(
            label=who + account.where, ns=account.ns_per_step,
            account=account, number=number, finding=finding,
            kind=finding.severity if finding else "",
        )  # fmt: skip
    rest = f"{count_text(small_count, 'smaller account')}, each below {ratio_text(_LEAST_RATIO)}"
    for label, ns in ((rest, small), ("not sampled", ledger.residual_ns)):
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


_OPERATOR_LIMIT, _OPPORTUNITY_LIMIT = 15, 8
_NOTES = HEADINGS["page_notes"]
_OPERATORS = heads("operator", "time_ns", time_ratio="of the step", roofline_ratio="roofline",
                   won_ns="to win", does="reaches", kind="kind", kernels="kernels")  # fmt: skip
_HOST_OPERATORS = heads("operator", code="in", time_ns="time", time_ratio="of the step")
_GAP_LIMIT = 12
_GAPS = heads(start_ns="begins at", rank="rank", idle_ns="idle", activity="the host",
              activity_ns="for", code="in", kernel="until")  # fmt: skip
_NAME_LENGTH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePart:
    """What the device did with the mean step, and what would make that shorter."""

    headline: str
    rests_on: str
    mean_ns: float
    bar: tuple[tuple[str, str, float, str], ...]
    """Parts of the mean step: name, colour, ns, and the kinds of work in it."""
    rows: tuple[tuple[bool, str, str, str, str | None], ...]
    """Opportunities: whether it is a problem, what and where, time, the step without it, remedy."""
    tables: tuple[PageTable, ...]
    notes: tuple[str, ...]


def device_part(found: DeviceLedger | None) -> DevicePart | None:
    """The ledger of a device for a page; None where nothing was traced."""
    if found is None:
        return None
    ledger, worth = found.ledger, view.worth_showing(found)
    return DevicePart(
        headline=view.headline(found),
        rests_on=view.rests_on(found),
        mean_ns=ledger.mean_ns,
        bar=tuple(
            (name, color, ns, view.kinds_text(ledger.accounts, ns).strip(" ()")
             if name in ("computing", "operators") else "")
            for (name, color, _), ns in view.bar_parts(found).items()
        ),
        rows=tuple(
            (view.is_problem(found, each), *view.opportunity_texts(found, each))
            for each in worth[:_OPPORTUNITY_LIMIT]
        ),
        tables=tuple(_tables(found)),
        notes=(*found.damage, *view.notes(found, worth)),
    )  # fmt: skip


def _tables(found: DeviceLedger) -> Iterator[PageTable]:
    if found.operators:
        yield _operators(found)
    if found.host_operators:
        rows = pl.DataFrame(found.host_operators, schema=["operator", "code", "time_ns"],
                            orient="row", infer_schema_length=None).with_columns(
            pl.col("code").cast(pl.String).map_elements(_code_place, pl.String),
            time_ratio=pl.col("time_ns") / found.ledger.mean_ns,
        )  # fmt: skip
        note = _NOTES["host_operators"].format(remedy=HOST_OPERATORS_REMEDY)
        yield page_table("Operators of the training thread", rows, _HOST_OPERATORS,
                         limit=_OPERATOR_LIMIT, note=note)  # fmt: skip
    if found.on_device and len(found.gaps):
        yield _gaps(found)


def _gaps(found: DeviceLedger) -> PageTable:
    """Idle times one by one, with what the host did and which kernel ended them."""
    name = pl.col("operator").str.strip_chars("<>")
    rows = found.gaps.head(_GAP_LIMIT).with_columns(
        pl.col("activity").str.strip_prefix("idle: ").replace(old=_NOTES["host_did"]),
        code=pl.concat_str(
            pl.col("code").str.split("\n").list.last().map_elements(_code_place, pl.String),
            name,
            separator=" · ",
            ignore_nulls=True,
        ),
        kernel=pl.col("kernel").map_elements(
            lambda name: shorten(kernel_label(name), _NAME_LENGTH), pl.String
        ),
        rank=pl.col("rank") if len(found.ranks) > 1 else None,
    )
    return page_table("The longest idle times", rows, _GAPS, limit=_GAP_LIMIT, note=_NOTES["gaps"])


def _code_place(name: str) -> str:
    """A Python function as PyTorch names it, as its place; any other name as it is."""
    file, line, function = parse_place(name)
    return place_text(file, line, function) if file else name


def _operators(found: DeviceLedger) -> PageTable:
    """Operators by GPU time with what they reach, and how far from the roofline that is."""
    rows: list[dict[str, Any]] = [
        {
            "operator": " ".join(filter(None, (each.name, view.shapes_text(each.shapes),
                                               each.precision))),
            "kind": each.kind, "kernels": round(each.kernel_count), "time_ns": each.ns_per_step,
            "time_ratio": each.ns_per_step / found.ledger.mean_ns,
            "does": " and ".join(view.rate_texts(each)) or None,
            "roofline_ratio": each.roofline_ratio, "won_ns": each.gain_ns or None,
        }
        for each in sorted(found.operators, key=lambda each: -each.ns_per_step)
    ]  # fmt: skip
    return page_table("Operators by GPU time", pl.DataFrame(rows, infer_schema_length=None),
                      _OPERATORS, limit=_OPERATOR_LIMIT, note=_NOTES["operators"])  # fmt: skip
