"""`haiprof trace check`: what is wrong with the recording of traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from haiprof.cli.arguments import AsJson, ReadProgress, Traces, Window
from haiprof.cli.command_line import ExitStatus
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions


def trace_check(traces: Traces, window: Window = None, as_json: AsJson = False) -> None:
    """Show what is wrong with the recording of traces, and what becomes of the answers.

    Kernels with impossible ends, clocks that differ, records that were lost, events
    that were recorded twice, wrong units, missing ranks. Exit status 0 if nothing is
    wrong, else 1. What looks odd but is right is listed, too.

    For example:

      haiprof trace check traces/
      haiprof trace check trace.json.gz --json | jq '.findings[].check'
    """
    from haiprof.show.views.trace_files import check_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    output = Output(json=as_json)
    analysis = TraceQuestions(traces, window=window)
    with ReadProgress(quiet=as_json):
        checks, files = analysis.trace_check(), analysis.load_report()
    faults = int(checks["is_fault"].sum())
    output.show(
        lambda _: check_view(checks, files),
        {"path": str(traces), "fault_count": faults, "findings": checks.to_dicts()},
    )
    if faults:
        raise ExitStatus(1)


def print_faults(output: Output, analysis: TraceQuestions, *answers: str) -> list[str]:
    """Prints, before an answer, what is wrong with the recording that it rests on.

    Returns:
        The same lines, which stand in a command's JSON as `faults`.
    """
    from haiprof.trace_analysis.files import check_frame, fault_lines

    lines = fault_lines(check_frame(analysis.files), answers)
    for line in lines:
        output.hint(f"warning: {line}")
    return lines
