"""`haiprof trace efficiency`: MFU of traced steps, and operators against the roofline."""

from __future__ import annotations

from haiprof.cli.arguments import (
    AsJson,
    FormulasOption,
    PeakOption,
    ReadProgress,
    StepRange,
    Traces,
    Window,
    parse_steps,
)
from haiprof.cli.output import Output
from haiprof.cli.trace_check import print_faults


def efficiency(
    traces: Traces,
    steps: StepRange = None,
    peak: PeakOption = None,
    formulas: FormulasOption = None,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Show MFU and HFU of traced steps, and which operators are far from the roofline.

    FLOPs and bytes are computed from recorded shapes: traces need record_shapes.
    An operator without a formula stays unknown; the share of kernels that is known
    is shown.

    For example:

      haiprof trace efficiency traces/ --steps 10:13
      haiprof trace efficiency trace.json.gz --peak bf16=989.4,memory=3.35
      haiprof trace efficiency traces/ --formulas my_kernels.toml
      haiprof trace efficiency traces/ --json | jq '.steps[].mfu_ratio'
    """
    from haiprof.show.views.functions import efficiency_view
    from haiprof.trace_analysis.operator_efficiency import parse_peak
    from haiprof.trace_analysis.own_formulas import read_formulas
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    chosen, peaks, own = parse_steps(steps), parse_peak(peak), read_formulas(formulas)
    output = Output(json=as_json)
    analysis = TraceQuestions(traces, window=window)
    with ReadProgress(quiet=as_json):
        whole = analysis.step_efficiency(chosen, peaks=peaks, formulas=own)
        operators = analysis.efficiency(chosen, peaks=peaks, formulas=own)
    faults = print_faults(output, analysis, "efficiency")
    output.show(
        lambda _: efficiency_view(whole, operators),
        {
            "path": str(traces),
            "steps": whole.to_dicts(),
            "operators": operators.to_dicts(),
            "faults": faults,
        },
    )
