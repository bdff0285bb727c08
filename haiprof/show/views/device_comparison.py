"""What `haiprof compare` shows of two traces: what changed on the device, by operator."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.units import duration_text
from haiprof.show.text import printable
from haiprof.show.views.blocks import plain_table, section
from haiprof.trace_analysis.device_comparison import (
    IDLE_TIME,
    OPERATORS,
    ComparedRow,
    DeviceComparison,
)
from haiprof.trace_analysis.device_remedies import remedy_of

_ROWS = 12
_NAMED = 3
_DEPTH = 5
_NUMBERS_WIDTH = 36
_SHARE_RATIO = 0.25
"""Roles with at least so much of the whole difference are named in the headline."""
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_LEAST_OF_UNIT, _EQUAL_RATIO, _CLOSE_RATIO = 0.1, 0.01, 0.3
"""Of the larger one: 0.29 ms, not 290 µs; 130.9 to 108.9 ms, not 0.13 to 0.11 s."""


def device_comparison_view(found: DeviceComparison, *, width: int) -> RenderableType:
    """The whole view, for a terminal of so many columns."""
    table = plain_table("before", "after", "change", "what", left=("what",))
    for row in found.rows[:_ROWS]:
        table.add_row(
            duration_text(row.before_ns), duration_text(row.after_ns),
            _change_text(row.difference_ns),
            _shorten(printable(_row_text(row)), width - _NUMBERS_WIDTH),
        )  # fmt: skip
    device = "device" if found.on_device else "host"
    step = f"step {span_text(found.before_step_ns, found.after_step_ns)}"
    branch = found.branch
    where = []
    if found.is_different and branch is not None and len(branch.path) > 1:
        span = span_text(branch.before_ns, branch.after_ns)
        where = [Text(printable(f"where: {' > '.join(branch.path[-_DEPTH:])}: {span}"))]
    return Group(
        Text(printable(comparison_headline(found)), style="bold"),
        *where,
        Text(f"per step; {step}", style="dim"),
        section(f"What the {device} did, the largest change first", table),
    )


def device_comparison_data(found: DeviceComparison) -> dict[str, Any]:
    """The same as JSON."""
    return {"headline": comparison_headline(found), **asdict(found)}


def comparison_headline(found: DeviceComparison) -> str:
    """`GPU busy 2.00 to 0.04 ms: aten::convolution`."""
    span = span_text(found.before_busy_ns, found.after_busy_ns)
    idles = [row for row in found.rows if row.of == IDLE_TIME]
    step_ns = max(found.before_step_ns, found.after_step_ns)
    change = found.after_step_ns - found.before_step_ns
    idle = "".join(
        f"; {_role_text(row.role)} {span_text(row.before_ns, row.after_ns)}"
        for row in idles[:1]
        if row.difference_ns * math.copysign(1, change) >= PROBLEM_RATIO * step_ns
        and abs(change) >= PROBLEM_RATIO * step_ns
    )
    if not found.is_different:
        same = "GPU equally busy" if found.on_device else "the host's operators take equally long"
        return f"{same}: {span}{idle}"
    busy = f"GPU busy {span}" if found.on_device else f"host operators {span}"
    whole = found.after_busy_ns - found.before_busy_ns
    named = [
        _name_row(row) if row.of == OPERATORS else _role_text(row.role) for row in found.rows
        if row.of != IDLE_TIME and row.difference_ns / whole >= _SHARE_RATIO
    ][:_NAMED]  # fmt: skip
    return f"{busy}: {'; '.join(named)}{idle}" if named else f"{busy}{idle}"


def _name_row(row: ComparedRow) -> str:
    """A role with its operators: those of both sides with both times, else what replaced what."""
    old, new = dict(row.before), dict(row.after)
    if old.keys() == new.keys() == {row.role}:
        return row.role
    if old.keys() == new.keys():
        each = [f"{name} {span_text(old[name], new[name])}" for name in list(old)[:_NAMED]]
        return each[0].split(" ")[0] if len(old) == 1 else f"{row.role} ({', '.join(each)})"
    sides = [", ".join(list(side)[:_NAMED]) or "nothing" for side in (old, new)]
    return f"{row.role} ({sides[0]} to {sides[1]})"


def _role_text(activity: str) -> str:
    """An activity of the device in words."""
    remedy = remedy_of(activity)
    return remedy.says if remedy else activity


def _change_text(ns: float) -> str:
    sign = "+" if ns >= 0.5 else "-" if ns <= -0.5 else ""
    return f"{sign}{duration_text(abs(ns))}"


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width, 2) - 1]}…"


def _row_text(row: ComparedRow) -> str:
    return _name_row(row) if row.of == OPERATORS else row.role


def span_text(before: float, after: float) -> str:
    """`2.00 to 0.04 ms`: both in the unit of the larger one; one number where they are the same."""
    largest = max(before, after)
    is_close = _EQUAL_RATIO * largest < abs(after - before) < _CLOSE_RATIO * largest
    least = 1.0 if is_close else _LEAST_OF_UNIT
    size, unit = next((u for u in _UNITS if largest >= least * u[0]), _UNITS[-1])
    old, new = (f"{each / size:,.2f}" for each in (before, after))
    return f"{old} {unit}" if old == new else f"{old} to {new} {unit}"
