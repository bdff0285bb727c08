"""`haiprof trace report`, `tables`, `functions`, `modules` and `query`: what is in traces."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

from haiprof.base.errors import UsageError
from haiprof.cli import shared
from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output
from haiprof.cli.trace_causes import print_faults


def trace_report(
    traces: Path = shared.TRACES,
    steps: str | None = shared.STEP_RANGE,
    rank: int | None = shared.RANK,
    window: int | None = shared.WINDOW,
    cluster: str | None = shared.CLUSTER,
    output: Output = shared.OUTPUT,
    csv: Path | None = shared.CSV_FOLDER,
    force: bool = shared.FORCE,
    reduce: Path | None = option(
        "--reduce DIR",
        "Show nothing: write a small summary of each trace into this folder. trace report DIR "
        "then gives the same report without the traces.",
    ),
    html: Path | None = option(
        "--html FILE", "Also write pictures and tables as one self-contained page."
    ),
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

    chosen, pool = shared.parse_steps(steps), shared.parse_cluster(cluster)
    if reduce is not None:
        if rank is not None or csv is not None or output.json or html is not None:
            raise UsageError("trace report: --reduce goes with --steps, --window and --cluster")
        with shared.ReadProgress(quiet=False) as waiting:
            made = reduce_traces(
                traces, reduce, steps=chosen, window=window, pool=pool, progress=waiting
            )
        output.hint(f"wrote {len(made)} summaries to {reduce}")
        output.hint(f"next: haiprof trace report {shlex.quote(str(reduce))}")
        return
    with shared.ReadProgress(quiet=output.json) as waiting:
        report = standard_report(
            traces, steps=chosen, rank=rank, window=window, pool=pool, progress=waiting
        )
    if csv is not None:
        from haiprof.compat.exports import write_tables

        written = write_tables(report.tables, csv, force=force)
        output.hint(f"wrote {len(written)} tables to {csv}")
    if html is not None:
        from haiprof.show.page.render import write_trace_page
        from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

        if report.reduced:
            raise UsageError("trace report: --html needs the traces, not summaries of them")
        asked = TraceQuestions(report.path, pool=pool, window=window)
        if rank is not None:
            asked = TraceQuestions(asked.files[rank].path, pool=pool)
        write_trace_page(report, asked, html, force=force)
        output.hint(f"wrote {html}: open it in a browser")
    output.show(lambda _: trace_view(report), report.as_json())
    if not report.reduced:
        output.hint(f"next: haiprof trace query {shlex.quote(str(traces))} --schema")


NAMES = ("kernels", "launches", "single-launches", "annotations", "annotation-kernels",
         "sequences", "counter-traces")  # fmt: skip
"""As `show.views.tables.TABLES` has them."""


def _table_name(word: str) -> str:
    """TABLE, checked before a log directory is looked for: a run may stand in its place."""
    if word not in NAMES:
        is_target = Path(word).exists()
        hint = f"haiprof trace tables {NAMES[0]} {shlex.quote(word)}" if is_target else ""
        raise UsageError(f"trace tables: no table {word}; there are {', '.join(NAMES)}", hint=hint)
    return word


def trace_table(
    table: str = argument("TABLE", ", ".join(NAMES), callback=_table_name),
    traces: Path = shared.TRACES,
    steps: str | None = shared.STEP_RANGE,
    window: int | None = shared.WINDOW,
    num_kernels: int | None = option(
        "--num-kernels N", "kernels: at most N per rank and kind, the rest is one row.", low=1
    ),
    duration_ratio: float | None = option(
        "--duration-ratio SHARE",
        "kernels: the longest that make this share of a kind's time.",
        low=0.0,
        high=1.0,
    ),
    runtime_cutoff: float | None = option(
        "--runtime-cutoff US",
        "launches: a call longer than this is an outlier (default: 50).",
        low=0.0,
    ),
    launch_delay_cutoff: float | None = option(
        "--launch-delay-cutoff US",
        "launches: a longer delay until the kernel begins is one (default: 100).",
        low=0.0,
    ),
    operator: str | None = option(
        "--operator NAME", "sequences: of operators with this in their name."
    ),
    min_length: int | None = option(
        "--min-length N", "sequences: calls with fewer kernels are left out (default: 3).", low=1
    ),
    top: int | None = option("--top N", "sequences: so many of each rank (default: 5).", low=1),
    folder: Path | None = option(
        "--output -o DIR", "counter-traces: where they go (default: beside each trace)."
    ),
    csv: bool = option("--as-csv", "Print the whole table as CSV.", old=("--csv",)),
    output: Output = shared.OUTPUT,
) -> None:
    """Show one table of traces whole, with the cut-offs that Holistic Trace Analysis has.

    kernels, launches by call or one by one, annotations and their kernels, frequent
    sequences of kernels in an operator; counter-traces writes each trace anew with
    tracks of queue length and memory bandwidth.

    For example:

      haiprof trace tables kernels traces/ --num-kernels 10 --duration-ratio 0.8
      haiprof trace tables launches traces/ --runtime-cutoff 20 --launch-delay-cutoff 50
      haiprof trace tables sequences traces/ --operator layer_norm --min-length 2
      haiprof trace tables counter-traces traces/ -o with-counters
    """
    from haiprof.compat.exports import print_text, write_csv
    from haiprof.show.views.tables import table_of, table_view
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    chosen, limits = table_of(table, {
        "num_kernels": num_kernels, "duration_ratio": duration_ratio,
        "runtime_cutoff": runtime_cutoff, "launch_delay_cutoff": launch_delay_cutoff,
        "operator": operator, "min_length": min_length, "top": top, "output": folder,
    })  # fmt: skip
    with shared.reading(traces, output, window=window) as questions:
        found = chosen.ask(questions, shared.parse_steps(steps), **limits)
    faults = print_faults(output, questions, *OF_EACH_RANK)
    if csv:
        print_text(lambda file: write_csv(found, file), sys.stdout.buffer)
        return
    output.show(
        lambda _: table_view(found, chosen),
        {"path": str(traces), "table": table, "rows": found.to_dicts(), "faults": faults},
    )


Kind = Literal["gpu-compute", "memory", "communication", "runtime", "python"]


def functions(
    traces: Path = shared.TRACES,
    only: Kind | None = option("--only VALUE", "One report, with all its tables."),
    steps: str | None = shared.STEP_RANGE,
    window: int | None = shared.WINDOW,
    cluster: str | None = shared.CLUSTER,
    geometry: bool = shared.GEOMETRY,
    hardware: bool = option(
        "--hardware", "Of a run: also what its counters and bursts were while functions ran."
    ),
    output: Output = shared.OUTPUT,
    csv: Path | None = shared.CSV_FOLDER,
    force: bool = shared.FORCE,
    reduce: Path | None = option(
        "--reduce DIR",
        "Show nothing: write each rank's functions into this folder, at most 30 KB per rank. "
        "functions DIR then gives the same answer without the traces.",
    ),
) -> None:
    """Show what bounds the job by function, and which rank differs from the others.

    Five reports: GPU compute, GPU memory operations, communication, CUDA runtime, Python functions
    by call stack. A function's bottleneck ratio is the share of the time in which it ran and
    nothing above it did. A rank is called abnormal where its distance to the others is above the
    median by 5 MADs, from 4 ranks on.

    For example:

      haiprof trace functions traces/
      haiprof trace functions RUN --only python
      haiprof trace functions traces/ --steps 10:13 --csv tables
      haiprof trace functions traces/ --geometry      kernels by name, grid and block
      haiprof trace functions RUN --hardware          with SM, DRAM, NVLink and PCIe while they ran
      haiprof trace functions traces/ --json | jq '.reports["gpu-compute"].slow'
      haiprof trace functions /local/traces --reduce /shared/job    on each node; then
      haiprof trace functions /shared/job
    """
    from haiprof.diagnosis.function_reports import function_reports, hardware_by_function
    from haiprof.diagnosis.gpu_functions import FUNCTIONS
    from haiprof.show.views.functions import functions_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    chosen, pool = shared.parse_steps(steps), shared.parse_cluster(cluster)
    if reduce is not None:
        if only is not None or csv is not None or output.json or hardware:
            raise UsageError("functions: --reduce goes with --steps, --window and --cluster")
        from haiprof.trace_analysis.function_patterns import reduce_patterns

        with shared.ReadProgress(quiet=False) as waiting:
            made = reduce_patterns(
                traces, reduce, steps=chosen, geometry=geometry, window=window, pool=pool,
                progress=waiting,
            )  # fmt: skip
        output.hint(f"wrote {len(made)} files to {reduce}")
        output.hint(f"next: haiprof trace functions {shlex.quote(str(reduce))}")
        return
    with shared.ReadProgress(quiet=output.json) as waiting:
        analysis = TraceQuestions(traces, pool=pool, window=window)
        patterns = analysis.patterns(chosen, geometry=geometry, progress=waiting)
    faults = print_faults(output, analysis, "kernels")
    found = function_reports(patterns, only)
    if hardware:
        run = shared.open_target(traces)
        joined = hardware_by_function(analysis, run, steps=chosen, geometry=geometry)
        found = replace(found, hardware=joined)
    if csv is not None:
        from haiprof.compat.exports import write_tables

        tables = {f"{r.kind}_{name}": t for r in found.reports for name, t in r.tables.items()}
        tables["functions_by_rank"] = found.functions
        if found.hardware is not None:
            tables["functions_hardware"] = found.hardware
        written = write_tables(tables, csv, force=force)
        output.hint(f"wrote {len(written)} tables to {csv}")
    output.show(lambda _: functions_view(found), found.as_json() | {"faults": faults})
    answered = [r.kind for r in found.reports if len(r.tables.get(FUNCTIONS, ()))]
    if only is None and answered:
        where = shlex.quote(str(traces))
        output.hint(f"next: haiprof trace functions {where} --only {answered[0]}")


def modules(
    traces: Path = shared.TRACES,
    steps: str | None = shared.STEP_RANGE,
    depth: int | None = option("--depth N", "Only the outer N levels of the tree.", low=1),
    window: int | None = shared.WINDOW,
    output: Output = shared.OUTPUT,
) -> None:
    """Show which layers take the time: on the host, on the GPU, forward and backward.

    Modules are known where they were recorded (--trace-stacks; of TorchScript --trace-modules);
    else the ranges of record_function, and functions called forward, stand for them.
    Kernels of the backward pass count for the module that ran their forward operator.

    For example:

      haiprof trace modules traces/
      haiprof trace modules trace.json.gz --depth 3
      haiprof trace modules traces/ --json | jq '.modules[] | {path, device_ns}'
    """
    from haiprof.show.views.functions import modules_view
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    with shared.reading(traces, output, window=window) as analysis:
        found = analysis.module_times(shared.parse_steps(steps))
        wall_ns = int(analysis.traced_time(shared.parse_steps(steps))["wall_ns"].sum())
    faults = print_faults(output, analysis, *OF_EACH_RANK)
    output.show(
        lambda _: modules_view(found, wall_ns, depth=depth),
        {"path": str(traces), "wall_ns": wall_ns, "modules": found.to_dicts(), "faults": faults},
    )


def query(
    target: str | None = argument(
        "[TRACE_OR_RUN]",
        "A trace, a folder with one per rank, a run directory, or a log directory whose "
        "newest run is taken. Left out: the default log directory.",
    ),
    sql: str | None = argument("SQL", "One select."),
    schema: bool = option("--schema", "Show tables and columns with units and meanings."),
    window: int | None = shared.WINDOW,
    output: Output = shared.OUTPUT,
    as_csv: bool = option("--as-csv", "Print all rows as CSV.", old=("--csv",)),
    limit: int | None = option("--limit ROWS", "Only the first rows of the answer.", low=1),
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
    from haiprof.trace_analysis.sql import ask, names_traces, sql_tables
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    if target is not None and sql is None and not schema and not Path(target).exists():
        target, sql = None, target  # the statement alone: of the newest run
    if (sql is None) != schema or (output.json and as_csv):
        raise UsageError(
            "query: one SQL statement or --schema, and one of --json and --as-csv",
            hint='haiprof trace query TRACES "select count(*) from gpu"',
        )
    source = shared.trace_target(shared.existing_log_dir() if target is None else Path(target))
    with shared.reading(source, output, window=window) as analysis:
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
    output.show(lambda width: answer_view(answer, width), data)
