"""`haiprof trace functions`: what bounds the job by function, and which rank differs."""

from __future__ import annotations

import shlex
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import (
    AsJson,
    Cluster,
    CsvFolder,
    Force,
    Geometry,
    ReadProgress,
    StepRange,
    Traces,
    Window,
    parse_cluster,
    parse_steps,
)
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.target import open_target
from haiprof.cli.trace_check import print_faults


class Kind(str, Enum):
    """The five reports."""

    gpu_compute = "gpu-compute"
    memory = "memory"
    communication = "communication"
    runtime = "runtime"
    python = "python"


Only = Annotated[Kind | None, Opt("--only VALUE", "One report, with all its tables.")]
Hardware = Annotated[
    bool, Opt("--hardware", "Of a run: also what its counters and bursts were while functions ran.")
]
Reduce = Annotated[
    Path | None,
    Opt(
        "--reduce DIR",
        "Show nothing: write each rank's functions into this folder, at most 30 KB per rank. "
        "functions DIR then gives the same answer without the traces.",
    ),
]


def functions(
    traces: Traces,
    only: Only = None,
    steps: StepRange = None,
    window: Window = None,
    cluster: Cluster = None,
    geometry: Geometry = False,
    hardware: Hardware = False,
    as_json: AsJson = False,
    csv: CsvFolder = None,
    force: Force = False,
    reduce: Reduce = None,
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

    output = Output(json=as_json)
    chosen, pool = parse_steps(steps), parse_cluster(cluster)
    if reduce is not None:
        if only is not None or csv is not None or as_json or hardware:
            raise UsageError("functions: --reduce goes with --steps, --window and --cluster")
        from haiprof.trace_analysis.pattern_file import reduce_patterns

        with ReadProgress(quiet=False) as waiting:
            made = reduce_patterns(
                traces, reduce, steps=chosen, geometry=geometry, window=window, pool=pool,
                progress=waiting,
            )  # fmt: skip
        output.hint(f"wrote {len(made)} files to {reduce}")
        output.hint(f"next: haiprof trace functions {shlex.quote(str(reduce))}")
        return
    with ReadProgress(quiet=as_json) as waiting:
        analysis = TraceQuestions(traces, pool=pool, window=window)
        patterns = analysis.patterns(chosen, geometry=geometry, progress=waiting)
    faults = print_faults(output, analysis, "kernels")
    found = function_reports(patterns, only.value if only else None)
    if hardware:
        joined = hardware_by_function(
            analysis, open_target(traces), steps=chosen, geometry=geometry
        )
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
    answered = [
        report.kind
        for report in found.reports
        if FUNCTIONS in report.tables and not report.tables[FUNCTIONS].is_empty()
    ]
    if only is None and answered:
        output.hint(
            f"next: haiprof trace functions {shlex.quote(str(traces))} --only {answered[0]}"
        )
