"""What `haiprof compare` shows, as words and rows of cells, in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import MISSING, duration_text
from haiprof.diagnosis.compare.comparison import Comparison, caveats
from haiprof.diagnosis.compare.lines import LineChange
from haiprof.diagnosis.compare.step_time import MEAN_STEP, Change, Part
from haiprof.diagnosis.thresholds import COMPARE_P_VALUE
from haiprof.show.flame import PHASE_TITLES
from haiprof.show.frame_table import PageTable, page_table, text_table
from haiprof.show.text import printable, value_text
from haiprof.show.views.blocks import notes_block, one_line, plain_table, section
from haiprof.trace_analysis.diff import KERNEL, NOTHING

_MAIN_RATIO, _ALL_RATIO = 0.5, 0.995
_DIGEST = 12


def headline(found: Comparison) -> str:
    """`12.4 % slower (11.2 to 13.5 %), dataloader +4.9 ms makes 93 % of it`."""
    change = found.change
    if found.state == "undecided":
        known = f" ({_interval(change)})" if change.low_ratio is not None else ""
        measured = f"; measured: {_sign_text(change.ratio - 1)}{known}" if change.ratio > 0 else ""
        return f"cannot be judged: {found.undecided}{measured}"
    low, high = change.low_ratio or change.ratio, change.high_ratio or change.ratio
    if found.state == "same":
        interval = f"{_sign_text(low - 1)} to {_sign_text(high - 1)}"
        return f"no difference found: {_sign_text(change.ratio - 1)} ({interval})"
    ends = sorted(abs(ratio - 1) * 100 for ratio in (low, high))
    text = f"{abs(change.ratio - 1) * 100:.1f} % {found.state} ({ends[0]:.1f} to {ends[1]:.1f} %)"
    return text + _cause(found)


def _cause(found: Comparison) -> str:
    shares = [part for part in found.parts if part.share_ratio is not None and part.is_significant]
    grown = sorted(shares, key=lambda part: -(part.share_ratio or 0.0))[:2]
    if not grown or (grown[0].share_ratio or 0.0) <= 0:
        return ""
    if (grown[0].share_ratio or 0.0) >= _MAIN_RATIO or len(grown) == 1:
        grown = grown[:1]
    return f", {' and '.join(_makes(part) for part in grown)} of it{_main_line(found)}"


def _main_line(found: Comparison) -> str:
    """The line that makes most of the difference, where one does."""
    difference_ns = found.change.difference_ns
    for one in found.lines[:1]:
        if one.difference_ns / difference_ns >= _MAIN_RATIO:
            return f", at {line_name(one)}"
    return ""


def _makes(part: Part) -> str:
    share = part.share_ratio or 0.0
    how_much = "all" if share >= _ALL_RATIO else f"{100 * share:.0f} %"  # others may have shrunk
    return f"{part.name} {_signed_ns(part.difference_ns)} makes {how_much}"


def what_would_decide(found: Comparison) -> str:
    """What to change if it cannot be decided whether a limit is exceeded."""
    if found.change.unknown:
        return "record more steps of both: a longer --time"
    if found.undecided:
        return "record both again while nothing else runs there"
    return (
        "the interval reaches from 0 to beyond the limit: record longer, on a steadier machine, or "
        "allow more"
    )


def step_facts(found: Comparison) -> str:
    """The medians, with the number of steps behind them."""
    change = found.change
    return (
        f"median step {duration_text(change.before_ns)} before, "
        f"{duration_text(change.after_ns)} after; "
        f"{change.before_step_count} and {change.after_step_count} steps after warm-up"
    )


def evaluation_text(found: Comparison) -> str:
    """Evaluation's share in both runs; empty where there was none."""
    ratios = [side.evaluation_ratio for side in (found.before, found.after)]
    if not any(ratios):
        return ""
    old, new = (MISSING if r is None else f"{100 * r:.1f} %" for r in ratios)
    return f"evaluation beside the steps: {old} of the time before, {new} after"


def part_table(found: Comparison) -> PageTable:
    """The parts of a step, the largest difference first."""
    claimed = found.state in ("slower", "faster")
    parts = [part for part in found.parts if part.before_ns or part.after_ns]
    rows = [
        (
            part_name(part), duration_text(part.before_ns), duration_text(part.after_ns),
            _signed_ns(part.difference_ns),
            f"{_signed_ns(part.low_ns)} to {_signed_ns(part.high_ns)}",
            *((_share(part),) if claimed else ()),
        )
        for part in parts
    ]  # fmt: skip
    head = ("", "before", "after", "difference", "interval", *(("share",) if claimed else ()))
    return text_table(
        "What a step is made of; dim: not beyond chance", head, rows, left=("", "interval"),
        faint=[number for number, part in enumerate(parts) if not part.is_significant],
    )  # fmt: skip


def line_table(found: Comparison) -> PageTable:
    """Lines of user code whose time per step changed."""
    rows = [
        (
            line_name(one), PHASE_TITLES.get(one.phase, one.phase),
            duration_text(one.before_ns) if one.before_sample_count else MISSING,
            duration_text(one.after_ns) if one.after_sample_count else MISSING,
            _signed_ns(one.difference_ns),
            f"{_signed_ns(one.low_ns)} to {_signed_ns(one.high_ns)}",
        )
        for one in found.lines
    ]  # fmt: skip
    head = ("line", "phase", "before", "after", "difference", "interval")
    return text_table(
        "Lines of your code whose time per step changed beyond chance", head, rows,
        left=("line", "phase", "interval"),
    )  # fmt: skip


def line_name(one: LineChange) -> str:
    """`train.py:24 metric`, with the line in the new run where it is there."""
    line = one.before_line if one.after_line is None else one.after_line
    gone = " (before)" if one.after_line is None else ""
    return printable(f"{one.file.rpartition('/')[2]}:{line} {one.function}{gone}")


def rank_table(found: Comparison) -> PageTable:
    """Ranks that changed on their own."""
    moved = [one for one in found.ranks if one.change.is_slower or one.change.is_faster]
    rows = [
        (
            str(one.rank), duration_text(one.change.before_ns), duration_text(one.change.after_ns),
            _sign_text(one.change.ratio - 1), _interval(one.change),
        )
        for one in moved
    ]  # fmt: skip
    head = ("rank", "before", "after", "ratio", "interval")
    title = f"Ranks that changed beyond chance: {len(moved)}"
    return text_table(title, head, rows, left=("interval",))


def counter_table(found: Comparison) -> PageTable:
    """Counters that differ, the largest difference first."""
    rows = [
        (
            printable(f"{one.source} {one.metric}"), value_text(one.before, one.unit),
            value_text(one.after, one.unit),
        )
        for one in found.counters
    ]  # fmt: skip
    title = "Counters that differ beyond chance (medians over the run)"
    return text_table(title, ("counter", "before", "after"), rows, left=("counter",))


def kernel_table(found: Comparison, *, limit: int) -> PageTable | None:
    """What differs between the traced steps; None where they could not be compared."""
    if found.kernels is None:
        return None
    names = found.kernels.names.filter(pl.col("adjusted_p_value") <= COMPARE_P_VALUE)
    if names.filter((pl.col("of") == KERNEL) & (pl.col("name") != NOTHING[KERNEL])).is_empty():
        names = names.filter(pl.col("of") != KERNEL)  # without a kernel, no idle time
    columns = (("of", ""), ("name", "name"), ("control_ns", "before"), ("test_ns", "after"),
               ("difference_ns", "difference"), ("adjusted_p_value", "p"))  # fmt: skip
    return page_table("Traced steps: what differs beyond chance", names, columns, limit=limit)


def around_table(found: Comparison) -> PageTable:
    """Command, code, packages, variables, machine: only what differs."""
    rows = [
        (one.kind, printable(one.name), _value(one.before), _value(one.after))
        for one in found.differs
    ]
    head = ("", "what", "before", "after")
    return text_table("What differs around the runs", head, rows, left=head)


def part_name(part: Part) -> str:
    """A part's name, with its clock or statistic if that is not the usual one."""
    if part.statistic == "mean":
        return part.name if part.name == MEAN_STEP else f"{part.name}, mean"
    return part.name if part.clock == "host" else f"{part.name}, device"


def _share(part: Part) -> str:
    return "" if part.share_ratio is None else f"{100 * part.share_ratio:.0f} %"


def _interval(change: Change) -> str:
    if change.low_ratio is None or change.high_ratio is None:
        return MISSING
    return f"{_sign_text(change.low_ratio - 1)} to {_sign_text(change.high_ratio - 1)}"


def _sign_text(ratio: float) -> str:
    return f"{ratio * 100:+.1f} %"


def _signed_ns(ns: float) -> str:
    return f"+{duration_text(ns)}" if ns > 0 else duration_text(ns)


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if value is None:
        return MISSING
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    is_digest = len(text) in (16, 40, 64) and set(text) <= set("0123456789abcdef")
    return printable(text[:_DIGEST] if is_digest else text)


_STYLES = {"slower": "bold red", "faster": "bold green", "same": "bold", "undecided": "bold yellow"}
_SHOWN_PARTS, _SHOWN_LINES, _SHOWN_RANKS, _SHOWN_COUNTERS = 8, 6, 4, 6
_SHOWN_KERNELS, _SHOWN_AROUND = 5, 12


def compare_view(found: Comparison, *, chosen: str = "") -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = [
        Text(headline(found), style=_STYLES[found.state]),
        Text(step_facts(found), style="dim"),
        one_line(f"baseline: {found.before.path}", style="dim"),
        one_line(f"new run: {found.after.path}", style="dim"),
    ]
    if chosen:
        parts.append(Text(printable(f"chosen: {chosen}"), style="dim"))
    parts += _blocks(found)
    notes = [*caveats(found), *found.unknown]
    if notes:
        parts.append(notes_block(notes))
    return Group(*parts)


def _blocks(found: Comparison) -> Iterator[RenderableType]:
    evaluation = evaluation_text(found)
    lines = [Text(evaluation)] if evaluation else []
    yield from _block(part_table(found), _SHOWN_PARTS, *lines)
    yield from _block(line_table(found), _SHOWN_LINES)
    yield from _block(rank_table(found), _SHOWN_RANKS)
    yield from _block(counter_table(found), _SHOWN_COUNTERS)
    kernels = kernel_table(found, limit=_SHOWN_KERNELS)
    if kernels is not None and not kernels.rows:
        yield section("Traced steps", Text("nothing differs beyond chance", style="dim"))
    elif kernels is not None:
        yield from _block(kernels, _SHOWN_KERNELS, where="haiprof trace-diff", folded=("name",))
    around = around_table(found)
    if around.rows:
        yield from _block(around, _SHOWN_AROUND, folded=("before", "after"))
    else:
        yield section("Around the runs", Text("nothing that was recorded differs", style="dim"))


def _block(
    table: PageTable, limit: int, *below: RenderableType, where: str = "--json",
    folded: Sequence[str] = (),
) -> Iterator[RenderableType]:  # fmt: skip
    """Its first rows, and how many more there are; nothing where it is empty."""
    if not table.rows:
        return
    left = [name for name, is_text in zip(table.head, table.is_text, strict=True) if is_text]
    shown = plain_table(*table.head, left=left)
    for column, name in zip(shown.columns, table.head, strict=True):
        if name in folded:
            column.no_wrap, column.overflow, column.min_width = False, "fold", 16
    cut = set(left) - set(folded)
    for number, row in enumerate(table.rows[:limit]):
        pairs = zip(row, table.head, strict=True)
        cells = [one_line(cell) if head in cut else Text(cell) for cell, head in pairs]
        shown.add_row(*cells, style="dim" if number in table.faint else "")
    more = len(table.rows) + table.more - limit
    rest = [Text(f"and {more} more, in {where}", style="dim")] if more > 0 else []
    yield section(table.title, shown, *rest, *below)


def compare_data(found: Comparison, *, chosen: str = "") -> dict[str, Any]:
    """The same for scripts, whole; docs/compare.md describes the fields."""
    change = found.change
    return {
        "version": 1,
        "verdict": {"state": found.state, "text": headline(found),
                    "undecided": found.undecided},
        "baseline": {"path": str(found.before.path), "chosen": chosen or None},
        "run": {"path": str(found.after.path)},
        "step_time": {**asdict(change), "difference_ns": change.difference_ns},
        "parts": [
            {**asdict(part), "difference_ns": part.difference_ns,
             "is_significant": part.is_significant} for part in found.parts
        ],
        "evaluation_ratio": [found.before.evaluation_ratio, found.after.evaluation_ratio],
        "lines": [
            {**asdict(one), "difference_ns": one.difference_ns} for one in found.lines
        ],
        "no_lines": found.no_lines or None,
        "ranks": [{"rank": one.rank, **asdict(one.change)} for one in found.ranks],
        "counters": [asdict(one) for one in found.counters],
        "load": [asdict(load) for load in found.loads],
        "kernels": None if found.kernels is None else found.kernels.names.to_dicts(),
        "no_kernels": found.no_kernels or None,
        "differs": [asdict(one) for one in found.differs],
        "caveats": list(caveats(found)),
        "unknown": list(found.unknown),
    }  # fmt: skip
