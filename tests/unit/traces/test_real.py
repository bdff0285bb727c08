"""Real traces, event by event, against the standard library's JSON and decimals."""

from __future__ import annotations

import gzip
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.tables import TABLE_OF_CATEGORY, TABLES, TraceColumn
from tests.unit.analysis.trace.shared import REAL_TRACES, traces

pytestmark = pytest.mark.usefixtures("way")


def files(name: str) -> list[Path]:
    return sorted(path for path in traces(name).iterdir() if path.name.endswith(".json.gz"))


def expected(column: TraceColumn, event: dict[str, Any]) -> Any:
    """A cell as the schema describes it."""
    if column.field.startswith("."):
        value = event.get(column.field[1:])
    else:
        args = event.get("args") or {}
        value = next((args[key] for key in column.field.split("|") if key in args), None)
    if column.type == "i64" and isinstance(value, str):
        digits = value.rsplit(" ", 1)[-1]
        return int(digits) if digits.isdigit() else None
    if column.type == "f64":
        number = math.nan if value is None or isinstance(value, str) else float(value)
        return number * column.scale if math.isfinite(number) else None
    return value


@pytest.mark.parametrize("name", REAL_TRACES)
def test_every_event_of_a_real_trace_is_in_its_table(name: str) -> None:
    for path in files(name)[:2]:
        text = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        content = json.loads(text, parse_float=Decimal)
        events = content.pop("traceEvents")
        trace = Trace(path)
        report = trace.report
        assert set(trace.metadata) == set(content)
        assert report.event_count == len(events)
        assert not report.notes
        for table in TABLES:
            rows = [
                (place, event) for place, event in enumerate(events)
                if TABLE_OF_CATEGORY.get(event.get("cat")) == table
                or (table == "memory" and event.get("name") == "[memory]")
            ]  # fmt: skip
            check_table(table, rows, getattr(trace, table).sort("event"))


def check_table(table: str, rows: list[tuple[int, dict[str, Any]]], found: pl.DataFrame) -> None:
    assert found["event"].to_list() == [place for place, _ in rows]
    assert found["ts_ns"].to_list() == [int(event["ts"] * 1000) for _, event in rows]
    assert found["dur_ns"].to_list() == [int(event.get("dur", 0) * 1000) for _, event in rows]
    for column in TABLES[table][3:] if rows else ():
        if column.name in ("event", "ts_ns", "dur_ns"):
            continue
        cells = found[column.name].to_list()
        for cell, (_, event) in zip(cells, rows, strict=True):
            assert is_same(column, cell, expected(column, event)), (column, cell, event)


def is_same(column: TraceColumn, cell: Any, wanted: Any) -> bool:
    if cell is None or wanted is None or (column.is_json and isinstance(wanted, str)):
        return bool(cell == wanted)
    if column.is_json:
        return bool(json.loads(cell) == wanted)
    return math.isclose(cell, wanted, rel_tol=1e-15) if column.type == "f64" else cell == wanted
