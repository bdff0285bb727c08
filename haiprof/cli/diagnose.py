"""`haiprof diagnose`: judges a run, or the next seconds of a running job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson, Everything
from haiprof.cli.job_arguments import LogDirs, the_job
from haiprof.cli.output import Output
from haiprof.cli.target import open_target

if TYPE_CHECKING:
    from haiprof.run_analysis.run_frames import RunFrames
    from haiprof.run_format.layout import RunPaths

_TRACE_STEPS = 5
Target = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN_OR_JOB",
        help="A run or log directory; or a running job: its id, name, script, or a process id. "
        "Left out: the newest run, with --collect the only running job.",
        show_default=False,
    ),
]
Collect = Annotated[
    bool, typer.Option("--collect", help="The job runs: watch it for --time, and judge that part.")
]
Seconds = Annotated[float, typer.Option("--time", metavar="SECONDS", help="How long to watch.")]
SaveTraces = Annotated[
    bool,
    typer.Option("--save-traces", help="With --collect: also trace some steps of all ranks."),
]


def diagnose(
    target: Target = None, collect: Collect = False, seconds: Seconds = 20.0,
    save_traces: SaveTraces = False, log_dir: LogDirs = None, as_json: AsJson = False,
    everything: Everything = False,
) -> None:  # fmt: skip
    """Find out why a job is slow: causes in order, with proof and remedy, and what was checked.

    The result is also kept as report/diagnosis.json in the run directory (docs/diagnosis.md).

    For example:

      haiprof diagnose                                  the newest run

      haiprof diagnose train.py --collect --time 20     the next 20 s of that running job

      haiprof diagnose train.py --collect --save-traces       with a trace of some steps

      haiprof diagnose RUN --json | jq '.findings[0] | {slug, cause, ranks}'
    """
    from haiprof.diagnosis.document import as_document, save_document
    from haiprof.diagnosis.engine import diagnose as judge
    from haiprof.show.card import verdict_card
    from haiprof.show.run_header import manifest_or_none, run_header

    if save_traces and not collect:
        raise UsageError("--save-traces goes with --collect: what has ended has no more steps")
    if seconds <= 0:
        raise UsageError(f"--time {seconds:g}: expected more than 0 seconds")
    since = None
    if collect:
        run = the_job(target, log_dir).run
        since = _watch(run, seconds, traces=save_traces)
        analyzer = open_target(run.root)
    else:
        analyzer = _found(target, log_dir)
    found = judge(analyzer, since_ns=since)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    content = as_document(found, since_ns=since)
    save_document(content, analyzer.run)
    output = Output(json=as_json)
    output.show(
        lambda width: verdict_card(found, header, width=width, everything=everything), content
    )
    output.hint(f"kept in {analyzer.run.diagnosis_json}")


def _watch(run: RunPaths, seconds: float, *, traces: bool) -> int:
    from haiprof.live.collect import collect

    trace = {"count": _TRACE_STEPS} if traces else None
    (since, _), traced = collect(run, seconds, trace=trace, progress=print_message)
    if traced is not None and not traced.done:
        why = next((rank.reason for rank in traced.ranks if rank.reason), "no rank answered")
        print_message(f"no trace: {why}")
    return since


def _found(target: str | None, log_dir: list[Path] | None) -> RunFrames:
    """The run of a directory, or of a running job of that name."""
    if target is None or Path(target).exists():
        return open_target(None if target is None else Path(target))
    return open_target(the_job(target, log_dir).run.root)
