"""What `haiprof verdict` shows of traces: the ledger of the device's time, and what would help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from haiprof.base.ledger import PROBLEM_RATIO, Account
from haiprof.base.units import duration_text, ranks_text, ratio_text
from haiprof.diagnosis.verdict import device_document
from haiprof.show.figures.style import BLUE, DARK_GREY, GREY, ORANGE, PURPLE, SKY, YELLOW
from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import INDENT, bullets
from haiprof.trace_analysis.device_operators import SHORT_NS
from haiprof.trace_analysis.device_remedies import (
    OPERATOR_REMEDIES,
    is_small_batch,
    operator_remedy,
    remedy_of,
)
from haiprof.trace_analysis.device_verdict import DeviceLedger, DeviceOperator

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
_GAPS = ("between kernels", "idle: between kernels", DARK_GREY, "·")
_SPACES = re.compile(r"\s+")
_IMPOSSIBLE_RATIO = 1.05
"""What is so far above the roofline was not recorded right."""
_UNKNOWN = ", whose FLOPs and bytes are not known"
_MANY_SHORT_RATIO = 0.5
_MARKS_DIFFER_RATIO = 0.05
"""From this share on it is said that the host's marks are longer or shorter than the steps."""


def device_ledger_view(
    found: DeviceLedger, name: str, *, width: int, everything: bool = False
) -> RenderableType:
    """The whole view.

    Args:
        found: Of some traces.
        name: What they are called.
        width: Columns of the terminal.
        everything: Whether all opportunities above 0.1 % are shown.
    """
    title, worth = f"{name}: {rests_on(found)}", worth_showing(found, everything=everything)
    parts: list[RenderableType] = [
        Text(printable(headline(found)), style="bold"),
        Text(printable(title), style="dim"),
        Text(),
        *_two_lines(found, min(width, _BAR_WIDTH)),
    ]
    for place, each in enumerate(worth[: _MANY if everything else _FEW], start=1):
        parts += [Text(), *_opportunity(found, each, place)]
    said = list(notes(found, worth))
    return Group(*parts, *([Text(), *bullets(said)] if said else []))


def rests_on(found: DeviceLedger) -> str:
    """Whose time the ledger is, and what it was made of."""
    kinds = "device" if found.on_device else "host"
    return f"ledger of the {kinds}'s time, {found.ledger.rests_on}"


def worth_showing(
    found: DeviceLedger, *, everything: bool = False
) -> list[Account | DeviceOperator]:
    """The opportunities that are shown, in their order."""
    least = 0 if everything else _WORTH_RATIO * found.ledger.mean_ns
    return [each for each in opportunities(found) if each.gain_ns >= least]


def notes(found: DeviceLedger, shown: list[Account | DeviceOperator]) -> Iterator[str]:
    """Who is late, what is not known of operators, marks, and what the traces lack."""
    yield from [found.late] if found.late else []
    yield from _operator_notes(found, shown)
    yield from (*_marks_note(found), *found.ledger.missing)


def device_ledger_data(found: DeviceLedger, path: Path) -> dict[str, Any]:
    """The same as JSON, with the fields that the ledger of a run has."""
    document = device_document(found)
    return {
        "path": str(path),
        "headline": headline(found),
        "time_line": "device" if found.on_device else "host",
        "world_size": found.world_size,
        **document | {"step": document["step"] | {"mark_ns": found.mark_ns}},
        "problem_count": sum(is_problem(found, each) for each in opportunities(found)),
        "gpu_event_count": found.kernel_count,
        "linked_count": found.linked_count,
    }  # fmt: skip


def opportunities(found: DeviceLedger) -> list[Account | DeviceOperator]:
    """Accounts and operators that could take less time: problems first, the largest gain first."""
    every: list[Account | DeviceOperator] = [*found.ledger.largest()]
    every += [each for each in found.operators if each.gain_ns > 0]
    return sorted(every, key=lambda each: (not is_problem(found, each), -each.gain_ns))


def is_problem(found: DeviceLedger, each: Account | DeviceOperator) -> bool:
    """Whether the step becomes 5 % shorter at least."""
    return each.gain_low_ns >= PROBLEM_RATIO * found.ledger.mean_ns


def headline(found: DeviceLedger) -> str:
    """The largest opportunity, or what the time is spent on where none stands out."""
    ledger, subject = found.ledger, "the GPU" if found.on_device else "the host"
    needed = sum(account.ns_per_step for account in ledger.accounts if account.needed)
    work = f"{subject} {'computes' if found.on_device else 'runs operators for'}"
    largest = next(iter(opportunities(found)), None)
    most = "" if isinstance(largest, DeviceOperator) else _largest_operator(found)
    busy = f"{work} {_share(needed, ledger.mean_ns)} of the step{most}"
    if largest is not None and is_problem(found, largest):
        of = f"of {duration_text(ledger.mean_ns)} a step"
        if isinstance(largest, DeviceOperator):
            return f"{_phrase(found, largest)}: {duration_text(largest.ns_per_step)} {of}"
        said = f"{_phrase(found, largest, subject)}: {duration_text(largest.ns_per_step)} {of}"
        operator = next(iter(each for each in found.operators if 2 * each.gain_ns > largest.gain_ns
                             and each.gain_ns >= PROBLEM_RATIO * ledger.mean_ns), None)  # fmt: skip
        return said if operator is None else f"{said}; {_phrase(found, operator)}"
    gain = largest.gain_ns if largest is not None else 0.0
    what = ""
    if largest is not None:
        what = f"{_phrase(found, largest)}, {_share(largest.ns_per_step, ledger.mean_ns)}"
    if gain >= PROBLEM_RATIO * ledger.mean_ns:
        return f"No problem is certain: {busy}; the largest that may be: {what} of the step"
    if most and (found.peak is None or most.endswith(_UNKNOWN)):
        why = "" if most.endswith(_UNKNOWN) else " without the GPU's peak (--peak)"
        busy = f"{busy[0].upper()}{busy[1:]}; whether that is slow is not known{why}"
    else:
        busy = f"Nothing stands out: {busy}"
    return f"{busy}; largest opportunity: {what} of the step" if what else busy


def _largest_operator(found: DeviceLedger) -> str:
    """The operator that computes most, with what it achieves, for the headline."""
    most = max(found.operators, key=lambda each: each.ns_per_step, default=None)
    if most is None or 2 * most.ns_per_step < found.ledger.mean_ns:
        return ""
    return f", most of it {rates_text(most)}"


def rates_text(each: DeviceOperator) -> str:
    """An operator with what it reaches: `aten::mm bf16 at 31.6 TFLOP/s, 2.4 % of the peak`."""
    name = f"{each.name} {shapes_text(each.shapes)}".strip()
    name = f"{name} {each.precision}" if each.precision else name
    rates = rate_texts(each)
    if not rates:
        return f"{name}{_UNKNOWN}"
    rate, ratio = " and ".join(rates), each.roofline_ratio
    if ratio is None:
        return f"{name} at {rate}"
    if ratio > _IMPOSSIBLE_RATIO:
        return f"{name} at {rate}, more than the GPU can do: shapes, times or peak are wrong"
    of = f"the {each.precision} peak" if each.bound == "compute" else "the memory's bandwidth"
    least = "at least " if each.is_open and each.bound == "memory" else ""
    return f"{name} at {rate}, {least}{ratio_text(ratio)} of {of}"


def rate_texts(each: DeviceOperator) -> list[str]:
    """What an operator reaches of computing, of the memory's bandwidth, or of both."""
    is_matrix, rates = each.kind in OPERATOR_REMEDIES, []
    if each.flops_per_s and (is_matrix or each.bound == "compute"):
        rates.append(f"{each.flops_per_s / 1e12:.3g} TFLOP/s")
    if each.bytes_per_s and not (each.bound == "compute" or (each.is_open and rates)):
        rates.append(f"{each.bytes_per_s / 1e12:.3g} TB/s")
    return rates


def shapes_text(shapes: str | None) -> str:
    """`[4096,4096] x2`: equal shapes that follow each other are written once."""
    plain = _SPACES.sub("", shapes or "").replace("(", "[").replace(")", "]")
    each = [text for text in re.findall(r"\[[\d,]*\]", plain) if text != "[]"]
    runs = [(text, len(list(same))) for text, same in groupby(each)]
    return _short(" ".join(text if count == 1 else f"{text} x{count}" for text, count in runs))


def _operator_notes(found: DeviceLedger, shown: list[Account | DeviceOperator]) -> Iterator[str]:
    """What is not known of operators, small batches, and short kernels."""
    mean = found.ledger.mean_ns
    large = [each for each in found.operators if each.ns_per_step >= PROBLEM_RATIO * mean]
    if found.on_device and large and found.peak is None:
        yield (
            f"how far operators are from the roofline: no peak is known of "
            f"{found.device_name or 'the GPU, which the trace does not name'}; --peak NAME"
        )
    for each in large:
        if each in shown:
            continue
        if is_small_batch(each.kind, each.row_count):
            yield (
                f"{each.name} takes {_share(each.ns_per_step, mean)} of the step for "
                f"{each.row_count:,} rows: a larger batch reads its weights no more often"
            )
        elif (each.roofline_ratio or 0.0) > _IMPOSSIBLE_RATIO:
            yield rates_text(each)
        elif each.flops_per_s is None and each.bytes_per_s is None:
            yield (
                f"{each.name} ({each.kind}) takes {_share(each.ns_per_step, mean)} of the step: "
                "its FLOPs and bytes are not known"
            )
    short, every = (sum(getattr(each, name) for each in found.operators)
                    for name in ("short_count", "kernel_count"))  # fmt: skip
    if every and short >= _MANY_SHORT_RATIO * every and every >= _MANY:
        yield (
            f"{_share(short, every)} of {every:,.0f} kernels a step are shorter than "
            f"{duration_text(SHORT_NS)}: torch.compile fuses them, foreach and fused optimizers too"
        )


def _phrase(found: DeviceLedger, each: Account | DeviceOperator, subject: str = "") -> str:
    """Position, what is done there, by whom, and the code."""
    if isinstance(each, DeviceOperator):
        return rates_text(each)
    remedy = remedy_of(each.activity)
    says = remedy.says if remedy else each.activity
    if subject:
        says = f"{subject} {'is ' if says.startswith('idle') else ''}{says}"
    if each.ranks and len(found.ranks) > 1:
        says = f"{says} on {ranks_text(each.ranks)}"
    return f"{each.position.replace('_', ' ')}: {says}{_at(each)}"


def _at(account: Account) -> str:
    place = account.code_place or account.function
    inner = account.callees[-1] if account.callees else None
    words = [word for word in (place, inner and f"<{_short(inner.strip('<>'))}>") if word]
    return f" ({' '.join(words)})" if words else ""


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"{name[:47]}…"


def _share(part: float, whole: float) -> str:
    return ratio_text(part / whole) if whole else ratio_text(0.0)


def bar_parts(found: DeviceLedger) -> dict[tuple[str, str, str], float]:
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
    ledger, groups = found.ledger, bar_parts(found)
    bar, done, ends = Text(no_wrap=True), 0.0, 0
    numbers = Text("step ", style="")
    numbers.append(duration_text(ledger.mean_ns), style="bold")
    for (name, color, fill), ns in groups.items():
        done += ns
        end = round(done / ledger.mean_ns * width)
        bar.append(fill * (end - ends), style=color)
        ends = end
        inner = kinds_text(found.ledger.accounts, ns) if name in ("computing", "operators") else ""
        numbers.append("  ")
        numbers.append(fill, style=color)
        numbers.append(f" {name} {duration_text(ns)}, {_share(ns, ledger.mean_ns)}{inner}")
    yield bar
    yield numbers


def kinds_text(accounts: tuple[Account, ...], whole: float) -> str:
    """The kinds of work that most of computing is."""
    kinds: dict[str, float] = {}
    for account in accounts:
        if account.needed:
            kind = account.activity.partition(": ")[2]
            kinds[kind] = kinds.get(kind, 0.0) + account.ns_per_step
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:4]
    return f" ({', '.join(f'{kind} {_share(kinds[kind], whole)}' for kind in most)})"


def opportunity_texts(
    found: DeviceLedger, each: Account | DeviceOperator
) -> tuple[str, str, str, str | None]:
    """An opportunity: what and where, its time, the step without it, and what to do."""
    mean = found.ledger.mean_ns
    spread = [duration_text(mean - gain) for gain in (each.gain_high_ns, each.gain_low_ns)]
    between = f" ({spread[0]} to {spread[1]})" if spread[0] != spread[1] else ""
    left = f"{duration_text(mean - each.gain_ns)}{between}"
    if isinstance(each, DeviceOperator):
        do: str | None = operator_remedy(each.kind, each.precision, each.row_count)
        when = f"{count_text(round(each.kernel_count), 'kernel')} a step"
        left = f"at what such operators usually reach {left}"
    else:
        remedy = remedy_of(each.activity)
        do, when, left = remedy.do if remedy else None, each.when, f"without it {left}"
    if len(found.ranks) > 1:
        when += f", the mean of {len(found.ranks)} ranks"
    share = _share(each.ns_per_step, mean)
    time = f"{duration_text(each.ns_per_step)}, {share} of the step, {when}"
    return printable(_phrase(found, each)), time, left, do


def _opportunity(
    found: DeviceLedger, each: Account | DeviceOperator, place: int
) -> Iterator[RenderableType]:
    """An opportunity in three lines."""
    says, time, left, do = opportunity_texts(found, each)
    yield Text.assemble((f"{place}  ", "bold"), says)
    yield Padding(Text(f"{time} → {left}"), (0, 0, 0, INDENT + 1))
    if do:
        yield Padding(Text(f"do: {do}", style="dim"), (0, 0, 0, INDENT + 1))


def _marks_note(found: DeviceLedger) -> Iterator[str]:
    marks, mean = found.mark_ns, found.ledger.mean_ns
    if found.on_device and marks is not None and abs(marks - mean) > _MARKS_DIFFER_RATIO * mean:
        yield (
            f"the profiler's marks are {duration_text(marks)} a step: the host runs ahead of the "
            "device, whose steps end with the last event that they launched"
        )
