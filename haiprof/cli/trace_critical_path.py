"""`haiprof trace critical-path`: the chain of events that a step's time consists of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson, Rank, ReadProgress, StepRange, Traces, Window, parse_steps
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.trace_check import print_faults

Annotation = Annotated[
    str | None,
    Opt("--annotation NAME", "The window is a record_function range with this in its name."),
]
Instance = Annotated[int, Opt("--instance N", "Which of those ranges, from 0.", low=0)]
Overlay = Annotated[
    Path | None,
    Opt("--overlay DIR", "Write a copy of the trace with the path drawn in, for Perfetto."),
]


def critical_path(
    traces: Traces,
    rank: Rank = None,
    steps: StepRange = None,
    annotation: Annotation = None,
    instance: Instance = 0,
    overlay: Overlay = None,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Show what a step's time consists of: work of the host, of the GPU, and delays.

    A faster piece of the critical path makes the step shorter, until another path
    is the longest. What the trace does not record is assumed; each assumption is listed.

    For example:

      haiprof trace critical-path traces/ --rank 0 --steps 12
      haiprof trace critical-path trace.json --annotation forward --instance 3
      haiprof trace critical-path trace.json --steps 12 --overlay .
    """
    from haiprof.show.views.causes import critical_path_data, critical_path_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    chosen = parse_steps(steps)
    if chosen is not None and annotation is not None:
        raise UsageError("critical-path: --steps and --annotation are two windows; give one")
    output = Output(json=as_json)
    analysis = TraceQuestions(traces, window=window)
    with ReadProgress(quiet=as_json):
        path = analysis.critical_path(rank, steps=chosen, annotation=annotation, instance=instance)
        if overlay is not None:
            written = analysis.overlay_critical_path(path, rank, folder=overlay)
            output.hint(f"wrote {written}")
    faults = print_faults(output, analysis, "critical-path")
    output.show(lambda _: critical_path_view(path), critical_path_data(path) | {"faults": faults})
