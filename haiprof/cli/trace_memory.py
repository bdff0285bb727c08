"""`haiprof memory-timeline`: memory over time in traces, and what was alive at the peak."""

from __future__ import annotations

from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output
from haiprof.cli.trace_arguments import Rank, ReadProgress, Traces, Window


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
    from haiprof.show.views.memory_timeline import memory_answers, memory_view
    from haiprof.trace_analysis.trace_questions import TraceQuestions

    output = Output(json=as_json)
    with ReadProgress(quiet=as_json):
        answers = memory_answers(TraceQuestions(traces, window=window), rank)
    output.show(lambda _: memory_view(answers), answers.as_json())
