"""What `haiprof verdict` shows of traces: the ledger of the device's time, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from haiprof.base.ledger import PROBLEM_RATIO, Account
from haiprof.base.units import duration_text, ranks_text, ratio_text
from haiprof.diagnosis.verdict import STEP_FIELDS, account_document
from haiprof.show.figures.style import BLUE, GREY, ORANGE, PURPLE, SKY, YELLOW
from haiprof.show.text import printable
from haiprof.show.views.blocks import INDENT, bullets
from haiprof.trace_analysis.device_remedies import REMEDIES, remedy_of
from haiprof.trace_analysis.device_verdict import DeviceLedger

_FEW = 3
_MANY = 20
_BAR_WIDTH = 80
_WORTH_RATIO = 0.002
"""A smaller opportunity is shown with --all alone."""
_GROUPS = (
    ("computing", "compute: ", SKY, "█"),
    ("operators", "operators: ", SKY, "█"),
    ("waiting for peers", "wait: peer", YELLOW, "▚"),
    ("communicating", "link: ", PURPLE, "▓"),
    ("communicating", "communication: ", PURPLE, "▓"),
    ("copying", "copy: ", ORANGE, "▒"),
    ("idle, host late", "idle: ", GREY, "░"),
    ("python", "python", BLUE, "▓"),
    ("waiting", "wait: ", ORANGE, "▒"),
    ("other", "", GREY, "░"),
)
"""Parts of the bar: name, what begins its activities, colour, and filling without colours."""
_GAPS = ("between kernels", "idle: between kernels", GREY, "·")
_MARKS_DIFFER_RATIO = 0.05
"""From this share on it is said that the host's marks are longer or shorter than the steps."""


def device_ledger_view(
    found: DeviceLedger, path: Path, *, width: int, everything: bool = False
) -> RenderableType:
    """The whole view.

    Args:
        found: Of some traces.
        path: Where they are.
        width: Columns of the terminal.
        everything: Whether all opportunities above 0.1 % are shown.
    """
    ledger = found.ledger
    kinds = "device" if found.on_device else "host"
    title = f"{path.name}: ledger of the {kinds}'s time, {ledger.rests_on}"
    worth = [each for each in ledger.largest()
             if everything or each.gain_ns >= _WORTH_RATIO * ledger.mean_ns]  # fmt: skip
    parts: list[RenderableType] = [
        Text(printable(headline(found)), style="bold"),
        Text(printable(title), style="dim"),
        Text(),
        *_two_lines(found, min(width, _BAR_WIDTH)),
    ]
    for place, account in enumerate(worth[: _MANY if everything else _FEW], start=1):
        parts += [Text(), *_opportunity(found, account, place)]
    notes = [*([found.late] if found.late else []), *_marks_note(found), *ledger.missing]
    if notes:
        parts += [Text(), *bullets(notes)]
    return Group(*parts)


def device_ledger_data(found: DeviceLedger, path: Path) -> dict[str, Any]:
    """The same as JSON, with the fields that the ledger of a run has."""
    ledger = found.ledger
    return {
        "path": str(path),
        "headline": headline(found),
        "time_line": "device" if found.on_device else "host",
        "ranks": list(found.ranks),
        "world_size": found.world_size,
        "step": {
            **{name: getattr(ledger, name) for name in STEP_FIELDS}, "mark_ns": found.mark_ns,
        },
        "ledger": [account_document(account) for account in ledger.accounts],
        "opportunities": list(ledger.opportunities),
        "problem_count": ledger.problem_count,
        "explanations": {each.key: each.do for each in reversed(REMEDIES)},
        "late": found.late,
        "gpu_event_count": found.kernel_count,
        "linked_count": found.linked_count,
    }  # fmt: skip


def headline(found: DeviceLedger) -> str:
    """The largest opportunity, or what the time is spent on where none stands out."""
    ledger, subject = found.ledger, "the GPU" if found.on_device else "the host"
    needed = sum(account.ns_per_step for account in ledger.accounts if account.needed)
    work = f"{subject} {'computes' if found.on_device else 'runs operators for'}"
    busy = f"{work} {_share(needed, ledger.mean_ns)} of the step"
    largest = next(iter(ledger.largest()), None)
    if largest is None:
        return f"Nothing stands out: {busy}"
    if ledger.problem_count:
        sure = next(filter(ledger.is_problem, ledger.largest()))
        part = f"{duration_text(sure.gain_ns)} of {duration_text(ledger.mean_ns)} a step"
        return f"{_phrase(found, sure, subject)}: {part}"
    what = f"{_phrase(found, largest)}, {_share(largest.gain_ns, ledger.mean_ns)} of the step"
    if largest.gain_ns >= PROBLEM_RATIO * ledger.mean_ns:
        return f"No problem is certain: {busy}; the largest that may be: {what}"
    return f"Nothing stands out: {busy}; largest opportunity: {what}"


def _phrase(found: DeviceLedger, account: Account, subject: str = "") -> str:
    """Position, what is done there, by whom, and the code."""
    remedy = remedy_of(account.activity)
    says = remedy.says if remedy else account.activity
    if subject:
        says = f"{subject} {'is ' if says.startswith('idle') else ''}{says}"
    if account.ranks and len(found.ranks) > 1:
        says = f"{says} on {ranks_text(account.ranks)}"
    return f"{account.position.replace('_', ' ')}: {says}{_at(account)}"


def _at(account: Account) -> str:
    place = account.code_place or account.function
    inner = account.callees[-1] if account.callees else None
    words = [word for word in (place, inner and f"<{_short(inner)}>") if word]
    return f" ({' '.join(words)})" if words else ""


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"


def _share(part: float, whole: float) -> str:
    return ratio_text(part / whole) if whole else ratio_text(0.0)


def _bar_parts(found: DeviceLedger) -> dict[tuple[str, str, str], float]:
    """Time of each part of the bar, in the order of `_GROUPS`."""
    groups = {(name, color, fill): 0.0 for name, _, color, fill in (*_GROUPS, _GAPS)}
    for account in found.ledger.accounts:
        name, _, color, fill = next(
            group for group in (_GAPS, *_GROUPS) if account.activity.startswith(group[1])
        )
        groups[name, color, fill] += account.ns_per_step
    return {key: ns for key, ns in groups.items() if ns > 0}


def _two_lines(found: DeviceLedger, width: int) -> Iterator[RenderableType]:
    """The bar, and its numbers."""
    ledger, groups = found.ledger, _bar_parts(found)
    bar, done, ends = Text(no_wrap=True), 0.0, 0
    numbers = Text("step ", style="")
    numbers.append(duration_text(ledger.mean_ns), style="bold")
    for (name, color, fill), ns in groups.items():
        done += ns
        end = round(done / ledger.mean_ns * width)
        bar.append(fill * (end - ends), style=color)
        ends = end
        inner = _kinds(found.ledger.accounts, ns) if name in ("computing", "operators") else ""
        numbers.append("  ")
        numbers.append(fill, style=color)
        numbers.append(f" {name} {duration_text(ns)}, {_share(ns, ledger.mean_ns)}{inner}")
    yield bar
    yield numbers


def _kinds(accounts: tuple[Account, ...], whole: float) -> str:
    """The kinds of work that most of computing is."""
    kinds: dict[str, float] = {}
    for account in accounts:
        if account.needed:
            kind = account.activity.partition(": ")[2]
            kinds[kind] = kinds.get(kind, 0.0) + account.ns_per_step
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:4]
    return f" ({', '.join(f'{kind} {_share(kinds[kind], whole)}' for kind in most)})"


def _opportunity(found: DeviceLedger, account: Account, place: int) -> Iterator[RenderableType]:
    """An opportunity in three lines: what and where, its time and gain, and what to do."""
    mean, remedy = found.ledger.mean_ns, remedy_of(account.activity)
    line = Text(f"{place}  ", style="bold")
    line.append(printable(_phrase(found, account)))
    spread = [duration_text(mean - gain) for gain in (account.gain_high_ns, account.gain_low_ns)]
    between = f" ({spread[0]} to {spread[1]})" if spread[0] != spread[1] else ""
    gain = (
        f"{duration_text(account.ns_per_step)}, {_share(account.ns_per_step, mean)} of the step, "
        f"{account.when} → without it {duration_text(mean - account.gain_ns)}{between}"
    )
    yield line
    yield Padding(Text(gain), (0, 0, 0, INDENT + 1))
    if remedy:
        yield Padding(Text(f"do: {remedy.do}", style="dim"), (0, 0, 0, INDENT + 1))


def _marks_note(found: DeviceLedger) -> Iterator[str]:
    marks, mean = found.mark_ns, found.ledger.mean_ns
    if found.on_device and marks is not None and abs(marks - mean) > _MARKS_DIFFER_RATIO * mean:
        yield (
            f"the profiler's marks are {duration_text(marks)} a step: the host runs ahead of the "
            "device, whose steps end with the last event that they launched"
        )
