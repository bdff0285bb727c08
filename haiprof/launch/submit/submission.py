"""A submitted job of any engine: emitted, started here or by submitit, followed, stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from haiprof.base.errors import HaiprofError, MissingExtraError, UsageError, convert_os_errors
from haiprof.base.log_addresses import is_address
from haiprof.base.options import ENV_ACTIVE, ENV_RENDEZVOUS, is_enabled, safe_name
from haiprof.base.safe_files import create_file, make_named_folder, make_private
from haiprof.launch.submit import engines
from haiprof.run_format.boot import remove_run
from haiprof.run_format.layout import RunPaths

if TYPE_CHECKING:
    import submitit

START_S = 10.0  # after so long without a run directory the job is taken to start slowly
_POLL_S = 0.02
_SHOWN_BYTES = 500


@dataclass(frozen=True, kw_only=True)
class SubmittedJob:
    """A submitted job."""

    on: str
    id: str  # as `haiprof ls --live` (here) or Slurm calls it
    log: Path  # of all nodes
    target: Path  # what `haiprof verdict` takes: the run directory, or the log directory above
    stop: tuple[str, ...]  # the command that ends it
    status: Callable[[], int | None]  # its exit status; None while it waits or runs
    poll_s: float  # how often that may be asked: Slurm's controller answers everybody

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "on": self.on, "id": self.id, "log": str(self.log), "target": str(self.target),
            "stop": list(self.stop),
        }  # fmt: skip


def start_local(
    spec: engines.JobSpec, environ: Mapping[str, str], *, log_dir: Path
) -> SubmittedJob:
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
    process = _start(spec, environ, log)

    def status() -> int | None:
        """Of the job's launcher: a signal to it is a signal to the job."""
        code = process.poll()
        return code if code is None or code >= 0 else 128 - code

    job = SubmittedJob(
        on="local", id=run.name, log=log, target=run, stop=("kill", str(process.pid)),
        status=status, poll_s=0.2,
    )  # fmt: skip
    if is_enabled(environ):
        _wait_for_start(job)
    return job


def check_script(spec: engines.JobSpec) -> None:
    """Whether the script is there."""
    if not spec.module and spec.is_python and not Path(spec.program).is_file():
        raise UsageError(f"{spec.program}: no such file", hint="haiprof submit SCRIPT.py")


def local_words(spec: engines.JobSpec) -> list[str]:
    """The command: torchrun where a number of ranks is asked for, else the program alone."""
    if spec.is_python and (spec.ranks_per_node or spec.gpus_per_node):
        return engines.node_words(
            spec, rendezvous=(), haiprof=list(spec.haiprof), torchrun=engines.own_torchrun()
        )
    program = ["-m", spec.program] if spec.module else [spec.program]
    return [*spec.haiprof, *engines.haiprof_words(spec), "--", *program, *spec.arguments]


def _start(spec: engines.JobSpec, environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    with convert_os_errors(UsageError, f"cannot start into {log}"):
        make_named_folder(log.parent)
        with os.fdopen(create_file(log, below=log.parent), "wb") as file:
            return subprocess.Popen(
                local_words(spec), env=_environment(spec, environ),
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,  # no terminal: closing one does not end the job
            )  # fmt: skip


def _environment(spec: engines.JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The job's environment; it is a job of its own, also where this one is recorded."""
    passed = {name: value for name, value in environ.items() if name != ENV_ACTIVE}
    active = environ.get(ENV_ACTIVE)
    if active and "PYTHONPATH" in passed:
        passed["PYTHONPATH"] = remove_run(passed["PYTHONPATH"], active)
    return {**passed, **spec.environment}


def _wait_for_start(job: SubmittedJob) -> None:
    until = time.monotonic() + START_S
    run = RunPaths(job.target)
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


_OVER = frozenset(
    {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL",
     "DEADLINE", "OUT_OF_MEMORY", "REVOKED"}
)  # fmt: skip
_OWN_DIRECTIVES = ("array", "export", "output", "error", "signal", "wrap")
_FIELD = re.compile(r"(\w+)=(\S*)")


@dataclass(frozen=True)
class NodeTask:
    """What submitit carries to each node, and calls there."""

    spec: engines.JobSpec
    haiprof: tuple[str, ...]
    torchrun: str

    def __call__(self) -> int:
        """Runs haiprof on this node."""
        if not self._requeues:
            _ignore_usr2()  # submitit asks Slurm for it 90 s before the limit, to requeue
        meeting = engines.c10d(os.environ[ENV_RENDEZVOUS], os.environ["SLURM_JOB_ID"])
        words = engines.node_words(
            self.spec, rendezvous=meeting, haiprof=self.haiprof, torchrun=self.torchrun
        )
        own = {ENV_ACTIVE, ENV_RENDEZVOUS, "SUBMITIT_EXECUTOR", "SUBMITIT_FOLDER"}
        kept = {name: value for name, value in os.environ.items() if name not in own}
        environment = {**kept, **self.spec.environment}
        done = subprocess.run(words, env=environment, preexec_fn=_ignore_usr2, check=False)
        if status := done.returncode:
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


def _ignore_usr2() -> None:
    """Slurm signals every process of a step: a rank without a handler would be ended by it."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def slurm_status(job: str) -> int | None:
    """The exit status of a job of Slurm's; None while it waits or runs."""
    words = ["scontrol", "--oneliner", "show", "job", job]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    fields = dict(_FIELD.findall(done.stdout))
    if "JobState" not in fields:
        reason = " ".join(done.stderr.split()) or "no answer"
        raise HaiprofError(f"Slurm does not report the state of job {job}: {reason}")
    if fields["JobState"] not in _OVER:
        return None
    code, _, number = fields.get("ExitCode", "").partition(":")
    if number not in ("", "0"):
        return 128 + int(number)
    return int(code or 0) or int(fields["JobState"] != "COMPLETED")


def submit_slurm(spec: engines.JobSpec, *, log_dir: Path) -> SubmittedJob:
    """Submits a job; its target is named as `run_directories` will name its run."""
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
    task = NodeTask(spec, haiprof=spec.haiprof, torchrun=engines.own_torchrun())
    try:
        # For submitit's files, which hold the job's true command and environment, and are executed
        # by the nodes (pickle): nobody else may read them, or write there. Not by umask: sbatch
        # hands that on to the job.
        make_named_folder(folder.parent)
        make_private(folder, below=folder.parent)
        executor.update_parameters(**_parameters(spec, folder))
        with _outside_jobs(), redirect_stderr(StringIO()):  # submitit prints what it raises
            job = executor.submit(task)
    except (failed, subprocess.CalledProcessError) as error:
        raise UsageError(f"Slurm did not take the job: {_last_words(error)}") from None
    except OSError as error:
        raise UsageError(f"cannot submit from {folder}: {error.strerror or error}") from None
    name = f"{spec.name}-{spec.options.get('run-id', f'{job.job_id}.0')}"
    target = log_dir / name if spec.nodes > 1 or "run-id" in spec.options else log_dir
    return SubmittedJob(
        on="slurm", id=job.job_id, log=folder / f"{job.job_id}.log", target=target,
        stop=("scancel", job.job_id), status=partial(slurm_status, job.job_id), poll_s=2.0,
    )  # fmt: skip


def check_torchrun(spec: engines.JobSpec) -> None:
    """Whether torchrun can start the program on each node."""
    if not spec.is_python:
        raise UsageError(
            f"{spec.program}: torchrun starts Python scripts and modules",
            hint="SCRIPT.py or -m MODULE; for another program put haiprof in its own srun line",
        )


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
    """Hides the variables of a Slurm job in which this runs: they are not the new one's."""
    # submitit's own `clean_env` also hides SLURM_CONF and what a site sets for sbatch.
    prefixes = ("SLURM_", "SLURMD_", "SUBMITIT_")
    inside = "SLURM_JOB_ID" in os.environ
    names = {n for n in os.environ if n.startswith(prefixes) and n != "SLURM_CONF"}
    hidden = {name: os.environ.pop(name) for name in names} if inside else {}
    try:
        yield
    finally:
        os.environ.update(hidden)


def _parameters(spec: engines.JobSpec, folder: Path) -> dict[str, Any]:
    """By the names that submitit has, so that it knows them too; the rest as Slurm's."""
    limit_s = spec.time_limit_s
    own = {"job-name", "nodes", "ntasks-per-node", "open-mode"}
    options = {k: v or True for k, v in engines.sbatch_options(spec).items() if k not in own}
    return {
        "job_name": spec.name, "nodes": spec.nodes, "ntasks_per_node": 1,
        "time": None if limit_s is None else max(1, limit_s // 60),
        "wckey": None, "stderr_to_stdout": True,
        "setup": [f"export {ENV_RENDEZVOUS}={engines.ENDPOINT}"],
        "srun_args": [*engines.srun_options(spec), "--output", str(folder / "%j.log"),
                      "--open-mode=append"],
        "additional_parameters": options,
    }  # fmt: skip


def _last_words(error: Exception) -> str:
    text = getattr(error, "stderr", None) or getattr(error, "output", None) or str(error)
    text = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return " ".join(text.split())[-400:]


# Flag by field of what not every engine takes.
_FLAGS = {
    "gpu_type": "--gpu-type", "cpus_per_node": "--cpus-per-node", "time_limit_s": "--time-limit",
    "requeue": "--requeue", "partition": "--partition", "account": "--account",
    "directives": "--sbatch", "image": "--image", "claim": "--claim",
}  # fmt: skip
_SLURM = frozenset(
    {"gpu_type", "cpus_per_node", "time_limit_s", "requeue", "partition", "account", "directives"}
)
_PODS = frozenset({"cpus_per_node", "time_limit_s", "requeue", "image", "claim"})
ENGINES = {"local": frozenset[str](), "slurm": _SLURM}
"""What `--on` takes, with the fields of `JobSpec` that each can use."""


@dataclass(frozen=True)
class Form:
    """What `--emit` can print."""

    text: Callable[[engines.JobSpec], str]
    takes: frozenset[str]
    next: str  # the next command for the user


FORMS = {
    "slurm": Form(engines.sbatch_script, _SLURM, "sbatch FILE"),
    "kubernetes": Form(engines.kubernetes_job, _PODS, "kubectl apply -f FILE"),
    "jobset": Form(engines.jobset, _PODS, "kubectl apply -f FILE"),
    "trainjob": Form(engines.trainjob, frozenset({"cpus_per_node", "image"}),
                     "kubectl apply -f FILE"),
    "ray": Form(engines.ray_driver, frozenset({"cpus_per_node"}),
                "ray job submit --working-dir . -- python FILE"),
    "skypilot": Form(engines.skypilot, frozenset({"gpu_type", "cpus_per_node", "requeue", "image"}),
                     "sky launch FILE"),
}  # fmt: skip


def check_engine(spec: engines.JobSpec, name: str, takes: frozenset[str]) -> None:
    """Checks that an engine supports all options of a job."""
    for field, flag in _FLAGS.items():
        if getattr(spec, field) and field not in takes:
            able = [n for n, fields in ENGINES.items() if field in fields]
            able += [n for n, form in FORMS.items() if field in form.takes and n not in able]
            raise UsageError(
                f"{flag}: nothing that {name} takes", hint=f"taken by {', '.join(able)}"
            )


def emit(spec: engines.JobSpec, form: str) -> str:
    """A job in an engine's own language."""
    if form not in FORMS:
        raise UsageError(f"--emit {form}: no such form", hint=f"one of {', '.join(FORMS)}")
    check_torchrun(spec)
    check_engine(spec, form, FORMS[form].takes)
    return FORMS[form].text(spec)


def submit_job(
    spec: engines.JobSpec, on: str, environ: Mapping[str, str], *, log_dir: Path
) -> SubmittedJob:
    """Gives a job to an engine."""
    if on not in ENGINES:
        known = f"one of {', '.join(ENGINES)}"
        hint = f"--emit {on} prints what it takes" if on in FORMS else known
        raise UsageError(f"--on: unknown target {on!r}", hint=hint)
    check_engine(spec, on, ENGINES[on])
    if on == "slurm":
        return submit_slurm(spec, log_dir=log_dir)
    return start_local(spec, environ, log_dir=log_dir)


def follow(
    log: Path, status: Callable[[], int | None], out: BinaryIO | None, *, poll_s: float
) -> int:
    """Copies a job's log while it grows."""
    offset = 0
    while True:
        ended = status()  # before the log is read, so that the last lines are in it
        if out is not None:
            with suppress(FileNotFoundError), log.open("rb") as file:
                file.seek(offset)
                shutil.copyfileobj(file, out)
                offset = file.tell()
            out.flush()
        if ended is not None:
            return ended
        time.sleep(poll_s)
