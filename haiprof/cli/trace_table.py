"""`haiprof trace tables`: one table of traces whole, with HTA's cut-offs as options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from haiprof.cli.arguments import AsJson, ReadProgress, StepRange, Traces, Window, parse_steps
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output
from haiprof.cli.trace_check import print_faults

NAMES = ("kernels", "launches", "single-launches", "annotations", "annotation-kernels",
         "sequences", "counter-traces")  # fmt: skip
"""As `show.views.tables.TABLES` has them."""

Name = Annotated[str, Arg("TABLE", ", ".join(NAMES))]
Kernels = Annotated[
    int | None,
    Opt("--num-kernels N", "kernels: at most N per rank and kind, the rest is one row.", low=1),
]
Ratio = Annotated[
    float | None,
    Opt(
        "--duration-ratio SHARE",
        "kernels: the longest that make this share of a kind's time.",
        low=0.0,
        high=1.0,
    ),
]
RuntimeCutoff = Annotated[
    float | None,
    Opt(
        "--runtime-cutoff US",
        "launches: a call longer than this is an outlier (default: 50).",
        low=0.0,
    ),
]
DelayCutoff = Annotated[
    float | None,
    Opt(
        "--launch-delay-cutoff US",
        "launches: a longer delay until the kernel begins is one (default: 100).",
        low=0.0,
    ),
]
Operator = Annotated[
    str | None, Opt("--operator NAME", "sequences: of operators with this in their name.")
]
Length = Annotated[
    int | None,
    Opt("--min-length N", "sequences: calls with fewer kernels are left out (default: 3).", low=1),
]
Top = Annotated[int | None, Opt("--top N", "sequences: so many of each rank (default: 5).", low=1)]
Folder = Annotated[
    Path | None,
    Opt("--output -o DIR", "counter-traces: where they go (default: beside each trace)."),
]
Csv = Annotated[bool, Opt("--as-csv", "Print the whole table as CSV.", old=("--csv",))]


def trace_table(
    table: Name,
    traces: Traces,
    steps: StepRange = None,
    window: Window = None,
    num_kernels: Kernels = None,
    duration_ratio: Ratio = None,
    runtime_cutoff: RuntimeCutoff = None,
    launch_delay_cutoff: DelayCutoff = None,
    operator: Operator = None,
    min_length: Length = None,
    top: Top = None,
    folder: Folder = None,
    csv: Csv = False,
    as_json: AsJson = False,
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
    from haiprof.show.views.tables import Limits, table_of, table_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    limits = Limits(
        num_kernels=num_kernels, duration_ratio=duration_ratio, runtime_cutoff=runtime_cutoff,
        launch_delay_cutoff=launch_delay_cutoff, operator=operator, min_length=min_length,
        top=top, output=folder,
    )  # fmt: skip
    chosen = table_of(table, limits)
    questions, output = TraceQuestions(traces, window=window), Output(json=as_json)
    with ReadProgress(quiet=as_json):
        found = chosen.ask(questions, parse_steps(steps), limits)
    faults = print_faults(output, questions, *OF_EACH_RANK)
    if csv:
        print_text(lambda file: write_csv(found, file), sys.stdout.buffer)
        return
    output.show(
        lambda _: table_view(found, chosen),
        {"path": str(traces), "table": table, "rows": found.to_dicts(), "faults": faults},
    )
