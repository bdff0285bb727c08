"""Every engine by name: what it takes of a job, and what `--emit` prints for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from haiprof.base.errors import UsageError
from haiprof.launch.submit.kubernetes import jobset, kubernetes_job, trainjob
from haiprof.launch.submit.ray import ray_driver
from haiprof.launch.submit.sbatch import sbatch_script
from haiprof.launch.submit.skypilot import skypilot
from haiprof.launch.submit.slurm import check_torchrun
from haiprof.launch.submit.spec import JobSpec

# Flag by field of what not every engine takes.
_FLAGS = {
    "gpu_type": "--gpu-type",
    "cpus_per_node": "--cpus-per-node",
    "time_limit_s": "--time-limit",
    "requeue": "--requeue",
    "partition": "--partition",
    "account": "--account",
    "directives": "--sbatch",
    "image": "--image",
    "claim": "--claim",
}
_SLURM = frozenset(
    {"gpu_type", "cpus_per_node", "time_limit_s", "requeue", "partition", "account", "directives"}
)
_PODS = frozenset({"cpus_per_node", "time_limit_s", "requeue", "image", "claim"})
ENGINES = {"local": frozenset[str](), "slurm": _SLURM}
"""What `--on` takes, with the fields of `JobSpec` that each can use."""


@dataclass(frozen=True)
class Form:
    """What `--emit` can print."""

    text: Callable[[JobSpec], str]
    takes: frozenset[str]
    next: str
    """The next command for the user."""


FORMS = {
    "slurm": Form(sbatch_script, _SLURM, "sbatch FILE"),
    "kubernetes": Form(kubernetes_job, _PODS, "kubectl apply -f FILE"),
    "jobset": Form(jobset, _PODS, "kubectl apply -f FILE"),
    "trainjob": Form(trainjob, frozenset({"cpus_per_node", "image"}), "kubectl apply -f FILE"),
    "ray": Form(
        ray_driver, frozenset({"cpus_per_node"}), "ray job submit --working-dir . -- python FILE"
    ),
    "skypilot": Form(
        skypilot, frozenset({"gpu_type", "cpus_per_node", "requeue", "image"}), "sky launch FILE"
    ),
}


def check_engine(spec: JobSpec, name: str, takes: frozenset[str]) -> None:
    """Checks that an engine supports all options of a job."""
    for field, flag in _FLAGS.items():
        if getattr(spec, field) and field not in takes:
            able = [n for n, fields in ENGINES.items() if field in fields]
            able += [n for n, form in FORMS.items() if field in form.takes and n not in able]
            raise UsageError(
                f"{flag}: nothing that {name} takes", hint=f"taken by {', '.join(able)}"
            )


def emit(spec: JobSpec, form: str) -> str:
    """A job in an engine's own language."""
    if form not in FORMS:
        raise UsageError(f"--emit {form}: no such form", hint=f"one of {', '.join(FORMS)}")
    check_torchrun(spec)
    check_engine(spec, form, FORMS[form].takes)
    return FORMS[form].text(spec)
