"""Unit constants, and base units turned into text for people."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000
BYTES_PER_GIB = 1 << 30

MISSING = "\N{EN DASH}"  # what a person sees where a value is missing; never 0
_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

SPACES = "\n\t\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}"
"""Categories of characters that could control a terminal."""


def visible(text: str, *, keep: str = "") -> str:
    """Text without characters that control a terminal or reverse the direction of writing.

    Control characters (escape sequences begin with one), format characters such as U+202E, and
    bytes that are no text (surrogates) are shown as U+FFFD.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else "\ufffd" for c in text)


def shorten(text: str, limit: int = 160) -> str:
    """A text that may be cut, and shows it."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


_SOURCE_PLACE = re.compile(
    r"\[(?:enforce fail at )?[^\]\s]+\.(?:cc|cpp|cu|h):\d+\](?: \.)? ?|(?<=error) in: \S+:\d+(?=,)"
)
"""`[enforce fail at alloc_cpu.cpp:127] `, `[/x/pair.cc:553] `, `NCCL error in: /x/y.cpp:1970`."""


def without_source_places(text: str) -> str:
    """Without the places in C++ sources that torch, gloo and NCCL put before what they say."""
    return _SOURCE_PLACE.sub("", text)


def digits_text(value: float) -> str:
    """Three significant digits, never an exponent: `"412"`, `"37.0"`, `"0.0811"`.

    The page's own script has the same rules: `show/page/static/units.js`.
    """
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{min(6, max(0, 2 - exponent))}f}" if value else "0"


def number_text(value: float | None) -> str:
    """A count or what is like one, two decimals at most: `"412"`, `"0.40"`; missing as a dash."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value}"
    return f"{value:.2f}" if abs(value) < 0.9995 else digits_text(value)


def duration_text(ns: float | None) -> str:
    """A duration in ns as text with three significant digits: `"12.3 ms"`; missing as a dash."""
    if ns is None or math.isnan(ns):
        return MISSING
    if ns == 0:
        return "0 s"
    for limit, scale, unit in ((1e3, 1, "ns"), (1e6, 1e3, "µs"), (1e9, 1e6, "ms")):
        if abs(ns) < limit * 0.9995:
            return f"{digits_text(ns / scale)} {unit}"
    seconds = ns / NS_PER_S
    if seconds < 600:
        return f"{digits_text(seconds)} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def later_text(ns: float) -> str:
    """`25.0 s later`, of something that came after; `at once` within a second."""
    return "at once" if ns < NS_PER_S else f"{duration_text(ns)} later"


def bytes_text(count: float | None) -> str:
    """A number of bytes as text in binary units: `"1.50 GiB"`; missing as a dash."""
    if count is None:
        return MISSING
    value = float(count)
    for unit in _BYTE_UNITS:
        if abs(value) < 1024 or unit == _BYTE_UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{digits_text(value)} {unit}"


def rate_text(bytes_per_s: float | None) -> str:
    """A rate in bytes per second as text: `"12.0 MiB/s"`; missing as a dash."""
    return MISSING if bytes_per_s is None else f"{bytes_text(bytes_per_s)}/s"


def ratio_text(ratio: float | None) -> str:
    """A ratio in [0, 1] as percent: `"37 %"`, `"0.4 %"`; missing as a dash."""
    if ratio is None:
        return MISSING
    percent = ratio * 100
    return f"{percent:.1f} %" if abs(percent) < 9.95 else f"{percent:.0f} %"


def ranks_text(ranks: Collection[int], one: str = "", many: str = "") -> str:
    """`rank 3`, `ranks 0 and 1`, `ranks 0, 2-7 and 9`; then a verb of one or of many."""
    verb = f" {one if len(ranks) == 1 else many}" if one else ""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    parts: list[str] = []
    for span in spans:
        parts += [f"{span[0]}-{span[-1]}"] if len(span) > 2 else map(str, span)
    if len(parts) == 1:
        return f"rank{'s' * ('-' in parts[0])} {parts[0]}{verb}"
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}{verb}"
