"""`haiprof trace modules`: the time of each nn.Module on host and GPU, forward and backward."""

from __future__ import annotations

from typing import Annotated

from haiprof.cli.arguments import AsJson, ReadProgress, StepRange, Traces, Window, parse_steps
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.trace_check import print_faults

Depth = Annotated[int | None, Opt("--depth N", "Only the outer N levels of the tree.", low=1)]


def modules(
    traces: Traces,
    steps: StepRange = None,
    depth: Depth = None,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Show which layers take the time: on the host, on the GPU, forward and backward.

    Modules are known where they were recorded (--trace-modules, or --trace-stacks);
    else the ranges of record_function, and functions called forward, stand for them.
    Kernels of the backward pass count for the module that ran their forward operator.

    For example:

      haiprof trace modules traces/
      haiprof trace modules trace.json.gz --depth 3
      haiprof trace modules traces/ --json | jq '.modules[] | {path, device_ns}'
    """
    from haiprof.show.views.functions import modules_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
    from haiprof.trace_format.launch_checks import OF_EACH_RANK

    output = Output(json=as_json)
    analysis = TraceQuestions(traces, window=window)
    with ReadProgress(quiet=as_json):
        found = analysis.module_times(parse_steps(steps))
        wall_ns = int(analysis.traced_time(parse_steps(steps))["wall_ns"].sum())
    faults = print_faults(output, analysis, *OF_EACH_RANK)
    output.show(
        lambda _: modules_view(found, wall_ns, depth=depth),
        {"path": str(traces), "wall_ns": wall_ns, "modules": found.to_dicts(), "faults": faults},
    )
