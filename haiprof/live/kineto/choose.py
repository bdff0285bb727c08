"""Chooses whether a job is traced through Kineto's daemon protocol, and finds its processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.live.ask import members
from haiprof.live.find import find_job
from haiprof.live.kineto.processes import KinetoProcess, of_process, of_run, speaks_kineto
from haiprof.run_format.layout import RunPaths

BACKENDS = ("auto", "hook", "kineto", "dynolog")


@dataclass(frozen=True, slots=True, kw_only=True)
class KinetoJob:
    """A job that is traced through Kineto's daemon protocol."""

    run: RunPaths | None
    """None where it does not run under haiprof."""
    processes: tuple[KinetoProcess, ...]
    elsewhere: tuple[str, ...] = ()
    """Other hosts with ranks of it; they are asked there."""


def kineto_job(
    name: str, log_dirs: Iterable[Path], *, backend: str, progress: Callable[[str], None]
) -> KinetoJob | None:
    """The job, if it is to be traced that way; None if haiprof's hook traces it."""
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
