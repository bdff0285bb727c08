"""`haiprof trace query`: SQL over the tables of traces or of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, ReadProgress, Window
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.target import existing_log_dir, trace_target
from haiprof.cli.trace_check import print_faults

Target = Annotated[
    str | None,
    Arg(
        "[TRACE_OR_RUN]",
        "A trace, a folder with one per rank, a run directory, or a log directory whose "
        "newest run is taken. Left out: the default log directory.",
    ),
]
Sql = Annotated[str | None, Arg("SQL", "One select.")]
Schema = Annotated[bool, Opt("--schema", "Show tables and columns with units and meanings.")]
Limit = Annotated[int | None, Opt("--limit ROWS", "Only the first rows of the answer.", low=1)]
AsCsv = Annotated[bool, Opt("--as-csv", "Print all rows as CSV.", old=("--csv",))]


def query(
    target: Target = None,
    sql: Sql = None,
    schema: Schema = False,
    window: Window = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    limit: Limit = None,
) -> None:
    """Ask traces or a run in SQL; nothing is changed and no other file is read.

    Traces have the tables gpu, runtime, ops, annotations, python, memory, sync,
    links and profiler_steps, all with a column rank, and what `haiprof trace functions` says:
    functions, rank_totals and lateness; a run has steps, phases, counters, ranks, windows
    and reactions. Times are in ns. The dialect is polars': joins,
    group by, window functions, with.

    For example:

      haiprof trace query traces/ --schema
      haiprof trace query traces/ "select kind, sum(dur_ns) from gpu group by kind"
      haiprof trace query traces/ --as-csv "select name, dur_ns from gpu where rank = 3"
      haiprof trace query haiprof-logs "select rank, max(step_ns) from steps group by 1"
    """
    from haiprof.show.views.tables import answer_data, answer_view, schema_data, schema_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_analysis.sql import ask, names_traces
    from haiprof.trace_analysis.sql_tables import sql_tables
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    if target is not None and sql is None and not schema and not Path(target).exists():
        target, sql = None, target  # the statement alone: of the newest run
    if (sql is None) != schema or (as_json and as_csv):
        raise UsageError(
            "query: one SQL statement or --schema, and one of --json and --as-csv",
            hint='haiprof trace query TRACES "select count(*) from gpu"',
        )
    output = Output(json=as_json)
    with ReadProgress(quiet=as_json):
        source = trace_target(existing_log_dir() if target is None else Path(target))
        analysis = TraceQuestions(source, window=window)
        tables = sql_tables(source, analysis=analysis)
        if sql is None:
            output.show(lambda _: schema_view(tables), schema_data(tables))
            return
        answer = ask(tables, sql)
        row_count = answer.height
        answer = answer if limit is None else answer.head(limit)
        of_traces = names_traces(tables, sql)
    faults = print_faults(output, analysis, *OF_EACH_RANK) if of_traces else []
    if as_csv:
        from haiprof.compat.exports import print_text, write_csv

        print_text(lambda file: write_csv(answer, file), sys.stdout.buffer)
        return
    data = answer_data(answer) | {"row_count": row_count, "faults": faults}
    output.show(lambda _: answer_view(answer), data)
