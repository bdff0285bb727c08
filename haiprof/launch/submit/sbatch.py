"""Slurm's batch script, for sites where submitit cannot be used."""

from __future__ import annotations

import shlex

from haiprof.base.options import ENV_ACTIVE
from haiprof.launch.submit.node import (
    Expanded,
    c10d,
    node_words,
    own_torchrun,
    shell_line,
)
from haiprof.launch.submit.spec import JobSpec

FIRST_PORT, PORTS = 20_000, 10_000
"""Rendezvous ports, below those that Linux gives to clients (32768 to 60999)."""
# The batch script runs on the first node, and hands this to all.
ENDPOINT = f'"$(hostname):$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS}))"'
# Without --export=ALL a submission with --export=NONE (or SBATCH_EXPORT) starts bare tasks.
SRUN_OPTIONS = ("--export=ALL",)


def srun_options(spec: JobSpec) -> list[str]:
    """Of the one step; since Slurm 22.05 it does not inherit --cpus-per-task."""
    cpus = [f"--cpus-per-task={spec.cpus_per_node}"] if spec.cpus_per_node else []
    return [*SRUN_OPTIONS, *cpus]


def sbatch_options(spec: JobSpec) -> dict[str, str]:
    """Options of sbatch by name; empty text for a switch."""
    gpus = f"{spec.gpu_type}:{spec.gpus_per_node}" if spec.gpu_type else spec.gpus_per_node
    named: dict[str, object] = {
        "job-name": spec.name,
        "nodes": spec.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": gpus if spec.gpus_per_node else None,
        "cpus-per-task": spec.cpus_per_node,
        "time": spec.time_limit,
        "partition": spec.partition,
        "account": spec.account,
        "requeue" if spec.requeue else "no-requeue": "",
        "open-mode": "append" if spec.requeue else None,
    }
    return {k: str(v) for k, v in named.items() if v is not None} | dict(spec.directives)


def sbatch_script(spec: JobSpec) -> str:
    """The script for `sbatch FILE`. haiprof stands in srun's line: no environment has to travel."""
    head = Expanded("$endpoint")
    words = node_words(
        spec,
        rendezvous=c10d(head, Expanded("$SLURM_JOB_ID")),
        haiprof=list(spec.haiprof),
        torchrun=own_torchrun(),
    )
    lines = ["#!/bin/bash"]
    for name, value in sbatch_options(spec).items():
        lines.append(f"#SBATCH --{name}={value}" if value else f"#SBATCH --{name}")
    lines += ["", f"unset {ENV_ACTIVE}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    if spec.nodes > 1:
        lines += [f"endpoint={ENDPOINT}  # of the rendezvous: this is the first node"]
    srun = shell_line(["srun", *srun_options(spec)])
    lines += [f"exec {srun} \\", f"  {shell_line(words)}"]
    return "\n".join(lines) + "\n"
