"""`haiprof ps`: the jobs that run under haiprof now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from haiprof.cli.arguments import AsJson
from haiprof.cli.job_arguments import LogDirs, log_dirs
from haiprof.cli.output import Output
from haiprof.errors import HaiprofError

if TYPE_CHECKING:
    from haiprof.jobs.find import RunningJob


WithVerdict = Annotated[
    bool,
    typer.Option("--verdict", help="Also the verdict on the last two minutes, in one line each."),
]
_LAST_S = 120.0


def ps(log_dir: LogDirs = None, verdict: WithVerdict = False, as_json: AsJson = False) -> None:
    """List the jobs of this user that run under haiprof now: how far they are, and how fast.

    Looks at the processes of this node, and below the log directory for jobs of other nodes.

    For example:

      haiprof ps                            this node, and ./haiprof-logs

      haiprof ps --log-dir /shared/logs     also the jobs that write there, on whatever node

      haiprof ps --verdict                  with what makes each of them slow

      haiprof ps --json | jq '.jobs[] | {id, step, step_ns}'
    """
    from haiprof.jobs.find import running_jobs
    from haiprof.jobs.progress import job_progress
    from haiprof.report.jobs_view import jobs_view

    running = running_jobs(log_dirs(log_dir))
    jobs = [job_progress(job, verdict=_verdict(job) if verdict else None) for job in running]
    Output(json=as_json).show(lambda _: jobs_view(jobs), {"jobs": jobs})


def _verdict(job: RunningJob) -> str | None:
    """Of the last two minutes; null where nothing can be read yet."""
    from haiprof.analysis.analyzer import Analyzer
    from haiprof.diagnosis.engine import diagnose

    try:
        found = diagnose(Analyzer(job.run.root).last(_LAST_S), trace_limit_bytes=0)
        return found.headline if found.step_count else None
    except HaiprofError:
        return None
