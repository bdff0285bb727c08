"""`haiprof submit`: a job in the background here, on Slurm's nodes, or as another engine's file."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from haiprof.base.messages import print_message
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.output import Output
from haiprof.cli.shared import OUTPUT

if TYPE_CHECKING:
    from haiprof.launch.submit.engines import JobSpec
    from haiprof.launch.submit.submission import SubmittedJob

_JOB, _NODE, _SITE = "The job", "Each node", "Where it runs"


def submit(
    words: list[str] | None = argument(
        "SCRIPT -- ARGUMENTS...",
        "The training script, and after -- what is the script's own, untouched.",
    ),
    module: str | None = option("-m --module MODULE", "As python -m.", group=_JOB),
    nodes: int = option("-n --nodes N", "How many nodes (default: 1).", 1, group=_NODE),
    nproc_per_node: int | None = option(
        "--nproc-per-node N", "Processes, started by torchrun (default: GPUs, or 1).", group=_NODE
    ),
    gpus_per_node: int | None = option("--gpus-per-node N", "GPUs to ask for.", group=_NODE),
    gpu_type: str | None = option("--gpu-type NAME", "Which GPUs, such as H100.", group=_NODE),
    cpus_per_node: int | None = option("--cpus-per-node N", "CPU cores to ask for.", group=_NODE),
    options: list[str] | None = option(
        "--options profile.NAME=VALUE", "Any option of haiprof; may repeat.", group=_JOB
    ),
    time: str | None = option("--time SECONDS", "For how long to record.", group=_JOB),
    warmup: str | None = option("--warmup SECONDS", "How long to wait before that.", group=_JOB),
    trace: bool = option("--trace", "Trace some steps with torch.profiler.", group=_JOB),
    recorder: str | None = option("--recorder LIST", "Such as basic,gpu.", group=_JOB),
    log_dir: str | None = option(
        "--log-dir DIR", "Where run directories go; all nodes must see it.", group=_JOB
    ),
    name: str | None = option("--name NAME", "Default: the script's.", group=_JOB),
    env: list[str] | None = option(
        "-e --env NAME[=VALUE]",
        "Set for the job; may repeat. Without VALUE: as it is here. "
        "Here and on Slurm the job also gets this shell's environment.",
        group=_JOB,
    ),
    on: str = option("--on local|slurm", "Where to run.", "local", group=_SITE),
    emit: str | None = option(
        "--emit FORM",
        "Submit nothing; print the file for slurm, kubernetes, jobset, trainjob, ray or skypilot.",
        group=_SITE,
    ),
    time_limit: str | None = option(
        "--time-limit TIME", "MINUTES, HH:MM:SS or DAYS-HH:MM:SS.", group=_SITE
    ),
    requeue: bool = option(
        "--requeue", "Start it again after it was preempted or reached its time limit.", group=_SITE
    ),
    partition: str | None = option("--partition NAME", "Slurm's partition.", group=_SITE),
    account: str | None = option("--account NAME", "Slurm's account.", group=_SITE),
    sbatch: list[str] | None = option(
        "--sbatch NAME[=VALUE]", "Any option of sbatch; may repeat.", group=_SITE
    ),
    image: str | None = option("--image IMAGE", "Container image of pods.", group=_SITE),
    claim: str | None = option(
        "--claim NAME", "Volume claim, mounted at the log directory.", group=_SITE
    ),
    wait: bool = option("--wait", "Show the job's log, end with its exit status.", group=_SITE),
    output: Output = OUTPUT,
) -> None:
    """Start a training job in the background, here or on a cluster, recorded by haiprof.

    Each node runs one haiprof, and in it one torchrun; all write one run directory. Here the job
    outlives this terminal, and `kill PID` ends it. docs/submit.md shows every engine.

    For example:

      haiprof submit train.py --options profile.time=120 -- --lr 0.1
      haiprof submit train.py --on slurm --nodes 8 --gpus-per-node 8 --time-limit 12:00:00
      haiprof submit train.py --nodes 8 --gpus-per-node 8 --emit slurm > job.sh
    """
    from haiprof.base.errors import UsageError
    from haiprof.cli.names import installed_haiprof
    from haiprof.launch.submit import engines as specs
    from haiprof.launch.submit.engines import parse_time_limit as limit

    given = {"time": time, "warmup": warmup, "trace": "1" if trace else None,
             "recorder": recorder, "log-dir": log_dir, "name": name}  # fmt: skip
    program, *arguments = [*([] if module is None else [module]), *(words or [])] or [""]
    if not program:
        raise UsageError("submit: no script", hint="haiprof submit train.py; haiprof submit --help")
    texts, folder = specs.resolve_options(options or [], given, os.environ, program=program)
    spec = specs.JobSpec(
        program=program, module=module is not None, arguments=tuple(arguments),
        name=texts["name"], options=texts, nodes=nodes, ranks_per_node=nproc_per_node,
        gpus_per_node=gpus_per_node, gpu_type=gpu_type, cpus_per_node=cpus_per_node,
        time_limit_s=None if time_limit is None else limit(time_limit),
        environment=specs.parse_environment(env or [], os.environ), requeue=requeue,
        partition=partition, account=account, directives=specs.parse_directives(sbatch or []),
        image=image, claim=claim, haiprof=installed_haiprof(),
    )  # fmt: skip
    if emit is not None:
        _emit(spec, emit, output)
    elif status := _submit(spec, on, folder, output, wait=wait):
        raise ExitStatus(status)


def _emit(spec: JobSpec, form: str, output: Output) -> None:
    from haiprof.launch.submit.submission import FORMS, emit

    text = emit(spec, form)
    if output.json:
        output.show(lambda _: text, {"form": form, "text": text, "next": FORMS[form].next})
    else:
        sys.stdout.write(text)  # as it is: rich would break lines and read [...]
    output.hint(f"nothing was submitted; next: {FORMS[form].next}")


def _submit(spec: JobSpec, on: str, log_dir: Path, output: Output, *, wait: bool) -> int:
    from haiprof.launch.submit.submission import submit_job

    job = submit_job(spec, on, os.environ, log_dir=log_dir)
    status = None
    if not output.json:
        print_message(f"submitted {job.id}; log: {job.log}")
        print_message(f"to stop it: {shlex.join(job.stop)}")
    if wait:
        status = _wait(job, output)
    if output.json:
        output.show(lambda _: "", {**job.as_json(), "exit_status": status})
    if status is None:
        output.hint(f"next: haiprof ls --live; tail -f {shlex.quote(str(job.log))}")
    then = "then: " if status is None else ""
    output.hint(f"{then}haiprof verdict {shlex.quote(str(job.target))}")
    return status or 0


def _wait(job: SubmittedJob, output: Output) -> int:
    from haiprof.launch.submit.submission import follow

    try:
        out = None if output.json else sys.stdout.buffer
        return follow(job.log, job.status, out, poll_s=job.poll_s)
    except KeyboardInterrupt:
        output.hint(f"the job goes on; to stop it: {shlex.join(job.stop)}")
        raise
