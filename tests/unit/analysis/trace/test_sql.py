from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from haiprof import Analyzer, TraceAnalysis
from haiprof.base.errors import RunNotFoundError, TraceFormatError, UsageError
from haiprof.trace_analysis.sql import SqlTable, ask, names_traces, run_tables, sql_tables
from haiprof.trace_format.kineto.events import TABLES
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step, traces

Tables = dict[str, SqlTable]
SECRET = "the content of a file"


@pytest.fixture
def tables(tmp_path: Path) -> Tables:
    """Two ranks; rank 1 computes for 20 us instead of 10."""
    for rank in (0, 1):
        rank_file(tmp_path, rank, [
            step(3, 0, 100), launch(7, 5, 2), event("read_csv", "python_function", 1, 2),
            kernel("gemm", 10, 10 * (rank + 1), correlation=7),
            kernel("ncclDevKernel_AllReduce", 40, 5, stream=20),
        ])  # fmt: skip
    return sql_tables(tmp_path)


def rows(tables: Tables, sql: str) -> list[dict[str, object]]:
    return ask(tables, sql).to_dicts()


def test_ask_sums_over_ranks(tables: Tables) -> None:
    sql = "select rank, kind, sum(dur_ns) as ns from gpu group by rank, kind order by rank, kind"
    assert [tuple(row.values()) for row in rows(tables, sql)] == [
        (0, "communication", 5_000),
        (0, "computation", 10_000),
        (1, "communication", 5_000),
        (1, "computation", 20_000),
    ]


def test_ask_joins_a_kernel_and_its_call(tables: Tables) -> None:
    sql = """select r.name as call, g.name as kernel from gpu g
             join runtime r on g.correlation = r.correlation and g.rank = r.rank
             where g.rank = 1"""
    assert rows(tables, sql) == [{"call": "cudaLaunchKernel", "kernel": "gemm"}]


def test_ask_knows_steps_expressions_and_names_of_functions(tables: Tables) -> None:
    for sql, row in (
        ("with s as (select * from profiler_steps) select max(dur_ns) n from s", {"n": 100_000}),
        ("-- why\nselect count(*) as n from python where name like '%read_csv%'", {"n": 2}),
        ("select count(*) from python where name like '%read_csv%'", {"count": 2}),
    ):
        assert rows(tables, sql) == [row]
    assert {"name": "gpu"} in rows(tables, "show tables")


def test_ask_gives_null_for_a_text_that_was_not_recorded(tables: Tables) -> None:
    assert rows(tables, "select distinct collective from gpu") == [{"collective": None}]


def test_tables_that_the_question_does_not_name_are_not_read(tables: Tables) -> None:
    def refused() -> pl.LazyFrame:
        raise AssertionError("read")

    gpu = tables["gpu"]
    closed = SqlTable(name="gpu", meaning="", columns=gpu.columns, frame=refused)
    assert rows({**tables, "gpu": closed}, "select count(*) as n from runtime") == [{"n": 2}]


@pytest.mark.parametrize(("sql", "message", "hint"), [
    ("select nope from gpu", "no column 'nope'", "gpu: rank, event, name"),
    ("select gpu.nope from gpu", "no column 'nope'", "gpu: rank, event, name"),
    ("select * from nope", "no table 'nope'", "gpu, runtime, ops"),
    ("select (dur_ns from gpu", "SQL: ", "--schema"),
    ("select dur_ns + name from gpu", "SQL: ", "--schema"),
    ("select frobnicate(dur_ns) from gpu", "frobnicate", "--schema"),
    ("select 1; select 2", "one", "--schema"),
    ("delete from gpu", "begins with 'delete'", "select"),
    ("drop table gpu", "begins with 'drop'", "select"),
    ("create table t as select * from gpu", "begins with 'create'", "select"),
    ("", "begins with ''", "select"),
])  # fmt: skip
def test_error_says_what_is_wrong_and_what_there_is(
    tables: Tables, sql: str, message: str, hint: str
) -> None:
    with pytest.raises(UsageError) as caught:
        ask(tables, sql)
    assert message in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize("sql", [
    "select * from read_csv('{}')",
    "select * from READ_CSV ('{}')",
    "select * from \"read_csv\"('{}')",
    "select * from `read_csv`('{}')",
    "select * from read_csv /* (*/ ('{}')",
    "select * from read_csv /* /* */ */ ('{}')",
    "select * from read_csv -- x\n('{}')",
    "select * from (read_csv('{}'))",
    "select * from gpu, read_csv('{}')",
    "select name from gpu where name in (select * from read_csv('{}'))",
    "with x as (select * from read_ndjson('{}')) select * from x",
    "select * from read_parquet('{}')",
    "select * from read_ipc('{}')",
    "select * from read_json('{}')",
    "select * from '{}'",
    'select * from "{}"',
    "copy gpu to '{}'",
])  # fmt: skip
def test_files_are_out_of_reach(tables: Tables, tmp_path: Path, sql: str) -> None:
    file = tmp_path / "secret.csv"
    file.write_text(SECRET)
    with pytest.raises(UsageError) as caught:
        ask(tables, sql.format(file))
    assert SECRET not in str(caught.value)
    assert file.read_text() == SECRET


def test_a_plan_that_reads_a_file_is_refused_too(
    tables: Tables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.trace_analysis.sql.check_sql", str)
    file = tmp_path / "secret.csv"
    file.write_text(SECRET)
    with pytest.raises(UsageError, match="no files"):
        ask(tables, f"select * from read_csv('{file}')")


def test_schema_has_every_column_with_its_meaning_and_unit(tables: Tables) -> None:
    assert set(TABLES) <= set(tables)
    for table in tables.values():
        assert list(table.frame().collect_schema()) == list(table.columns)
        assert dict(table.frame().collect_schema()) == table.dtypes
        assert all(column["meaning"] for column in table.describe())
    units = {each["name"]: each["unit"] for each in tables["gpu"].describe()}
    assert (units["dur_ns"], units["bandwidth_bytes_per_s"], units["name"]) == ("ns", "bytes/s", "")


def test_run_has_its_own_tables(tmp_path: Path) -> None:
    run = write_run(tmp_path / "job")
    write_rank(run, spans_of("D F B O " * 5, span_ns=1_000_000, gap_ns=0))
    found = sql_tables(tmp_path)
    assert list(found) == ["steps", "phases", "counters", "ranks", "windows", "reactions"]
    assert rows(found, "select count(*) as n, rank from steps group by rank") == [
        {"n": 5, "rank": 0}
    ]
    for table in run_tables(Analyzer(tmp_path)):
        assert dict(table.frame().collect_schema()) == table.dtypes
    (run.root / "traces").mkdir()
    rank_file(run.root / "traces", 0, [kernel("gemm", 0, 1)])
    assert {"steps", "gpu"} <= set(sql_tables(run.root))


def test_nothing_to_ask_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError):
        sql_tables(tmp_path)
    with pytest.raises(TraceFormatError, match="no such file"):
        sql_tables(tmp_path / "absent")


def test_real_traces_agree_with_the_frames() -> None:
    folder = traces("hta_sampled_2ranks_ws128")
    found = ask(
        sql_tables(folder), "select rank, sum(dur_ns) as ns from gpu group by rank order by rank"
    )
    own = TraceAnalysis(folder).traces
    assert found["ns"].to_list() == [trace.gpu["dur_ns"].sum() for trace in own.values()]


@pytest.mark.parametrize(("sql", "expected"), [
    ("select gpu, avg(value) from counters group by gpu", False),
    ("select count(*) from counters where source = 'from gpu'", False),
    ("select * from gpu", True),
    ("select * from counters c join gpu on c.rank = gpu.rank", True),
    ("with a as (select * from counters, gpu) select * from a", True),
])  # fmt: skip
def test_a_question_is_of_traces_by_its_tables_and_not_by_its_columns(
    sql: str, expected: bool
) -> None:
    tables = {
        name: SqlTable(name=name, meaning="", columns={}, frame=pl.LazyFrame)
        for name in ("gpu", "counters")
    }
    assert names_traces(tables, sql) is expected
