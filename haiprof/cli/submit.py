"""`haiprof submit`: a job in the background here, on Slurm's nodes, or as another engine's file."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output

if TYPE_CHECKING:
    from haiprof.launch.submit.spec import JobSpec
    from haiprof.launch.submit.submission import SubmittedJob

_JOB, _NODE, _SITE = "The job", "Each node", "Where it runs"
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="SCRIPT -- ARGUMENTS...",
        help="The training script, and after -- what is the script's own, untouched.",
        show_default=False,
    ),
]


def _text(flag: str, metavar: str, words: str, panel: str, *short: str) -> Any:  # noqa: ANN401
    return typer.Option(
        *short, flag, metavar=metavar, help=words, show_default=False, rich_help_panel=panel
    )


def _switch(flag: str, words: str, panel: str) -> Any:  # noqa: ANN401 - typer's own
    return typer.Option(flag, help=words, rich_help_panel=panel)


Module = Annotated[str | None, _text("--module", "MODULE", "As python -m.", _JOB, "-m")]
Nodes = Annotated[int, _text("--nodes", "N", "How many nodes (default: 1).", _NODE, "-n")]
Ranks = Annotated[
    int | None,
    _text("--nproc-per-node", "N", "Processes, started by torchrun (default: GPUs, or 1).", _NODE),
]
Gpus = Annotated[int | None, _text("--gpus-per-node", "N", "GPUs to ask for.", _NODE)]
GpuType = Annotated[str | None, _text("--gpu-type", "NAME", "Which GPUs, such as H100.", _NODE)]
Cpus = Annotated[int | None, _text("--cpus-per-node", "N", "CPU cores to ask for.", _NODE)]
ProfileOptions = Annotated[
    list[str] | None,
    _text("--options", "profile.NAME=VALUE", "Any option of haiprof; may repeat.", _JOB),
]
Time = Annotated[str | None, _text("--time", "SECONDS", "For how long to record.", _JOB)]
Warmup = Annotated[str | None, _text("--warmup", "SECONDS", "How long to wait before that.", _JOB)]
Trace = Annotated[bool, _switch("--trace", "Trace some steps with torch.profiler.", _JOB)]
Recorder = Annotated[str | None, _text("--recorder", "LIST", "Such as basic,gpu.", _JOB)]
LogDir = Annotated[
    str | None,
    _text("--log-dir", "DIR", "Where run directories go; all nodes must see it.", _JOB),
]
Name = Annotated[str | None, _text("--name", "NAME", "Default: the script's.", _JOB)]
Env = Annotated[
    list[str] | None,
    _text("--env", "NAME[=VALUE]", "Set for the job; may repeat. Without VALUE: as it is here. "
          "Here and on Slurm the job also gets this shell's environment.", _JOB, "-e"),
]  # fmt: skip
On = Annotated[
    str,
    typer.Option("--on", metavar="local|slurm", help="Where to run.", rich_help_panel=_SITE),
]
Emit = Annotated[
    str | None,
    _text("--emit", "FORM", "Submit nothing; print the file for slurm, kubernetes, jobset, "
          "trainjob, ray or skypilot.", _SITE),
]  # fmt: skip
Limit = Annotated[
    str | None, _text("--time-limit", "TIME", "MINUTES, HH:MM:SS or DAYS-HH:MM:SS.", _SITE)
]
Requeue = Annotated[
    bool,
    _switch("--requeue", "Start it again after it was preempted or reached its time limit.", _SITE),
]
Partition = Annotated[str | None, _text("--partition", "NAME", "Slurm's partition.", _SITE)]
Account = Annotated[str | None, _text("--account", "NAME", "Slurm's account.", _SITE)]
Sbatch = Annotated[
    list[str] | None, _text("--sbatch", "NAME[=VALUE]", "Any option of sbatch; may repeat.", _SITE)
]
Image = Annotated[str | None, _text("--image", "IMAGE", "Container image of pods.", _SITE)]
Claim = Annotated[
    str | None, _text("--claim", "NAME", "Volume claim, mounted at the log directory.", _SITE)
]
Wait = Annotated[bool, _switch("--wait", "Show the job's log, end with its exit status.", _SITE)]


def submit(
    words: Words = None,
    module: Module = None,
    nodes: Nodes = 1,
    nproc_per_node: Ranks = None,
    gpus_per_node: Gpus = None,
    gpu_type: GpuType = None,
    cpus_per_node: Cpus = None,
    options: ProfileOptions = None,
    time: Time = None,
    warmup: Warmup = None,
    trace: Trace = False,
    recorder: Recorder = None,
    log_dir: LogDir = None,
    name: Name = None,
    env: Env = None,
    on: On = "local",
    emit: Emit = None,
    time_limit: Limit = None,
    requeue: Requeue = False,
    partition: Partition = None,
    account: Account = None,
    sbatch: Sbatch = None,
    image: Image = None,
    claim: Claim = None,
    wait: Wait = False,
    as_json: AsJson = False,
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
    from haiprof.cli.own_command import installed_haiprof
    from haiprof.launch.submit.spec import (
        JobSpec,
        parse_directives,
        parse_environment,
        resolve_options,
    )
    from haiprof.launch.submit.spec import parse_time_limit as limit

    given = {"time": time, "warmup": warmup, "trace": "1" if trace else None,
             "recorder": recorder, "log-dir": log_dir, "name": name}  # fmt: skip
    program, *arguments = [*([] if module is None else [module]), *(words or [])] or [""]
    if not program:
        raise UsageError("submit: no script", hint="haiprof submit train.py; haiprof submit --help")
    texts, folder = resolve_options(options or [], given, os.environ, program=program)
    spec = JobSpec(
        program=program,
        module=module is not None,
        arguments=tuple(arguments),
        name=texts["name"],
        options=texts,
        nodes=nodes,
        ranks_per_node=nproc_per_node,
        gpus_per_node=gpus_per_node,
        gpu_type=gpu_type,
        cpus_per_node=cpus_per_node,
        time_limit_s=None if time_limit is None else limit(time_limit),
        environment=parse_environment(env or [], os.environ),
        requeue=requeue,
        partition=partition,
        account=account,
        directives=parse_directives(sbatch or []),
        image=image,
        claim=claim,
        haiprof=installed_haiprof(),
    )
    output = Output(json=as_json)
    if emit is not None:
        _emit(spec, emit, output)
        return
    status = _submit(spec, on, folder, output, wait=wait)
    if status:
        raise typer.Exit(status)


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
    result = {**job.as_json(), "exit_status": status}
    if output.json:
        output.show(lambda _: "", result)
    if status is None:
        output.hint(f"next: haiprof ps; tail -f {shlex.quote(str(job.log))}")
    output.hint(f"{'' if status is not None else 'then: '}haiprof verdict {job.target}")
    return status or 0


def _wait(job: SubmittedJob, output: Output) -> int:
    from haiprof.launch.submit.submission import follow

    try:
        out = None if output.json else sys.stdout.buffer
        return follow(job.log, job.status, out, poll_s=job.poll_s)
    except KeyboardInterrupt:
        output.hint(f"the job goes on; to stop it: {shlex.join(job.stop)}")
        raise
