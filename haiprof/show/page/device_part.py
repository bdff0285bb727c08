"""The ledger of the device's time as a page shows it: a bar, opportunities, operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from haiprof.show.frame_table import PageTable, page_table
from haiprof.show.views import device_ledger as view
from haiprof.trace_analysis.device_verdict import DeviceLedger

_OPERATOR_LIMIT, _OPPORTUNITY_LIMIT = 15, 8
_OPERATORS = (
    ("operator", "operator"), ("kind", "kind"), ("kernels", "kernels"),
    ("time_ns", "time"), ("time_ratio", "of the step"), ("does", "reaches"),
    ("roofline_ratio", "roofline"), ("won_ns", "to win"),
)  # fmt: skip
_OF_OPERATORS = (
    "Per step, by GPU time. The roofline is what the GPU can do at most for this work: its peak of "
    "computing or its memory's bandwidth, whichever takes longer. To win: at what such "
    "operators usually reach. A dash: FLOPs, bytes or the GPU's peak are not known."
)


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
        tables=(_operators(found),) if found.operators else (),
        notes=tuple(view.notes(found, worth)),
    )  # fmt: skip


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
                      _OPERATORS, limit=_OPERATOR_LIMIT, note=_OF_OPERATORS)  # fmt: skip
