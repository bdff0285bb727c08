"""`haiprof query`: SQL over the tables of traces or of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.trace_arguments import Waiting, Window
from haiprof.errors import UsageError

Target = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE_OR_RUN",
        help="A trace, a folder with one per rank, a run directory, or a log directory whose "
        "newest run is taken.",
        show_default=False,
    ),
]
Sql = Annotated[str | None, typer.Argument(metavar="SQL", help="One select.", show_default=False)]
Schema = Annotated[
    bool, typer.Option("--schema", help="Show tables and columns with units and meanings.")
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print all rows as CSV.")]


def query(
    target: Target,
    sql: Sql = None,
    schema: Schema = False,
    window: Window = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Ask traces or a run in SQL; nothing is changed and no other file is read.

    Traces have the tables gpu, runtime, ops, annotations, python, memory, sync,
    links and profiler_steps, all with a column rank; a run has steps, phases,
    counters, ranks, windows and reactions. Times are in ns. The dialect is polars': joins,
    group by, window functions, with.

    For example:

      haiprof query traces/ --schema

      haiprof query traces/ "select kind, sum(dur_ns) from gpu group by kind"

      haiprof query traces/ --csv "select name, dur_ns from gpu where rank = 3"

      haiprof query haiprof-logs "select rank, max(step_ns) from steps group by 1"
    """
    from haiprof.analysis.trace.sql import ask
    from haiprof.analysis.trace.sql_tables import sql_tables
    from haiprof.report.query_view import answer_data, answer_view, schema_data, schema_view

    if (sql is None) != schema or (as_json and as_csv):
        raise UsageError(
            "query: one SQL statement or --schema, and one of --json and --csv",
            hint='haiprof query TRACES "select count(*) from gpu"',
        )
    output = Output(json=as_json)
    with Waiting(quiet=as_json):
        tables = sql_tables(target, window=window)
        if sql is None:
            output.show(lambda _: schema_view(tables), schema_data(tables))
            return
        answer = ask(tables, sql)
    if as_csv:
        from haiprof.report.exports.tabular import write_csv

        write_csv(answer, sys.stdout.buffer)
        return
    output.show(lambda _: answer_view(answer), answer_data(answer))
