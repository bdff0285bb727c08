"""A submitted job of any engine: how to find, follow and stop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from haiprof.base.errors import UsageError
from haiprof.launch.submit.emit import ENGINES, FORMS, check_engine
from haiprof.launch.submit.local import start_local
from haiprof.launch.submit.slurm import submit_slurm
from haiprof.launch.submit.spec import JobSpec


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A submitted job."""

    on: str
    id: str
    """As `haiprof ps` (here) or Slurm calls it."""
    log: Path
    target: Path
    """What `haiprof verdict` takes: the run directory, or the log directory where it is below."""
    stop: tuple[str, ...]
    """The command that ends it."""
    status: Callable[[], int | None]
    """Its exit status; None while it waits or runs."""
    poll_s: float
    """How often that may be asked: Slurm's controller answers everybody."""

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "on": self.on,
            "id": self.id,
            "log": str(self.log),
            "target": str(self.target),
            "stop": list(self.stop),
        }


def submit_job(
    spec: JobSpec, on: str, environ: Mapping[str, str], *, log_dir: Path
) -> SubmittedJob:
    """Gives a job to an engine."""
    if on not in ENGINES:
        hint = (
            f"--emit {on} prints what it takes" if on in FORMS else f"one of {', '.join(ENGINES)}"
        )
        raise UsageError(f"--on {on}: haiprof submits nothing there", hint=hint)
    check_engine(spec, on, ENGINES[on])
    if on == "slurm":
        taken = submit_slurm(spec, log_dir=log_dir)
        stop = ("scancel", taken.id)
        return SubmittedJob(
            on=on,
            id=taken.id,
            log=taken.log,
            target=taken.target,
            stop=stop,
            status=taken.status,
            poll_s=2.0,
        )
    job = start_local(spec, environ, log_dir=log_dir)
    stop = ("kill", str(job.process.pid))
    return SubmittedJob(
        on=on,
        id=job.id,
        log=job.log,
        target=job.run,
        stop=stop,
        status=job.status,
        poll_s=0.2,
    )
