"""What `haiprof compare` shows: the claim in one line, what makes it, what differs around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.diagnosis.compare.comparison import Comparison, caveats
from haiprof.show.page.tables import PageTable
from haiprof.show.tables import compare as rows
from haiprof.show.text import printable
from haiprof.show.views.blocks import notes_block, one_line, plain_table, section

_STYLES = {"slower": "bold red", "faster": "bold green", "same": "bold", "undecided": "bold yellow"}
_SHOWN_PARTS, _SHOWN_LINES, _SHOWN_RANKS, _SHOWN_COUNTERS = 8, 6, 4, 6
_SHOWN_KERNELS, _SHOWN_AROUND = 5, 12


def compare_view(found: Comparison, *, chosen: str = "") -> RenderableType:
    """The whole view."""
    parts: list[RenderableType] = [
        Text(rows.headline(found), style=_STYLES[found.state]),
        Text(rows.step_facts(found), style="dim"),
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
    evaluation = rows.evaluation_text(found)
    lines = [Text(evaluation)] if evaluation else []
    yield from _block(rows.part_table(found), _SHOWN_PARTS, *lines)
    yield from _block(rows.line_table(found), _SHOWN_LINES)
    yield from _block(rows.rank_table(found), _SHOWN_RANKS)
    yield from _block(rows.counter_table(found), _SHOWN_COUNTERS)
    kernels = rows.kernel_table(found, limit=_SHOWN_KERNELS)
    if kernels is not None and not kernels.rows:
        yield section("Traced steps", Text("nothing differs beyond chance", style="dim"))
    elif kernels is not None:
        yield from _block(kernels, _SHOWN_KERNELS, where="haiprof trace-diff", folded=("name",))
    around = rows.around_table(found)
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
        "verdict": {"state": found.state, "text": rows.headline(found),
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
