"""What `query` and `trace tables` show: one answer or table whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.console import Group, JustifyMethod, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import make_named_folder
from haiprof.base.units import MISSING, NS_PER_US
from haiprof.show.frame_table import HEADINGS, Columns, frame_table, heads
from haiprof.show.views.blocks import one_line, section
from haiprof.trace_analysis.device_time import NO_LAUNCHES, Steps
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

if TYPE_CHECKING:
    from haiprof.trace_analysis.sql import SqlTable  # which loads what runs are read by

_MANY = 50


def answer_view(answer: pl.DataFrame, width: int) -> RenderableType:
    """The first rows of an answer, numbers as they are; columns that have no room are named."""
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    shown: list[list[Text]] = []
    for column in answer.head(_MANY):
        cells = [_cell(value) for value in column]
        width -= 2 + max(len(column.name), *(len(cell) for cell in cells), 0)
        if shown and width < 0:
            break
        justify: JustifyMethod = "right" if column.dtype.is_numeric() else "left"
        table.add_column(Text(column.name), justify=justify, overflow="ellipsis")
        shown.append(cells)
    for row in zip(*shown, strict=True):
        table.add_row(*row)
    count = f"{answer.height} row" + ("" if answer.height == 1 else "s")
    rest = f", the first {_MANY}; --as-csv and --json print all" if answer.height > _MANY else ""
    notes = [Text(count + rest, style="dim")]
    if hidden := answer.columns[len(shown) :]:
        names = ", ".join(hidden)
        notes.append(Text(f"no room for {names}: select fewer, or use --as-csv", style="dim"))
    return Group(table, *notes)


def answer_data(answer: pl.DataFrame) -> dict[str, Any]:
    """The whole answer for scripts: its columns with their types, and its rows."""
    columns = [{"name": name, "type": str(dtype)} for name, dtype in answer.schema.items()]
    return {"columns": columns, "rows": answer.to_dicts()}


def schema_view(tables: Mapping[str, SqlTable]) -> RenderableType:
    """Every table with its columns."""
    parts = []
    for table in tables.values():
        rows = RichTable.grid(padding=(0, 2, 0, 0))
        for style in ("", "dim", "dim"):
            rows.add_column(no_wrap=True, style=style)
        rows.add_column(overflow="fold")
        for column in table.describe():
            rows.add_row(*column.values())
        parts.append(section(f"{table.name}: {table.meaning}", rows))
    return Group(*parts)


def schema_data(tables: Mapping[str, SqlTable]) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "tables": {
            name: {"meaning": table.meaning, "columns": table.describe()}
            for name, table in tables.items()
        }
    }


def _cell(value: object) -> Text:
    if value is None:
        return Text(MISSING)
    if isinstance(value, float):
        return Text(f"{value:.6g}" if abs(value) < 1e6 else f"{value:.1f}")
    if isinstance(value, int):
        return Text(str(value))
    if isinstance(value, list):
        value = "; ".join(map(str, value))
    return one_line(str(value), middle=True)


_ROWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: the question that it answers, and which limits it takes."""

    ask: Callable[..., pl.DataFrame]
    """A question of `TraceQuestions`: steps, and the limits that were given."""
    columns: Columns  # What people see of it, with its heading; scripts get all
    named_by: str = "name"  # The column that may be cut where a line is too short
    limits: Mapping[str, str] = field(default_factory=dict)
    """Options of the command by what the question calls them; what ends in `_ns` is given in us."""


def _sequences(
    traces: TraceQuestions, steps: Steps, *, operator: str | None = None, **limits: int
) -> pl.DataFrame:
    if operator is None:
        raise UsageError("trace tables sequences: of which operator?", hint="--operator layer_norm")
    return traces.kernel_sequences(operator, steps, **limits)


def _counters(traces: TraceQuestions, steps: Steps, *, folder: Path | None = None) -> pl.DataFrame:
    if steps is not None:
        raise UsageError("trace tables counter-traces: traces are written whole, without --steps")
    if folder is not None:
        make_named_folder(folder)
    return traces.write_counter_traces(folder)


LAUNCH_HEADS = heads(
    blocks_per_sm="blocks/SM", waves="waves", occupancy_ratio="occ. (longest call)"
)
_ASKS: Mapping[str, Callable[..., pl.DataFrame]] = {
    "kernels": TraceQuestions.kernel_breakdown,
    "launches": TraceQuestions.launch_summary,
    "single-launches": TraceQuestions.launch_statistics,
    "annotations": TraceQuestions.annotation_breakdown,
    "annotation-kernels": TraceQuestions.annotation_kernels,
    "sequences": _sequences,
    "counter-traces": _counters,
}
TABLES = {
    name: Table(ask=ask, **{**told, "columns": [*told["columns"].items()]})
    for name, ask in _ASKS.items()
    for told in [HEADINGS["trace_tables"][name]]
}


def table_of(name: str, limits: Mapping[str, Any]) -> tuple[Table, dict[str, Any]]:
    """The table of a name, and what its question is given; None is the question's default."""
    table, given = TABLES[name], {}
    for limit, value in limits.items():
        if value is None:
            continue
        if limit not in table.limits:
            option = limit.replace("_", "-")
            takes = [other for other, each in TABLES.items() if limit in each.limits]
            raise UsageError(f"trace tables {name}: takes no --{option}",
                             hint=f"--{option} goes with {', '.join(takes)}")  # fmt: skip
        own = table.limits[limit]
        given[own] = round(value * NS_PER_US) if own.endswith("_ns") else value
    return table, given


def table_view(found: pl.DataFrame, table: Table) -> RenderableType:
    """The first rows."""
    if found.is_empty():
        return Text("no rows: the traces have no such event (of a job without a GPU: no kernel)")
    shown = found.rename({table.named_by: "name"})
    known = [head for head in table.columns if head not in LAUNCH_HEADS or shown[head[0]].count()]
    lost = Text(f"not in the table: {NO_LAUNCHES}", style="dim")
    is_whole = len(known) == len(table.columns)
    return Group(*frame_table(shown, known, limit=_ROWS), *(() if is_whole else (lost,)))
