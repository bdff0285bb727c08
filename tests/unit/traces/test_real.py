"""Real traces, event by event, against the standard library's JSON and decimals."""

from __future__ import annotations

import gzip
import json
import math
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pytest

from haiprof.trace_format.kineto import load as native
from haiprof.trace_format.kineto.events import TABLE_OF_CATEGORY, TABLES, TraceColumn
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import FEW_TRACES, traces


def files(name: str) -> list[Path]:
    return sorted(path for path in traces(name).iterdir() if path.name.endswith(".json.gz"))


class Expected(NamedTuple):
    """What a file holds, by the standard library alone."""

    metadata: frozenset[str]
    event_count: int
    tables: dict[str, dict[str, list[Any]]]
    """Of each table the cells by column."""


def expect(path: Path) -> Expected:
    text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    content = json.loads(text, parse_float=Decimal)
    events = content.pop("traceEvents")
    rows: dict[str, list[tuple[int, dict[str, Any]]]] = {table: [] for table in TABLES}
    for place, event in enumerate(events):
        if (table := TABLE_OF_CATEGORY.get(event.get("cat"))) in rows:
            rows[table].append((place, event))
        if event.get("name") == "[memory]" and table != "memory":
            rows["memory"].append((place, event))
    tables = {table: expect_table(table, found) for table, found in rows.items()}
    return Expected(frozenset(content), len(events), tables)


def expect_table(table: str, rows: list[tuple[int, dict[str, Any]]]) -> dict[str, list[Any]]:
    events = [event for _, event in rows]
    times = {
        "event": [place for place, _ in rows],
        "ts_ns": [int(event["ts"] * 1000) for event in events],
        "dur_ns": [int(event.get("dur", 0) * 1000) for event in events],
    }
    others = [column for column in TABLES[table] if column.name not in times]
    return times | {column.name: expect_cells(column, events) for column in others}


def expect_cells(column: TraceColumn, events: list[dict[str, Any]]) -> list[Any]:
    """Cells as the schema describes them."""
    if column.field.startswith("."):
        missing = "" if column.type == "str" else None
        values = [event.get(column.field[1:], missing) for event in events]
    else:
        keys = column.field.split("|")
        fields = [event.get("args") or {} for event in events]
        values = [next((args[key] for key in keys if key in args), None) for args in fields]
    if column.type == "i64":
        return [digits_of(value) if isinstance(value, str) else value for value in values]
    return [scale(value, column) for value in values] if column.type == "f64" else values


def digits_of(value: str) -> int | None:
    digits = value.rsplit(" ", 1)[-1]
    return int(digits) if digits.isdigit() else None


def scale(value: Any, column: TraceColumn) -> float | None:
    number = math.nan if value is None or isinstance(value, str) else float(value)
    return number * column.scale if math.isfinite(number) else None


@pytest.mark.parametrize("name", FEW_TRACES)
def test_every_event_of_a_real_trace_is_in_its_table(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read by the compiled scanner, and as where it could not be built."""
    for path in files(name)[:2]:
        expected = expect(path)
        check_trace(Trace(path), expected)
        with monkeypatch.context() as patch:
            patch.setattr(native, "_compiled", None)
            patch.setenv("XDG_CACHE_HOME", str(tmp_path))
            check_trace(Trace(path), expected)


def check_trace(trace: Trace, expected: Expected) -> None:
    assert set(trace.metadata) == expected.metadata
    assert trace.report.event_count == expected.event_count
    assert not trace.report.notes
    for table in TABLES:
        check_table(table, getattr(trace, table).sort("event"), expected.tables[table])


def check_table(table: str, found: pl.DataFrame, expected: dict[str, list[Any]]) -> None:
    for column in TABLES[table]:
        cells, wanted = found[column.name].to_list(), expected[column.name]
        if cells != wanted:
            for place, (cell, value) in enumerate(zip(cells, wanted, strict=True)):
                assert is_same(column, cell, value), (column, place, cell, value)


def is_same(column: TraceColumn, cell: Any, wanted: Any) -> bool:
    if cell == wanted or cell is None or wanted is None:
        return bool(cell == wanted)
    if column.is_json:
        return not isinstance(wanted, str) and parse_json(cell) == wanted
    return column.type == "f64" and math.isclose(cell, wanted, rel_tol=1e-15)


parse_json = lru_cache(json.loads)
