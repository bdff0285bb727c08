"""A job on this machine, in the background: in a session of its own, with a log file and an id."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.log_addresses import is_address
from haiprof.base.options import ENV_ACTIVE, is_enabled, safe_name
from haiprof.base.safe_files import create_file, make_named_folder
from haiprof.launch.submit.node import haiprof_words, node_words, own_torchrun
from haiprof.launch.submit.spec import JobSpec
from haiprof.run_format.boot import remove_run
from haiprof.run_format.layout import RunPaths

START_S = 10.0
"""After so long without a run directory the job is taken to start slowly."""
_POLL_S = 0.02
_SHOWN_BYTES = 500


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """A job that was started in the background here."""

    id: str
    """The name of its run directory."""
    run: Path
    log: Path
    process: subprocess.Popen[bytes]
    """Its launcher: a signal to it is a signal to the job."""

    def status(self) -> int | None:
        """The job's exit status; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code


def start_local(spec: JobSpec, environ: Mapping[str, str], *, log_dir: Path) -> LocalJob:
    """Starts a job, and waits until it runs."""
    if spec.nodes > 1:
        raise UsageError(
            f"--nodes {spec.nodes}: this is one machine",
            hint="--on slurm, or --emit FORM for another engine",
        )
    check_script(spec)
    log_dir = log_dir.absolute()
    identity = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(8).hex()}"
    identity = safe_name(spec.options.get("run-id", identity))
    folder = "local-dir" if is_address(spec.options.get("log-dir", "")) else "log-dir"
    spec = replace(spec, options={**spec.options, folder: str(log_dir), "run-id": identity})
    run = log_dir / f"{safe_name(spec.name)}-{identity}"
    log = run.with_name(f"{run.name}.log")
    job = LocalJob(id=run.name, run=run, log=log, process=_start(spec, environ, log))
    if is_enabled(environ):
        _wait_for_start(job)
    return job


def check_script(spec: JobSpec) -> None:
    """Whether the script is there."""
    if not spec.module and spec.is_python and not Path(spec.program).is_file():
        raise UsageError(f"{spec.program}: no such file", hint="haiprof submit SCRIPT.py")


def local_words(spec: JobSpec) -> list[str]:
    """The command: torchrun where a number of ranks is asked for, else the program alone."""
    if spec.is_python and (spec.ranks_per_node or spec.gpus_per_node):
        return node_words(spec, rendezvous=(), haiprof=list(spec.haiprof), torchrun=own_torchrun())
    program = ["-m", spec.program] if spec.module else [spec.program]
    return [*spec.haiprof, *haiprof_words(spec), "--", *program, *spec.arguments]


def _start(spec: JobSpec, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    try:
        make_named_folder(log.parent)
        with os.fdopen(create_file(log, below=log.parent), "wb") as file:
            return subprocess.Popen(
                local_words(spec),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=_environment(spec, environ),
                start_new_session=True,  # no terminal: closing one does not end the job
            )
    except OSError as error:
        raise UsageError(f"cannot start into {log}: {error.strerror or error}") from None


def _environment(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment; it is a job of its own, also where this one is recorded."""
    passed = {name: value for name, value in environ.items() if name != ENV_ACTIVE}
    active = environ.get(ENV_ACTIVE)
    if active and "PYTHONPATH" in passed:
        passed["PYTHONPATH"] = remove_run(passed["PYTHONPATH"], active)
    return {**passed, **spec.environment}


def _wait_for_start(job: LocalJob) -> None:
    until = time.monotonic() + START_S
    run = RunPaths(job.run)
    while time.monotonic() < until:
        status = job.status()
        if status == 0 or any(run.node_folders()):  # the agent starts right after the job
            return
        if status is not None:
            words = job.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").split()
            raise HaiprofError(
                f"the job ended at once with exit status {status}: {' '.join(words)}",
                hint=f"see {job.log}",
            )
        time.sleep(_POLL_S)
