"""Arguments that the commands on running jobs share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from haiprof.cli.target import default_log_dir

if TYPE_CHECKING:
    from haiprof.linux.processes import Process
    from haiprof.live.find import RunningJob

JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="JOB",
        help="A running job: its id, its name, its script's name, the id of one of its processes, "
        "or its run directory. Left out: the only one that runs.",
        show_default=False,
    ),
]
LogDirs = Annotated[
    list[Path] | None,
    typer.Option(
        "--log-dir",
        metavar="DIR",
        help="Also look for jobs below this log directory (jobs of other nodes); may repeat.",
        show_default=False,
    ),
]


def log_dirs(named: list[Path] | None) -> list[Path]:
    """Where to look for jobs beside this node's processes."""
    return [*(named or []), default_log_dir()]


def job_or_processes(
    name: str | None, named: list[Path] | None
) -> tuple[RunningJob | None, list[Process]]:
    """The job of a command, or the processes of that name if none runs under haiprof.

    Raises:
        RunNotFoundError: Nothing of that name runs.
        UsageError: Several jobs fit, or a process belongs to another user.
    """
    from haiprof.base.errors import RunNotFoundError
    from haiprof.live.external_sampling import training_processes

    try:
        return the_job(name, named), []
    except RunNotFoundError:
        if name is None or Path(name).is_dir():
            raise
        return None, training_processes(name)


def the_job(name: str | None, named: list[Path] | None) -> RunningJob:
    """The job of a command.

    Raises:
        RunNotFoundError: It does not run, or none is named and none runs.
        UsageError: Several fit, or none is named and several run.
    """
    from haiprof.base.errors import RunNotFoundError, UsageError
    from haiprof.live.find import find_job, running_jobs

    if name is not None:
        return find_job(name, log_dirs(named))
    jobs = running_jobs(log_dirs(named))
    if not jobs:
        raise RunNotFoundError(
            "no job runs under haiprof here",
            hint="start one: haiprof train.py; or name a run directory",
        )
    if len(jobs) > 1:
        known = ", ".join(job.id for job in jobs)
        raise UsageError(f"several jobs run: {known}", hint="name one of them")
    return jobs[0]
