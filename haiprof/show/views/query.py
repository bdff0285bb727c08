"""What `haiprof query` shows: an answer, and the tables that can be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base.units import MISSING
from haiprof.show.text import printable
from haiprof.show.views.blocks import section
from haiprof.trace_analysis.sql_tables import SqlTable

_MANY = 50


def answer_view(answer: pl.DataFrame) -> RenderableType:
    """The first rows of an answer, its numbers as they are."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name, dtype in answer.schema.items():
        table.add_column(
            Text(name), justify="right" if dtype.is_numeric() else "left", overflow="ellipsis"
        )
    for row in answer.head(_MANY).iter_rows():
        table.add_row(*(_cell(value) for value in row))
    count = f"{answer.height} row" + ("" if answer.height == 1 else "s")
    rest = f", the first {_MANY}; --csv and --json print all" if answer.height > _MANY else ""
    return Group(table, Text(count + rest, style="dim"))


def answer_data(answer: pl.DataFrame) -> dict[str, Any]:
    """The whole answer for scripts: its columns with their types, and its rows."""
    columns = [{"name": name, "type": str(dtype)} for name, dtype in answer.schema.items()]
    return {"columns": columns, "rows": answer.to_dicts()}


def schema_view(tables: Mapping[str, SqlTable]) -> RenderableType:
    """Every table with its columns."""
    return Group(*(_table(table) for table in tables.values()))


def schema_data(tables: Mapping[str, SqlTable]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "tables": {
            name: {"meaning": table.meaning, "columns": [asdict(c) for c in table.columns]}
            for name, table in tables.items()
        }
    }


def _table(table: SqlTable) -> RenderableType:
    rows = Table.grid(padding=(0, 2, 0, 0))
    for style in ("", "dim", "dim"):
        rows.add_column(no_wrap=True, style=style)
    rows.add_column(overflow="fold")
    for column in table.columns:
        rows.add_row(column.name, column.type, column.unit, column.meaning)
    return section(f"{table.name}: {table.meaning}", rows)


def _cell(value: object) -> Text:
    if value is None:
        return Text(MISSING)
    if isinstance(value, float):
        return Text(f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}")
    if isinstance(value, list):
        value = "; ".join(map(str, value))
    return Text(printable(str(value)), no_wrap=True, overflow="ellipsis")
