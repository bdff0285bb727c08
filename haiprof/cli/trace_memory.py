"""`haiprof trace memory`: memory over time in traces, and what was alive at the peak."""

from __future__ import annotations

from pathlib import Path

from haiprof.cli.arguments import AsJson, Rank, ReadProgress, Traces, Window
from haiprof.cli.output import Output


def memory_timeline(
    traces: Traces, rank: Rank = None, window: Window = None, as_json: AsJson = False
) -> None:
    """Show memory over time and what was alive at the peak, by operator.

    It needs traces that were recorded with --trace-memory (torch.profiler: profile_memory=True).
    A snapshot of the CUDA allocator (torch.cuda.memory, a pickle, which is not executed) is shown
    by line, with the sizes of its free blocks; torch.profiler's own memory timeline by category.

    For example:

      haiprof trace memory trace.json
      haiprof trace memory traces/ --rank 3
      haiprof trace memory snapshot.pickle
      haiprof trace memory trace.json --json | jq '.at_peak[0]'
    """
    output = Output(json=as_json)
    if _show_file(traces, output):
        return
    from haiprof.show.views.memory_timeline import memory_answers, memory_view
    from haiprof.trace_analysis.questions.all_ranks import TraceQuestions

    with ReadProgress(quiet=as_json):
        answers = memory_answers(TraceQuestions(traces, window=window), rank)
    output.show(lambda _: memory_view(answers), answers.as_json())


def _show_file(path: Path, output: Output) -> bool:
    """Shows a file that is no trace; False where it is one."""
    from haiprof.trace_analysis.memory_timeline import is_memory_timeline
    from haiprof.trace_format.memory_snapshot import is_pickle

    if is_pickle(path):
        from haiprof.show.views.memory_timeline import snapshot_answers, snapshot_view

        snapshot = snapshot_answers(path)
        output.show(lambda _: snapshot_view(snapshot), snapshot.as_json())
        return True
    if is_memory_timeline(path):
        from haiprof.show.views.memory_timeline import category_json, category_view
        from haiprof.trace_analysis.memory_timeline import memory_by_category

        timeline = memory_by_category(path)
        output.show(lambda _: category_view(timeline), category_json(timeline))
        return True
    return False
