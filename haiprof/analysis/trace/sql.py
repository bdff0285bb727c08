"""SQL over the frames of traces and runs: one question, one table; files are out of its reach."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import polars as pl

from haiprof.analysis.trace.sql_tables import SqlTable
from haiprof.errors import UsageError

_READING = ("select", "with", "from", "values", "explain", "show")
# polars' SQL has table functions such as read_csv('/any/file'). A name of theirs before a
# parenthesis is refused wherever it stands, in strings and comments too: what the parser takes for
# a comment need not be judged here.
_FILE_FUNCTION = re.compile(r"""\b(?:read|scan)_\w+["`\]]?\s*(?:\(|--|/\*|\#|//)""", re.IGNORECASE)
_FILE_SCAN = re.compile(r"\bSCAN \[", re.IGNORECASE)
_FIRST_WORD = re.compile(r"(?:\s|\(|--[^\n]*\n)*(\w*)")
_WORD = re.compile(r"\w+")
_QUOTED_NAME = re.compile(r"""["'`]([^"'`]+)["'`]""")
_MANY = 40


def ask(tables: Mapping[str, SqlTable], sql: str) -> pl.DataFrame:
    """The answer to one question.

    Only the tables that it names are read.

    Args:
        tables: From `sql_tables`.
        sql: One statement that reads; polars' dialect (`polars.SQLContext`): joins, `group by`,
            window functions, common table expressions. `1/2` is 0.5.

    Raises:
        UsageError: It cannot be understood, names a table or column that is not there, would
            read a file, or does anything but read.
    """
    _check(sql)
    words = {word.lower() for word in _WORD.findall(sql)}
    context = pl.SQLContext(
        {
            name: table.frame() if name in words else pl.LazyFrame(schema=table.dtypes)
            for name, table in tables.items()
        }
    )
    try:
        plan = context.execute(sql, eager=False)
        if _FILE_SCAN.search(plan.explain(optimized=False)):
            raise _no_files()
        return plan.collect()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _explained(error, tables, words) from None
    except pl.exceptions.PanicException as error:
        raise UsageError(f"polars cannot answer this: {_first_line(error)}") from None


def _check(sql: str) -> None:
    """Refuses what does not only read the tables."""
    first = _FIRST_WORD.match(sql)
    word = first[1].lower() if first else ""
    if word not in _READING:
        raise UsageError(
            f"SQL begins with {word or sql[:10].strip()!r}: it can ask, and change nothing",
            hint="select ... from ...",
        )
    if _FILE_FUNCTION.search(sql):
        raise _no_files()


def _no_files() -> UsageError:
    return UsageError(
        "SQL reads the tables of the traces or the run, no files", hint="haiprof query ... --schema"
    )


def _explained(
    error: Exception, tables: Mapping[str, SqlTable], words: Iterable[str]
) -> UsageError:
    """What is wrong with the question, with the names that there are."""
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
