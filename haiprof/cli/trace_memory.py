"""`haiprof memory-timeline`: memory over time in traces, and what was alive at the peak."""

from __future__ import annotations

from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.trace_arguments import Rank, Traces, Waiting, Window


def memory_timeline(
    traces: Traces, rank: Rank = None, window: Window = None, as_json: AsJson = False
) -> None:
    """Show memory over time and what was alive at the peak, by operator.

    From traces that were recorded with profile_memory=True.

    For example:

      haiprof memory-timeline trace.json

      haiprof memory-timeline traces/ --rank 3

      haiprof memory-timeline trace.json --json | jq '.at_peak[0]'
    """
    from haiprof.analysis.trace.facade import TraceAnalysis
    from haiprof.report.memory_view import memory_answers, memory_view

    output = Output(json=as_json)
    with Waiting(quiet=as_json):
        answers = memory_answers(TraceAnalysis(traces, window=window), rank)
    output.show(lambda _: memory_view(answers), answers.as_json())
