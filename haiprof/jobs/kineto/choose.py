"""Whether a job that somebody names is reached through Kineto's side, and its processes then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from haiprof.errors import RunNotFoundError, UsageError
from haiprof.jobs.ask import members
from haiprof.jobs.find import find_job
from haiprof.jobs.kineto.processes import (
    KinetoProcess,
    of_process,
    of_run,
    speaks_kineto,
)
from haiprof.rundir.layout import RunPaths

BACKENDS = ("auto", "hook", "kineto", "dynolog")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoJob:
    """A job that is reached through Kineto's side."""

    run: RunPaths | None
    """Null where it does not run under haiprof."""
    processes: tuple[KinetoProcess, ...]
    elsewhere: tuple[str, ...] = ()
    """Other hosts with ranks of it; they are asked there."""


def kineto_job(
    name: str, log_dirs: Iterable[Path], *, backend: str, progress: Callable[[str], None]
) -> KinetoJob | None:
    """The job, where it is to be traced that way; null where haiprof's hook traces it.

    Args:
        name: As `jobs.find.find_job` takes it, or the id of a process started with
            KINETO_USE_DAEMON.
        log_dirs: See `jobs.find.running_jobs`.
        backend: One of `BACKENDS`; `auto` takes this way where the hook leaves the profiler alone.
        progress: Is told what is being waited for.

    Raises:
        RunNotFoundError: No such job runs.
        UsageError: No such backend; several jobs fit.
        MissingDataError: Its processes have not asked the agent.
    """
    if backend not in BACKENDS:
        raise UsageError(f"no backend {backend!r}", hint=f"one of {', '.join(BACKENDS)}")
    if backend == "hook":
        return None
    try:
        run = find_job(name, log_dirs).run
    except RunNotFoundError:
        if not name.isdecimal() or not speaks_kineto(int(name)):
            raise
        found = of_process(int(name), progress, by_agent=backend != "dynolog")
        return KinetoJob(run=None, processes=tuple(found))
    ranks = of_run(run)
    if backend == "auto" and not ranks:
        return None
    hosts = {member.host for member in members(run) if not member.here and member.host}
    return KinetoJob(run=run, processes=tuple(ranks), elsewhere=tuple(sorted(hosts)))
