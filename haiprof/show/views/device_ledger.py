"""What `haiprof verdict` shows of traces: the ledger of the device's time, and what would help."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from haiprof.base.code_places import place_text
from haiprof.base.ledger import PROBLEM_RATIO, Account, position_words
from haiprof.base.units import digits_text, duration_text, ranks_text, ratio_text, shorten
from haiprof.show.figures.style import BLUE, DARK_GREY, GREY, ORANGE, PURPLE, SKY, YELLOW
from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import INDENT, bullets
from haiprof.trace_analysis.device_ledger import (
    CONVERSIONS,
    HOST_OPERATORS_REMEDY,
    OPERATOR_REMEDIES,
    is_small_batch,
    operator_remedy,
    remedy_of,
)
from haiprof.trace_analysis.device_verdict import (
    DeviceLedger,
    DeviceOperator,
    Opportunity,
    UnevenOperator,
    device_document,
)
from haiprof.trace_analysis.host_activity import parse_place
from haiprof.trace_analysis.operator_efficiency import SHORT_NS

_FEW = 3
_MANY = 20
_BAR_WIDTH, _NAME_WIDTH = 80, 48
_WORTH_RATIO, _HOST_WORTH_RATIO = 0.002, 0.01
"""Of a step, on a device and on a host: a smaller opportunity is shown with --all alone."""
_GROUPS = (
    ("computing", "compute: ", SKY, "█"),
    ("operators", "operators: ", SKY, "█"),
    ("waiting for peers", "wait: peer", YELLOW, "▚"),
    ("communicating", "link: ", PURPLE, "▓"),
    ("communicating", "communication: ", PURPLE, "▓"),
    ("copying", "copy: ", ORANGE, "▒"),
    ("idle, host late", "idle: ", GREY, "░"),
    ("python", "python", BLUE, "▓"),
    ("waiting for input", "wait: loader", YELLOW, "▚"),
    ("waiting", "wait: ", ORANGE, "▒"),
    ("outside of operators", "outside operators", GREY, "░"),
    ("other", "", GREY, "░"),
)
"""Parts of the bar: name, what begins its activities, colour, and filling without colours."""
_GAPS = ("between kernels", "idle: between kernels", DARK_GREY, "·")
_SPACES = re.compile(r"\s+")
_IMPOSSIBLE_RATIO = 1.05  # What is so far above the roofline was not recorded right
_NEAR_RATIO = 0.3
"""Above it products of fp32 are as fast as they get without tensor cores, which is then said."""
_UNKNOWN = ", whose FLOPs and bytes are not known"
_MANY_SHORT_RATIO = 0.5
_LARGE_RATIO = 0.1
_UNEVEN = (
    "give every rank as much work: balance tokens over experts, sequence lengths over ranks, "
    "layers over stages",
    "the same work on a slower GPU: compare its clocks, power and temperature with the others' "
    "(haiprof preflight), and leave it out",
)
_FULL_LAST_RATIO, _LITTLE_FILL_RATIO = 0.9, 0.25
_HOST_BOUND = ("launch_bound", "host_python")
"""Explanations of idle time that larger work for each launch would fill."""
_LAUNCH_GAPS = ("launch_bound", "kernel_gaps")
"""Explanations of idle time that comes with each launch."""
_MARKS_DIFFER_RATIO = 0.05
"""From this share on it is said that the host's marks are longer or shorter than the steps."""


def device_ledger_view(
    found: DeviceLedger, name: str, *, width: int, everything: bool = False
) -> RenderableType:
    """The whole view of what is found in `name`; on request all opportunities."""
    title, worth = f"{name}: {rests_on(found)}", worth_showing(found, everything=everything)
    parts: list[RenderableType] = [
        Text(printable(headline(found)), style="bold"),
        *damage_lines(found.damage),
        Text(printable(title), style="dim"),
        Text(),
        *_two_lines(found, min(width, _BAR_WIDTH)),
        *_host_operators(found, _MANY if everything else _FEW),
    ]
    for place, each in enumerate(worth[: _MANY if everything else _FEW], start=1):
        says, time, left, do = opportunity_texts(found, each)
        parts += [Text(), Text.assemble((f"{place}  ", "bold"), says)]
        below = [Text(f"{time} → {left}"), *([Text(f"do: {do}", style="dim")] if do else [])]
        parts += [Padding(line, (0, 0, 0, INDENT + 1)) for line in below]
    said = list(notes(found, worth))
    return Group(*parts, *([Text(), *bullets(said)] if said else []))


def damage_lines(damage: Sequence[str]) -> list[Text]:
    """What of the files could not be read: it decides what the numbers beside it are worth."""
    return [Text(printable(note), style="yellow") for note in damage]


def rests_on(found: DeviceLedger) -> str:
    """Whose time the ledger is, and what it was made of."""
    kinds = "device" if found.on_device else "host"
    return f"ledger of the {kinds}'s time, {found.ledger.rests_on}"


def worth_showing(found: DeviceLedger, *, everything: bool = False) -> list[Opportunity]:
    """The opportunities that are shown, in their order."""
    ratio = _WORTH_RATIO if found.on_device else _HOST_WORTH_RATIO
    least = 0 if everything else ratio * found.ledger.mean_ns
    return [each for each in opportunities(found) if each.gain_ns >= least]


def notes(found: DeviceLedger, shown: list[Opportunity]) -> Iterator[str]:
    """Who is late, what is not known of operators, marks, and what the traces lack."""
    yield from [found.late] if found.late else []
    yield from _operator_notes(found, shown)
    marks, mean = found.mark_ns, found.ledger.mean_ns
    if found.on_device and marks is not None and abs(marks - mean) > _MARKS_DIFFER_RATIO * mean:
        yield (
            f"the profiler's marks are {duration_text(marks)} a step: the host runs ahead of the "
            "device, whose steps end with the last event that they launched"
        )
    yield from found.ledger.missing


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


def opportunities(found: DeviceLedger) -> list[Opportunity]:
    """Accounts and operators that could take less time: problems first, the largest gain first."""
    every: list[Opportunity] = [*found.ledger.largest()]
    every += [*(each for each in found.operators if each.gain_ns > 0), *found.uneven]
    return sorted(every, key=lambda each: (not is_problem(found, each), -each.gain_ns))


def is_problem(found: DeviceLedger, each: Opportunity) -> bool:
    """Whether the step becomes 5 % shorter at least."""
    return each.gain_low_ns >= PROBLEM_RATIO * found.ledger.mean_ns


def headline(found: DeviceLedger) -> str:
    """The largest opportunity, or what the time is spent on where none stands out."""
    mean, subject = found.ledger.mean_ns, "the GPU" if found.on_device else "the host"
    needed = sum(account.ns_per_step for account in found.ledger.accounts if _works(account))
    does = "computes" if found.on_device else "runs operators for"
    busy = f"{subject} {does} {_share(needed, mean)} of the step"
    for each in found.host_operators[:1]:
        busy += f", the longest {_host_operator(found, *each)}"
    ranked = opportunities(found)
    first = ranked[0] if ranked and (found.on_device or worth_showing(found)) else None
    most = next((each for each in found.operators if 2 * each.ns_per_step >= mean), None)
    if first is not None and is_problem(found, first):
        large = (each for each in ranked[1:] if is_problem(found, each) and _is_large(found, each))
        parts = [first, *islice((each for each in large if type(each) is not type(first)), 1)]
        is_host_bound = getattr(first, "explanation", None) in _HOST_BOUND
        small = _small_batch(found) if is_host_bound and _is_large(found, first) else None
        said = [f"{_phrase(found, each, subject)}: {duration_text(each.ns_per_step)}"
                for each in parts if each is not small]  # fmt: skip
        if small is not None:
            rows = f"{small.row_count:,} row{'s' if small.row_count != 1 else ''}"
            said.insert(0, f"{_name(small)} works on {rows} a call, a small batch: "
                           f"{duration_text(small.ns_per_step)}")  # fmt: skip
        elif most is not None and not rate_texts(most) and not _is_large(found, first):
            said.insert(0, f"{rates_text(most)}: {duration_text(most.ns_per_step)}")
        return "; ".join([f"{said[0]} of {duration_text(mean)} a step", *said[1:]])
    if most is not None:
        return _of_one_operator(found, most, first, busy)
    if first is None:
        return f"Nothing stands out: {busy}"
    largest = f"{_phrase(found, first)}, {_share(first.ns_per_step, mean)} of the step"
    if first.gain_ns >= PROBLEM_RATIO * mean:
        return f"No problem is certain: {busy}; the largest that may be: {largest}"
    return f"Nothing stands out: {busy}; largest opportunity: {largest}"


def _of_one_operator(
    found: DeviceLedger, most: DeviceOperator, first: Opportunity | None, busy: str
) -> str:
    """What is said where no problem is certain and one operator takes half of the step, or more."""
    mean, ratio, other = found.ledger.mean_ns, most.roofline_ratio, ""
    if first is not None and first is not most:
        share = _share(first.ns_per_step, mean)
        other = f"; largest opportunity: {_phrase(found, first)}, {share} of the step"
    if ratio is None:
        why = "" if found.peak is not None or not rate_texts(most) else (
            " without the GPU's peak (--peak)"
        )  # fmt: skip
        return (
            f"{busy[0].upper()}{busy[1:]}, most of it {rates_text(most)}; "
            f"whether that is slow is not known{why}{other}"
        )
    said = f"{rates_text(most)}: {duration_text(most.ns_per_step)} of {duration_text(mean)} a step"
    if ratio > _IMPOSSIBLE_RATIO:
        return f"{said}{other}"
    if most.gain_ns >= PROBLEM_RATIO * mean:
        usual = duration_text(most.ns_per_step - most.gain_ns)
        return f"{said}, where such operators usually take {usual}: no problem is certain{other}"
    if is_small_batch(most.kind, most.row_count) and most.bound == "memory":
        few = f"{most.row_count:,} row{'s' if most.row_count != 1 else ''}"
        return f"{said}: a small batch, whose weights are read for {few} a call{other}"
    return f"{said}, as fast as such operators usually are: nothing stands out{other}"


def _works(account: Account) -> bool:
    """Whether it is work of the model, or what converts its tensors."""
    return account.needed or account.activity in CONVERSIONS


def _is_large(found: DeviceLedger, each: Opportunity) -> bool:
    """Whether it belongs into the headline, beside others or in front of them."""
    return each.gain_ns >= _LARGE_RATIO * found.ledger.mean_ns


def _small_batch(found: DeviceLedger) -> DeviceOperator | None:
    """The operator that most of computing is, where it has too few rows for its weights."""
    most = max(found.operators, key=lambda each: each.ns_per_step, default=None)
    whole = sum(each.ns_per_step for each in found.operators)
    if most is None or 2 * most.ns_per_step < whole:
        return None
    return most if is_small_batch(most.kind, most.row_count) else None


def _name(each: DeviceOperator) -> str:
    """An operator with its shapes and precision."""
    name = f"{each.name} {shapes_text(each.shapes)}".strip()
    return f"{name} {each.precision}" if each.precision else name


def rates_text(each: DeviceOperator) -> str:
    """An operator with what it reaches: `aten::mm bf16 at 31.6 TFLOP/s, 2.4 % of the peak`."""
    name, rates = _name(each), rate_texts(each)
    if not rates:
        return f"{name}{_UNKNOWN}"
    rate, ratio = " and ".join(rates), each.roofline_ratio
    if ratio is None:
        return f"{name} at {rate}"
    if ratio > _IMPOSSIBLE_RATIO:
        return f"{name} at {rate}, more than the GPU can do: shapes, times or peak are wrong"
    of = f"the {each.precision} peak" if each.bound == "compute" else "the memory's bandwidth"
    near = f"{each.estimate} " if each.estimate and each.bound == "memory" else ""
    is_bare = each.tensor_ratio and each.bound == "compute" and ratio > _NEAR_RATIO
    bare = f", {ratio_text(each.tensor_ratio or 0.0)} of the tf32 peak" if is_bare else ""
    return f"{name} at {rate}, {near}{ratio_text(ratio)} of {of}{bare}"


def rate_texts(each: DeviceOperator) -> list[str]:
    """What an operator reaches of computing, of the memory's bandwidth, or of both."""
    is_matrix, rates = each.kind in OPERATOR_REMEDIES, []
    if each.flops_per_s and (is_matrix or each.bound == "compute"):
        rates.append(f"{digits_text(each.flops_per_s / 1e12)} TFLOP/s")
    if each.bytes_per_s and not (each.bound == "compute" or (each.estimate and rates)):
        rates.append(f"{digits_text(each.bytes_per_s / 1e12)} TB/s")
    return rates


def shapes_text(shapes: str | None) -> str:
    """`[4096,4096] x2`: equal shapes that follow each other are written once."""
    plain = _SPACES.sub("", shapes or "").replace("(", "[").replace(")", "]")
    each = [text for text in re.findall(r"\[[\d,]*\]", plain) if text != "[]"]
    runs = [(text, len(list(same))) for text, same in groupby(each)]
    return shorten(" ".join(text if n == 1 else f"{text} x{n}" for text, n in runs), _NAME_WIDTH)


def _operator_notes(found: DeviceLedger, shown: list[Opportunity]) -> Iterator[str]:
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
        if (each.roofline_ratio or 0.0) > _IMPOSSIBLE_RATIO:
            yield rates_text(each)
        if each.flops_per_s is None and each.bytes_per_s is None:
            yield (
                f"{each.name} ({each.kind}) takes {_share(each.ns_per_step, mean)} of the step: "
                "its FLOPs and bytes are not known"
            )
    short, every, ns = (
        sum(getattr(each, name) for each in found.operators)
        for name in ("short_count", "kernel_count", "short_ns_per_step")
    )
    ns += sum(row.ns_per_step for row in found.ledger.accounts if row.explanation in _LAUNCH_GAPS)
    if every >= _MANY and short >= _MANY_SHORT_RATIO * every and ns >= PROBLEM_RATIO * mean:
        yield (
            f"{_share(short, every)} of {every:,.0f} kernels a step are shorter than "
            f"{duration_text(SHORT_NS)}; they and the gaps for launches take {_share(ns, mean)} of "
            "the step: torch.compile fuses them, foreach and fused optimizers too"
        )


def _phrase(found: DeviceLedger, each: Opportunity, subject: str = "") -> str:
    """Position, what is done there, by whom, and the code."""
    if isinstance(each, DeviceOperator):
        small = is_small_batch(each.kind, each.row_count) and each.bound == "memory"
        return f"{rates_text(each)}{f', a small batch of {each.row_count:,}' if small else ''}"
    if isinstance(each, UnevenOperator):
        own, others = duration_text(each.own_ns), duration_text(each.others_ns)
        why = "for the same calls" if each.is_same_work else "with more or larger calls"
        late = f"rank {each.rank} is waited for"
        return f"{late}: {each.name} takes {own} there {why}, {others} elsewhere"
    remedy = remedy_of(each.activity)
    says = remedy.says if remedy else each.activity
    if subject:
        says = f"{subject} {'is ' if says.startswith('idle') else ''}{says}"
    if each.ranks and len(found.ranks) > 1:
        says = f"{says} on {ranks_text(each.ranks)}"
    return f"{position_words(each.position)}: {says}{_at(each)}"


def _at(account: Account) -> str:
    place = account.code_place or account.function
    inner = shorten(account.callees[-1].strip("<>"), _NAME_WIDTH) if account.callees else ""
    words = [word for word in (place, inner and f"<{inner}>") if word]
    if account.position == "backward" and account.file is None and "backward" not in (place or ""):
        words[:0] = ["backward of"] if words else []  # a range of forward, to which it belongs
    return f" ({' '.join(words)})" if words else ""


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
    if len(found.ranks) > 1:
        numbers.append(f" (mean of {len(found.ranks)} ranks)", style="dim")
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


def _host_operators(found: DeviceLedger, limit: int) -> Iterator[RenderableType]:
    """The operators that take most of a step on a CPU, and what to do where they are most of it."""
    longest = found.host_operators[:limit]
    if not longest:
        return
    said = " · ".join(_host_operator(found, *each) for each in longest)
    yield Text(printable(f"operators  {said}"))
    needed = sum(each.ns_per_step for each in found.ledger.accounts if each.needed)
    if 2 * needed >= found.ledger.mean_ns:
        yield Padding(Text(f"do: {HOST_OPERATORS_REMEDY}", style="dim"), (0, 0, 0, INDENT + 1))


def _host_operator(found: DeviceLedger, name: str, code: str | None, ns: float) -> str:
    file, line, function = parse_place(code or "")
    where = place_text(file, line, function) if file else function
    place = f" ({where})" if where else ""
    return f"{name}{place} {duration_text(ns)}, {_share(ns, found.ledger.mean_ns)}"


def kinds_text(accounts: tuple[Account, ...], whole: float) -> str:
    """The kinds of work that most of computing is."""
    kinds: dict[str, float] = {}
    for account in accounts:
        if _works(account):
            kind = account.activity.partition(": ")[2]
            kinds[kind] = kinds.get(kind, 0.0) + account.ns_per_step
    most = sorted(kinds, key=lambda kind: -kinds[kind])[:4]
    return f" ({', '.join(f'{kind} {_share(kinds[kind], whole)}' for kind in most)})"


def opportunity_texts(found: DeviceLedger, each: Opportunity) -> tuple[str, str, str, str | None]:
    """An opportunity: what and where, its time, the step without it, and what to do."""
    mean = found.ledger.mean_ns
    spread = [duration_text(mean - gain) for gain in (each.gain_high_ns, each.gain_low_ns)]
    between = f" ({spread[0]} to {spread[1]})" if spread[0] != spread[1] else ""
    left = f"{duration_text(mean - each.gain_ns)}{between}"
    if isinstance(each, DeviceOperator):
        do: str | None = operator_remedy(each.kind, each.precision, each.row_count)
        kernels = f"{count_text(round(each.kernel_count), 'kernel')} a step"
        when = ", ".join((kernels, *launch_texts(each)))
        left = f"at what such operators usually reach {left}"
    elif isinstance(each, UnevenOperator):
        do, when = _UNEVEN[each.is_same_work], f"on rank {each.rank}"
        left = f"as on the others {left}"
    else:
        remedy = remedy_of(each.activity)
        do, when, left = remedy.do if remedy else None, each.when, f"without it {left}"
    if len(found.ranks) > 1 and not isinstance(each, UnevenOperator):
        when += f", the mean of {len(found.ranks)} ranks"
    share = _share(each.ns_per_step, mean)
    time = f"{duration_text(each.ns_per_step)}, {share} of the step, {when}"
    return printable(_phrase(found, each)), time, left, do


def launch_texts(each: DeviceOperator) -> Iterator[str]:
    """What of its longest kernel's launch leaves the GPU unused."""
    blocks, waves, fill = each.blocks_per_sm, each.waves, each.occupancy_ratio
    if blocks is not None and blocks < 1:
        yield f"blocks for {ratio_text(blocks)} of the multiprocessors"
    elif waves is not None and 1 < waves <= _FULL_LAST_RATIO * math.ceil(waves):
        share = ratio_text(waves - math.floor(waves))
        yield f"{waves:.1f} waves of blocks, the last one {share} full"
    if fill is not None and fill < _LITTLE_FILL_RATIO and (blocks is None or blocks >= 1):
        yield f"occupancy {ratio_text(fill)}"
