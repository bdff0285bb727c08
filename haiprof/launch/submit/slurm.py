"""Slurm through submitit (extra `slurm`): one task per node, each of which runs haiprof once."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError
from haiprof.base.options import ENV_ACTIVE, ENV_RENDEZVOUS
from haiprof.base.safe_files import make_named_folder, make_private
from haiprof.launch.submit.local import check_script
from haiprof.launch.submit.node import c10d, node_words, own_torchrun
from haiprof.launch.submit.sbatch import ENDPOINT, sbatch_options, srun_options
from haiprof.launch.submit.spec import JobSpec

if TYPE_CHECKING:
    import submitit

_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
     "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)  # fmt: skip
_OWN_DIRECTIVES = ("array", "export", "output", "error", "signal", "wrap")
_FIELD = re.compile(r"(\w+)=(\S*)")


@dataclass(frozen=True)
class NodeTask:
    """What submitit carries to each node, and calls there."""

    spec: JobSpec
    haiprof: tuple[str, ...]
    torchrun: str

    def __call__(self) -> int:
        """Runs haiprof on this node."""
        if not self._requeues:
            # submitit asks Slurm for it 90 s before the limit, to requeue what can be.
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        status = subprocess.run(
            self._words(), env=self._environment(), preexec_fn=_ignore_usr2, check=False
        ).returncode
        if status:
            raise SystemExit(status if status > 0 else 128 - status)
        return 0

    def checkpoint(self) -> submitit.helpers.DelayedSubmission | None:
        """What submitit requeues before the time limit; nothing unless it was asked for."""
        import submitit

        return submitit.helpers.DelayedSubmission(self) if self._requeues else None

    @property
    def _requeues(self) -> bool:
        """Whether submitit may: it reckons with the time limit. Slurm requeues without it, too."""
        return self.spec.requeue and self.spec.time_limit_s is not None

    def _words(self) -> list[str]:
        endpoint, job = os.environ[ENV_RENDEZVOUS], os.environ["SLURM_JOB_ID"]
        return node_words(
            self.spec,
            rendezvous=c10d(endpoint, job),
            haiprof=self.haiprof,
            torchrun=self.torchrun,
        )

    def _environment(self) -> dict[str, str]:
        own = {ENV_ACTIVE, ENV_RENDEZVOUS, "SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER"}
        kept = {name: value for name, value in os.environ.items() if name not in own}
        return {**kept, **self.spec.environment}


def _ignore_usr2() -> None:
    """Slurm signals every process of a step: a rank without a handler would be ended by it."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """A job that Slurm took."""

    id: str
    log: Path
    """Of all nodes."""
    target: Path
    """Its run directory as `run_directories` will name it; of one node only the log directory."""

    def status(self) -> int | None:
        """Its exit status; None while it waits or runs."""
        words = ["scontrol", "--oneliner", "show", "job", self.id]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        fields = dict(_FIELD.findall(done.stdout))
        if "JobState" not in fields:
            reason = " ".join(done.stderr.split()) or "no answer"
            raise HaiprofError(f"Slurm does not report the state of job {self.id}: {reason}")
        if fields["JobState"] not in _OVER:
            return None
        code, _, number = fields.get("ExitCode", "").partition(":")
        if number not in ("", "0"):
            return 128 + int(number)
        return int(code or 0) or int(fields["JobState"] != "COMPLETED")


def submit_slurm(spec: JobSpec, *, log_dir: Path) -> SlurmJob:
    """Submits a job."""
    check_script(spec)
    check_torchrun(spec)
    for name in _OWN_DIRECTIVES:
        if name in spec.directives:
            raise UsageError(
                f"--sbatch {name}: with --on slurm it is set by submitit",
                hint="haiprof submit ... --emit slurm > job.sh, and sbatch job.sh",
            )
    folder = log_dir.absolute() / "slurm"
    if "%" in str(folder):
        raise UsageError(f"{folder}: Slurm reads % in the names of logs", hint="another --log-dir")
    executor, failed = _executor(folder)
    _make_private(folder)
    task = NodeTask(spec, haiprof=spec.haiprof, torchrun=own_torchrun())
    try:
        executor.update_parameters(**_parameters(spec, folder))
        with (
            _outside_jobs(),
            redirect_stderr(StringIO()),
        ):  # submitit prints what it raises
            job = executor.submit(task)
    except (failed, subprocess.CalledProcessError) as error:
        raise UsageError(f"Slurm did not take the job: {_last_words(error)}") from None
    except OSError as error:
        raise UsageError(f"cannot submit from {folder}: {error.strerror or error}") from None
    name = f"{spec.name}-{spec.options.get('run-id', f'{job.job_id}.0')}"
    target = log_dir / name if spec.nodes > 1 or "run-id" in spec.options else log_dir
    return SlurmJob(id=job.job_id, log=folder / f"{job.job_id}.log", target=target)


def check_torchrun(spec: JobSpec) -> None:
    """Whether torchrun can start the program on each node."""
    if not spec.is_python:
        raise UsageError(
            f"{spec.program}: torchrun starts Python scripts and modules",
            hint="SCRIPT.py or -m MODULE; for another program put haiprof in its own srun line",
        )


def _make_private(folder: Path) -> None:
    """Makes the folder of submitit's files: they hold the job's true command and environment.

    The nodes execute what lies there (pickle), so that nobody else may write into it either. Not by
    umask: sbatch hands that on to the job.
    """
    try:
        make_named_folder(folder.parent)
        make_private(folder, below=folder.parent)
    except OSError as error:
        raise UsageError(f"cannot submit from {folder}: {error.strerror or error}") from None


def _executor(folder: Path) -> tuple[Any, type[Exception]]:
    try:
        import submitit
        from submitit.core.utils import FailedJobError
    except ImportError:
        raise MissingExtraError(
            "--on slurm needs submitit, which is not installed",
            hint="pip install 'haiprof[slurm]'; or --emit slurm prints the script for sbatch",
        ) from None
    try:
        return submitit.SlurmExecutor(folder), FailedJobError
    except RuntimeError:
        raise UsageError(
            "--on slurm: no srun here", hint="run it on a node of Slurm's, or --emit slurm"
        ) from None


@contextmanager
def _outside_jobs() -> Iterator[None]:
    """Hides the variables of a Slurm job in which this runs: they are not the new one's.

    submitit's own `clean_env` also hides SLURM_CONF and what a site sets for sbatch.
    """
    prefixes = ("SLURM_", "SLURMD_", "SUBMITIT_")
    inside = "SLURM_JOB_ID" in os.environ
    names = {n for n in os.environ if n.startswith(prefixes) and n != "SLURM_CONF"}
    hidden = {name: os.environ.pop(name) for name in names} if inside else {}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _parameters(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """By the names that submitit has, so that it knows them too; the rest as Slurm's."""
    limit_s = spec.time_limit_s
    own = {"job-name", "nodes", "ntasks-per-node", "open-mode"}
    options = {k: v or True for k, v in sbatch_options(spec).items() if k not in own}
    return {
        "job_name": spec.name,
        "nodes": spec.nodes,
        "ntasks_per_node": 1,
        "time": None if limit_s is None else max(1, limit_s // 60),
        "wckey": None,
        "stderr_to_stdout": True,
        "setup": [f"export {ENV_RENDEZVOUS}={ENDPOINT}"],
        "srun_args": [
            *srun_options(spec),
            "--output",
            str(folder / "%j.log"),
            "--open-mode=append",
        ],
        "additional_parameters": options,
    }


def _last_words(error: Exception) -> str:
    text = getattr(error, "stderr", None) or getattr(error, "output", None) or str(error)
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return " ".join(text.split())[-400:]
