"""A frame as a table for people, in the terminal and on a page: values by their column's unit."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import polars as pl
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base.units import MISSING, number_text
from haiprof.base.version import read_data
from haiprof.show.text import value_text
from haiprof.show.views.blocks import FittingTable, more_lines, one_line, plain_table

_UNITS = (("_bytes_per_s", "bytes/s"), ("_ns", "ns"), ("_ratio", "ratio"), ("bytes", "bytes"),
          ("_watts", "watts"), ("_rate", "prefix"))  # fmt: skip

_SHARE = re.compile(r"(?:_share)?_ratio$")
_UNIT_SUFFIX = re.compile(r"_(?:ns|bytes|bytes_per_s|ratio)$")
Columns = Sequence[tuple[str, str]]  # Column of the frame and its heading
HEADINGS = read_data("show/views/tables.json")
"""Tables of traces (`trace report`, `functions`, `tables`): columns with headings, in order; and
what stands below tables of the page."""


def headings(table: str) -> Columns:
    """The columns of a table of the data file."""
    return tuple(HEADINGS[table].items())


def heads(*plain: str, **named: str) -> tuple[tuple[str, str], ...]:
    """Columns headed by their own names without units, then columns with other headings."""
    return (*((name, _heading(name)) for name in plain), *named.items())


def _heading(name: str) -> str:
    return _UNIT_SUFFIX.sub("", name).replace("_", " ")


def frame_table(
    found: pl.DataFrame, columns: Columns, *, limit: int, where: str = "--json"
) -> list[RenderableType]:
    """The first rows of a frame, where `name` takes what is left, and the number of others."""
    shown = _since_first(found).head(limit)
    rows = [[cell(name, row[name]) for name, _ in columns] for row in shown.iter_rows(named=True)]
    name = next((at for at, (column, _) in enumerate(columns) if column == "name"), None)
    table = FittingTable(
        [head for _, head in columns], rows,
        left=[at for at, (column, _) in enumerate(columns) if found.schema[column] == pl.String],
        first_to_go=[at for at in range(len(columns))[::-1] if at != (name or 0)],
        flexible=name, least=-_GAP if name is None else _NAME_WIDTH, narrowest=_NAME_WIDTH,
        text_width=_TEXT_WIDTH, where=where,
    )  # fmt: skip
    return [table, *more_lines(found.height - limit, where)]


_GAP = 2
_NAME_WIDTH, _TEXT_WIDTH = 16, 24

_POINTS = ("ts_ns", "start_ns", "end_ns")
"""Columns that are points in time: of a clock that began with the machine, or in 1970."""
_UNIX_NS = 10**17
"""`time_ns` is a point in time from here on, three years; in most tables it is a duration."""


def _since_first(found: pl.DataFrame) -> pl.DataFrame:
    """Points in time as times since the first of them."""
    points = [name for name in _POINTS if name in found.columns]
    if "time_ns" in found.columns and (found["time_ns"] >= _UNIX_NS).any():
        points.append("time_ns")
    firsts = [first for name in points if (first := found[name].min()) is not None]
    if not firsts:
        return found
    first_ns = pl.lit(min(firsts))
    return found.with_columns(pl.col(name) - first_ns for name in points)


def plain_frame(found: pl.DataFrame, columns: Sequence[str], *, limit: int) -> list[RenderableType]:
    """A frame's first rows under its own column names, without their units and empty columns."""
    known = {name: _heading(_SHARE.sub("_share", name)) for name in columns if found[name].count()}
    return frame_table(found, [*known.items()], limit=limit, where="the frame")


def cell(name: str, value: object) -> Text:
    """One value of a column; missing as a dash."""
    if value is None:
        return Text(MISSING)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return one_line(str(value), middle=name == "name")
    if name.endswith("p_value"):
        return Text(f"{value:.2g}")
    unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
    text = value_text(value, unit) if unit else number_text(value)
    return Text("0.0 %" if text == "-0.0 %" else text)


Fields = Sequence[tuple[str | Callable[[Any], str | Text], str]]
"""Field of a record, or what is shown of the record, and its heading."""


def record_cells(record: object, fields: Fields) -> list[Text]:
    """One row of a record: its fields by their units."""
    shown = [f(record) if callable(f) else cell(f, getattr(record, f)) for f, _ in fields]
    return [Text(each) if isinstance(each, str) else each for each in shown]


def record_table(records: Sequence[object], fields: Fields, *, left: int = 0) -> Table:
    """A row per record; one column is aligned to the left."""
    table = plain_table(*(head for _, head in fields), left=[fields[left][1]])
    for record in records:
        table.add_row(*record_cells(record, fields))
    return table


@dataclass(frozen=True, slots=True)
class PageTable:
    """One table as the page shows it."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    _: KW_ONLY
    left: Collection[str] = ()  # Heads of columns that are aligned to the left
    more: int = 0  # Rows that are left out
    note: str = ""
    faint: Collection[int] = ()  # Rows that are shown faintly, as they claim nothing

    @property
    def columns(self) -> tuple[int, ...]:
        """Columns that have a value in some row, and the first one."""
        known = range(len(self.head))
        return tuple(
            at for at in known if not at or any(row[at] not in ("", MISSING) for row in self.rows)
        )

    def in_short(self, column: str = "") -> str:
        """Each row's value in a column, or the first row: `forward 1.2 ms · backward 3.4 ms`."""
        if column:
            pairs = [(row[0], row[self.head.index(column)]) for row in self.rows]
        else:
            pairs = [(self.head[at], self.rows[0][at]) for at in self.columns] if self.rows else []
        return " · ".join(f"{name} {value}" for name, value in pairs)


def page_table(
    title: str, found: pl.DataFrame, columns: Columns, *, limit: int, note: str = ""
) -> PageTable:
    """The first rows of a frame."""
    first = found.head(limit).iter_rows(named=True)
    rows = [tuple(cell(name, row[name]).plain for name, _ in columns) for row in first]
    left = [head for name, head in columns if found.schema[name] == pl.String]
    more = max(0, found.height - limit)
    return PageTable(title, [head for _, head in columns], rows, left=left, more=more, note=note)


def page_records(
    title: str, records: Sequence[object], fields: Fields, *, left: Sequence[str] = (),
    more: int = 0, note: str = "",
) -> PageTable:  # fmt: skip
    """A row per record."""
    rows = [tuple(shown.plain for shown in record_cells(record, fields)) for record in records]
    return PageTable(title, [head for _, head in fields], rows, left=left, more=more, note=note)
