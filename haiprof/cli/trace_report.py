"""`haiprof trace report`: what traces of torch.profiler say, for all ranks."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import (
    AsJson,
    Cluster,
    CsvFolder,
    Force,
    Rank,
    ReadProgress,
    StepRange,
    Traces,
    Window,
    parse_cluster,
    parse_steps,
)
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.trace_analysis.pool import Pool
    from haiprof.trace_analysis.report import TraceReport

Reduce = Annotated[
    Path | None,
    Opt(
        "--reduce DIR",
        "Show nothing: write a small summary of each trace into this folder. trace-report DIR "
        "then gives the same report without the traces.",
    ),
]

Html = Annotated[
    Path | None, Opt("--html FILE", "Also write pictures and tables as one self-contained page.")
]


def trace_report(
    traces: Traces,
    steps: StepRange = None,
    rank: Rank = None,
    window: Window = None,
    cluster: Cluster = None,
    as_json: AsJson = False,
    csv: CsvFolder = None,
    force: Force = False,
    reduce: Reduce = None,
    html: Html = None,
) -> None:
    """Show what traces of torch.profiler say: GPU time, steps, kernels, launches.

    With the traces of several ranks also the same kernel on each of them, the
    bandwidth of collectives, and who arrives last. What was not recorded is a
    dash, with the reason below. `haiprof --trace` records such traces.

    For example:

      haiprof trace report trace.json.gz              one rank
      haiprof trace report traces/ --steps 10:13      steps 10, 11 and 12
      haiprof trace report traces/ --csv tables       every table whole
      haiprof trace report traces/ --html traces.html     pictures
      haiprof trace report traces/ --json | jq '.tables.temporal[].idle_ratio'
      haiprof trace report /shared/traces --cluster tcp://head:8786
      haiprof trace report /local/traces --reduce /shared/job    on each node; then
      haiprof trace report /shared/job
    """
    from haiprof.show.views.trace_report import trace_view
    from haiprof.trace_analysis.report import reduce_traces, standard_report

    output = Output(json=as_json)
    chosen, pool = parse_steps(steps), parse_cluster(cluster)
    if reduce is not None:
        if rank is not None or csv is not None or as_json or html is not None:
            raise UsageError("trace-report: --reduce goes with --steps, --window and --cluster")
        with ReadProgress(quiet=False) as waiting:
            made = reduce_traces(
                traces, reduce, steps=chosen, window=window, pool=pool, progress=waiting
            )
        output.hint(f"wrote {len(made)} summaries to {reduce}")
        output.hint(f"next: haiprof trace report {shlex.quote(str(reduce))}")
        return
    with ReadProgress(quiet=as_json) as waiting:
        report = standard_report(
            traces, steps=chosen, rank=rank, window=window, pool=pool, progress=waiting
        )
    if csv is not None:
        from haiprof.compat.exports import write_tables

        written = write_tables(report.tables, csv, force=force)
        output.hint(f"wrote {len(written)} tables to {csv}")
    if html is not None:
        _write_page(report, html, rank, window=window, pool=pool, force=force, output=output)
    output.show(lambda _: trace_view(report), report.as_json())
    if not report.reduced:
        output.hint(f"next: haiprof trace query {shlex.quote(str(traces))} --schema")


def _write_page(
    report: TraceReport,
    path: Path,
    rank: int | None,
    *,
    window: int | None,
    pool: Pool | None,
    force: bool,
    output: Output,
) -> None:
    from haiprof.base.output_file import output_file
    from haiprof.show.page.render import trace_page_html
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    if report.reduced:
        raise UsageError("trace-report: --html needs the traces, not summaries of them")
    traces = TraceQuestions(report.path, pool=pool, window=window)
    if rank is not None:
        traces = TraceQuestions(traces.files[rank].path, pool=pool)
    page = trace_page_html(report, traces)
    with output_file(path, force=force) as file:
        file.write(page.encode())
    output.hint(f"wrote {path}: open it in a browser")
