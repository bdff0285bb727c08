"""`haiprof trace-report`: what traces of torch.profiler say, for all ranks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.trace_arguments import (
    Cluster,
    Rank,
    StepRange,
    Traces,
    Waiting,
    parse_cluster,
    parse_steps,
)

CsvFolder = Annotated[
    Path | None,
    typer.Option(
        "--csv",
        metavar="DIR",
        help="Write each table whole as CSV into this folder.",
        show_default=False,
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace files that are there already.")]


def trace_report(
    traces: Traces,
    steps: StepRange = None,
    rank: Rank = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    csv: CsvFolder = None,
    force: Force = False,
) -> None:
    """Show what traces of torch.profiler say: GPU time, steps, kernels, launches.

    With the traces of several ranks also the same kernel on each of them, the
    bandwidth of collectives, and who arrives last. What was not recorded is a
    dash, with the reason below. `haiprof trace` is another thing: it records.

    For example:

      haiprof trace-report trace.json.gz              one rank

      haiprof trace-report traces/ --steps 10:13      steps 10, 11 and 12

      haiprof trace-report traces/ --csv tables       every table whole

      haiprof trace-report traces/ --json | jq '.tables.temporal[].idle_ratio'

      haiprof trace-report /shared/traces --cluster tcp://head:8786
    """
    from haiprof.analysis.trace.report import standard_report
    from haiprof.report.trace_view import trace_view

    output = Output(json=as_json)
    window, pool = parse_steps(steps), parse_cluster(cluster)
    with Waiting(quiet=as_json) as waiting:
        report = standard_report(traces, steps=window, rank=rank, pool=pool, progress=waiting)
    if csv is not None:
        from haiprof.report.exports.tables import write_tables

        written = write_tables(report.tables, csv, force=force)
        output.hint(f"wrote {len(written)} tables to {csv}")
    output.show(lambda _: trace_view(report), report.as_json())
    output.hint(f"next: haiprof query {shlex.quote(str(traces))} --schema")
