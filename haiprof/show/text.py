"""Values and times as people read them, by their unit; what Markdown consists of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from haiprof.base import units

_SCALES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def prefix_text(value: float) -> str:
    """`3.20 T`, before a unit; three digits, and 1,000 of a prefix is one of the next."""
    size, prefix = next((each for each in _SCALES if value >= 0.9995 * each[0]), (1.0, ""))
    return f"{units.digits_text(value / size)} {prefix}"


def flops_text(flops: float) -> str:
    """`3.20 TFLOP`."""
    return f"{prefix_text(flops)}FLOP"


_TEXTS = {
    "ns": units.duration_text, "bytes": units.bytes_text, "bytes/s": units.rate_text,
    "bytes_per_s": units.rate_text, "ratio": units.ratio_text, "prefix": prefix_text,
}  # fmt: skip
_LINE = 2000  # Maximum number of characters on one line of a terminal
_SYMBOLS = {"watts": "W", "count": "", "celsius": "°C", "hz": "Hz", "times": "x"}


def value_text(value: float | None, unit: str) -> str:
    """A value with its unit, such as `"12.3 ms"`, `"1.50 GiB"`, `"37 %"`; missing as a dash."""
    if value is None:
        return units.MISSING
    if value == 0 and unit == "ns":
        return "0 s"
    if unit in _TEXTS:
        return _TEXTS[unit](value)
    if unit == "count" and value == int(value):
        value = int(value)
    return f"{units.number_text(value)} {_SYMBOLS.get(unit, unit)}".rstrip()


def printable(text: str) -> str:
    """Text from a trace on one line, safe for a terminal, and possibly truncated."""
    return units.visible(" ".join(text[:_LINE].split()))


def share_text(part: float | None, whole: float) -> str:
    """A part of a whole as percent; missing as a dash."""
    return units.ratio_text(part / whole if part is not None and whole else None)


def fine_ratio_text(ratio: float | None) -> str:
    """A small ratio as percent, two digits of it: `"0.017 %"`; missing as a dash."""
    if ratio is None or not 0 < ratio < 0.01:
        return units.ratio_text(ratio)
    return f"{ratio * 100:.2g} %"


def moment_text(wall_ns: int | None) -> str:
    """A Unix time in the reader's time zone: `"2026-11-21 13:04:15"`; missing as a dash."""
    if wall_ns is None:
        return units.MISSING
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(wall_ns / units.NS_PER_S))


def steps_text(step_count: int, rank_count: int) -> str:
    """`"2 ranks · 200 steps each"`; where they differ, `"2 ranks · 401 steps together"`."""
    ranks = count_text(rank_count, "rank")
    if rank_count < 2:
        return f"{ranks} · {count_text(step_count, 'step')}"
    each, rest = divmod(step_count, rank_count)
    if rest or not each:
        return f"{ranks} · {count_text(step_count, 'step')} together"
    return f"{ranks} · {count_text(each, 'step')} each"


def count_text(count: int, noun: str) -> str:
    """`"1 rank"`, `"2 ranks"`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def by_reason(missing: Mapping[str, str]) -> list[tuple[str, str]]:
    """(what, why), with all that is missing for one reason together."""
    titles: dict[str, list[str]] = {}
    for title, reason in missing.items():
        titles.setdefault(reason, []).append(title)
    return [(", ".join(names), reason) for reason, names in titles.items()]


PHASE_TITLES = {
    "other": "outside the model",
    "worker": "DataLoader workers, loading",
    "worker_waiting": "DataLoader workers, waiting",
    "other_threads": "other Python threads",
}
"""Phases of samples whose names do not say what they are."""
_MARKS = "\\`*_[]<>|#~"


def markdown_text(text: str | None) -> str:
    """Text in Markdown: no markup, no new line."""
    kept = printable(text or units.MISSING)
    for mark in _MARKS:
        kept = kept.replace(mark, f"\\{mark}")
    return kept


def markdown_code(text: str | None) -> str:
    """Text between backticks: none in it."""
    return printable(text or "").replace("`", "'")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of one table; cells are text."""
    lines = [head, ["---"] * len(head), *([markdown_text(c) if c else "" for c in r] for r in rows)]
    return [f"| {' | '.join(cells)} |" for cells in lines]
