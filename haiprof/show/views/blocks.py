"""Blocks that terminal views share: header, sections, tables, series over time, what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import (
    Console,
    ConsoleOptions,
    Group,
    OverflowMethod,
    RenderableType,
    RenderResult,
)
from rich.containers import Lines
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from haiprof.base.units import duration_text
from haiprof.show.figures.style import PHASE_COLORS, SKY
from haiprof.show.series import Series, TimeRange
from haiprof.show.terminal import Sparkline
from haiprof.show.text import by_reason, moment_text, printable, value_text

if TYPE_CHECKING:  # a run's header reads manifests, which traces do not have
    from haiprof.show.run_header import RunHeader

INDENT = 2
_GAP = 2
_LEAST_CUT = 12
_LAST_COLUMN = 24  # Columns of the terminal that a table's last column needs at least
_COLORS = {**PHASE_COLORS, "step time": ""}


def header_block(run: RunHeader, *, counts: str) -> RenderableType:
    """Name, state, start, duration and command of the run."""
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append(run.name, style="bold")
    title.append("  ")
    title.append(run.outcome, style="green" if run.is_running else "" if run.is_clean else "red")
    summary = f"started {moment_text(run.start_wall_ns)} on {run.host or 'an unknown host'}"
    lasted = duration_text(run.duration_ns)
    summary += f" · {'for' if run.is_running else 'lasted'} {lasted} · {counts}"
    return Group(title, Text(summary, style="dim"), one_line(shlex.join(run.command), style="dim"))


def one_line(text: str, *, style: str = "", middle: bool = False) -> Text:
    """Text of one line: cut with an ellipsis where the line ends, or in the middle."""
    kind = MiddleCut if middle else Text
    return kind(printable(text), style=style, no_wrap=True, overflow="ellipsis")


class MiddleCut(Text):
    """A name that keeps its beginning and its end: kernels of one template differ at the end."""

    def truncate(
        self, max_width: int, *, overflow: OverflowMethod | None = None, pad: bool = False
    ) -> None:
        """Cuts the middle out where the text is longer than its column."""
        if self.cell_len > max_width > _LEAST_CUT:
            begin = (max_width - 1) // 2
            end = max_width - 1 - begin
            self.plain = f"{self.plain[:begin]}…{self.plain[-end:]}"
        super().truncate(max_width, overflow=overflow, pad=pad)

    def copy(self) -> MiddleCut:
        """The same, cut alike."""
        return MiddleCut(self.plain, style=self.style, no_wrap=True, overflow="ellipsis")

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:  # noqa: ANN401
        """One line: rich would cut its end."""
        line = self.copy()
        line.truncate(width)
        return Lines([line])


def section(title: str, *content: RenderableType) -> RenderableType:
    """A titled block, set off by an empty line."""
    return Group(
        Text(), Text(title, style="bold"), *(Padding(part, (0, 0, 0, INDENT)) for part in content)
    )


def plain_table(*columns: str, left: Collection[str] = (), gap: int = 2) -> Table:
    """A table without lines; columns are right-aligned unless named in `left`."""
    table = Table(box=None, padding=(0, gap, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def table_lines(
    rows: Iterable[Sequence[str | Text]], widths: Sequence[int], left: Sequence[bool]
) -> Iterator[Text]:
    """A table without lines, its heads first; what is wider than its column is cut.

    As lines of text: rich's own tables take a millisecond for each row.
    """
    gap = " " * _GAP
    for number, row in enumerate(rows):
        parts: list[str | Text] = []
        for cell, width, is_left in zip(row, widths, left, strict=True):
            if cell_width(cell) > width:
                cell = Text(cell) if isinstance(cell, str) else cell.copy()
                cell.truncate(width, overflow="ellipsis")
            space = " " * (width - cell_width(cell))
            parts += [cell, space, gap] if is_left else [space, cell, gap]
        line = Text.assemble(*parts[:-1], style="" if number else "dim", no_wrap=True)
        line.rstrip()
        yield line


@dataclass(frozen=True, slots=True)
class FittingTable:
    """A table without lines that leaves out columns where one of them has too little room."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | Text]]
    _: KW_ONLY
    left: Collection[str | int]
    """Columns that are aligned to the left, by head or place; so are those that go first."""
    first_to_go: Sequence[str | int]
    flexible: int | None = -1  # The one that takes what the others leave, and is cut; None for none
    least: int = _LAST_COLUMN  # Columns of the terminal that are left for it, or others go
    narrowest: int = 1
    text_width: int | None = None  # Where the others are cut that are aligned to the left
    where: str = ""  # Where all columns are; empty says nothing of those that went

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table with the columns that fit."""
        count, rows = len(self.columns), [self.columns, *self.rows]
        left = [n in self.left or name in self.left for n, name in enumerate(self.columns)]
        widths = [max(cell_width(row[n]) for row in rows) for n in range(count)]
        flexible = None if self.flexible is None else self.flexible % count
        fixed = {
            n: min(width, self.text_width or width) if left[n] else width
            for n, width in enumerate(widths) if n != flexible
        }  # fmt: skip
        go = [n for go in self.first_to_go for n in range(count) if go in (n, self.columns[n])]
        gone: list[int] = []
        while go and _room(fixed, options) < self.least:
            gone.append(go.pop(0))
            del fixed[gone[-1]]
        if flexible is not None:
            narrow = min(widths[flexible], _room(fixed, options))
            fixed[flexible] = max(self.narrowest, narrow)
        places = sorted(fixed)
        yield from table_lines(
            ([row[n] for n in places] for row in rows),
            [fixed[n] for n in places], [left[n] for n in places],
        )  # fmt: skip
        if gone and self.where:
            lost = ", ".join(self.columns[n] for n in sorted(gone))
            yield Text(f"no room for {lost}: in {self.where}", style="dim")


def _room(widths: Mapping[int, int], options: ConsoleOptions) -> int:
    """What columns of these widths leave of the terminal."""
    return options.max_width - sum(width + _GAP for width in widths.values())


def cell_width(cell: str | Text) -> int:
    """Columns of the terminal that a cell takes."""
    return cell.cell_len if isinstance(cell, Text) else cell_len(cell)


def series_block(
    series: Sequence[Series], window: TimeRange | None, *, begin: TimeRange | None
) -> RenderableType:
    """Sparklines on one time axis, scaled from zero to the maximum of its kind (ratios to one)."""
    axis = ""
    if window and begin:
        ends = [ns - begin.start_ns for ns in (window.start_ns, window.end_ns)]
        axis = " to ".join(duration_text(ns) if ns else "0" for ns in ends)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False, expand=True)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=16)
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=20, style="dim")
    table.add_column(axis, ratio=1, no_wrap=True)
    table.add_column("mean", justify="right", no_wrap=True)
    table.add_column("max", justify="right", no_wrap=True)
    tops: dict[str, float] = {}  # the lines of a picture share a scale, so that ranks compare
    for line in series:
        least = 1.0 if line.unit == "ratio" else 0.0
        highest = max((v for v in line.values if v is not None), default=0.0)
        tops[line.title] = max(tops.get(line.title, least), highest)
    above = ""
    for line in series:
        table.add_row(
            "" if line.title == above else line.title,
            line.label if line.label != line.title else "",
            Sparkline(line.values, top=tops[line.title], color=_COLORS.get(line.title, SKY)),
            value_text(line.mean, line.unit),
            value_text(line.max, line.unit),
        )
        above = line.title
    return table


def missing_block(missing: Mapping[str, str]) -> RenderableType:
    """What was not measured, each with the reason; nothing where all was."""
    if not missing:
        return Group()
    return section("Not measured", LabelTable(by_reason(missing), second="dim"))


@dataclass(frozen=True, slots=True)
class LabelTable:
    """Labels in one style, and beside each its text in another one, which is folded.

    Below each where a word, such as a path, would be broken beside it and is not there.
    """

    rows: Sequence[tuple[str, str]]
    _: KW_ONLY
    first: str = ""
    second: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, or its rows below each other."""
        longest = max((cell_len(word) for _, text in self.rows for word in text.split()), default=0)
        beside = max((cell_len(label) for label, _ in self.rows), default=0) + _GAP
        if beside + longest > options.max_width >= INDENT + longest:
            for label, text in self.rows:
                yield Text(label, style=self.first)
                yield Padding(Text(text, style=self.second), (0, 0, 0, INDENT))
            return
        table = Table(box=None, padding=(0, _GAP, 0, 0), show_header=False, pad_edge=False)
        table.add_column(style=self.first, no_wrap=True)
        table.add_column(style=self.second, overflow="fold")
        for label, text in self.rows:
            table.add_row(label, Text(text))
        yield table


def more_lines(count: int, where: str = "--json") -> list[RenderableType]:
    """How many rows are left out, where some are."""
    return [Text(f"and {count} more, in {where}", style="dim")] if count > 0 else []


def notes_block(notes: Sequence[str], title: str = "Notes") -> RenderableType:
    """Notes of the reader, one bullet each; nothing where there is none."""
    return section(title, *bullets(notes)) if notes else Group()


def bullets(lines: Sequence[str]) -> Iterator[RenderableType]:
    """Lines that wrap under their own beginning."""
    for line in lines:
        table = Table.grid(padding=(0, 1, 0, 0))
        table.add_row("·", Text(printable(line), overflow="fold"))
        yield table
