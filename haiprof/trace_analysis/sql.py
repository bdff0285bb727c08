"""SQL over the frames of traces and runs: one query, one result; files cannot be read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import polars as pl

from haiprof.base.errors import UsageError
from haiprof.trace_analysis.sql_grammar import check_sql, no_files
from haiprof.trace_analysis.sql_tables import SqlTable, is_of_run

_FILE_SCAN = re.compile(r"\bSCAN \[", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_TEXT = re.compile("'[^']*'")
_SOURCES = re.compile(
    r"\b(?:from|join)\b(.*?)(?=\b(?:where|group|order|having|limit|on|using|join|union|intersect|"
    r"except|select)\b|[()]|$)",
    re.IGNORECASE | re.DOTALL,
)
_QUOTED_NAME = re.compile(r"""["'`]([^"'`]+)["'`]""")
_MANY = 40


def ask(tables: Mapping[str, SqlTable], sql: str) -> pl.DataFrame:
    """The answer to one question.

    Only the tables that it names are read.
    """
    sql = check_sql(sql)
    words = _words(sql)
    context = pl.SQLContext(
        {
            name: table.frame() if name in words else pl.LazyFrame(schema=table.dtypes)
            for name, table in tables.items()
        }
    )
    try:
        plan = context.execute(sql, eager=False)
        if _FILE_SCAN.search(plan.explain(optimized=False)):
            raise no_files()
        return plan.collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _explain(error, tables, words) from None
    except pl.exceptions.PanicException as error:
        raise UsageError(f"polars cannot answer this: {_first_line(error)}") from None


def names_traces(tables: Mapping[str, SqlTable], sql: str) -> bool:
    """Whether a question names a table that is made of traces."""
    return any(not is_of_run(name) for name in _sources(sql) & tables.keys())


def _sources(sql: str) -> set[str]:
    """The names after FROM and JOIN, in lower case; a column may be called as a table is."""
    lists = _SOURCES.findall(_TEXT.sub("''", sql))
    return {name.lower() for found in lists for name in _WORD.findall(found)}


def _words(sql: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(sql)}


def _explain(error: Exception, tables: Mapping[str, SqlTable], words: Iterable[str]) -> UsageError:
    """The error of a query, with the names that exist."""
    text = _first_line(error)
    name = _QUOTED_NAME.search(text)
    if name and text.startswith("relation "):
        return UsageError(f"no table {name[1]!r}", hint=f"tables: {', '.join(tables)}")
    missing = isinstance(error, pl.exceptions.ColumnNotFoundError) or "no column named" in text
    if name and missing:
        return UsageError(f"no column {name[1]!r}", hint=_columns_text(tables, words))
    return UsageError(f"SQL: {text}", hint="haiprof query ... --schema lists tables and columns")


def _columns_text(tables: Mapping[str, SqlTable], words: Iterable[str]) -> str:
    """The columns of the tables that the question names."""
    named = [table for name, table in tables.items() if name in set(words)]
    texts = [f"{t.name}: {', '.join(column.name for column in t.columns[:_MANY])}" for t in named]
    return "; ".join(texts) or f"tables: {', '.join(tables)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
