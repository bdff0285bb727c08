"""`haiprof ls --live --once`: the jobs that run under haiprof now."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from haiprof.base.errors import HaiprofError
from haiprof.cli.arguments import AsJson, LogDirs, log_dirs
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output, stdout_console

if TYPE_CHECKING:
    from haiprof.live.find import RunningJob


WithVerdict = Annotated[
    bool, Opt("--verdict", "Also the verdict on the last two minutes, in one line each.")
]
_LAST_S = 120.0
_NO_JOB = "no job runs under haiprof here\nstart one: haiprof train.py"


def ps(log_dir: LogDirs = None, verdict: WithVerdict = False, as_json: AsJson = False) -> None:
    """List this user's jobs that run under haiprof now: their progress and their speed.

    Looks at the processes of this node, and below the log directory for jobs of other nodes.

    For example:

      haiprof ls --live --once                        this node, and ./haiprof-logs
      haiprof ls --live --once --log-dir /shared/logs also the jobs that write there
    """
    from haiprof.live.find import running_jobs

    output = Output(json=as_json)
    running = running_jobs(log_dirs(log_dir))
    if not running:  # no need to load what reads jobs
        output.show(lambda _: _NO_JOB, {"jobs": []})
        return
    from haiprof.live.follow import job_progress
    from haiprof.show.terminal import shows_colors
    from haiprof.show.views.jobs import jobs_view

    jobs = [job_progress(job, verdict=_verdict(job) if verdict else None) for job in running]
    output.show(lambda _: jobs_view(jobs, colored=shows_colors(stdout_console())), {"jobs": jobs})


def _verdict(job: RunningJob) -> str | None:
    """Of the last two minutes; None where nothing can be read yet."""
    from haiprof.diagnosis.engine import diagnose
    from haiprof.run_analysis.run_frames import RunFrames

    try:
        found = diagnose(RunFrames(job.run.root).last(_LAST_S), trace_limit_bytes=0)
        return found.headline if found.step_count else None
    except HaiprofError:
        return None
