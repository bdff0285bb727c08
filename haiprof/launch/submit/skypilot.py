"""SkyPilot: a task for `sky launch`, or `sky jobs launch` on machines that may be taken away."""

from __future__ import annotations

import shlex
from typing import Any

from haiprof.base.errors import UsageError
from haiprof.launch.submit.node import Expanded, node_words, shell_line, static
from haiprof.launch.submit.spec import JobSpec
from haiprof.launch.submit.yaml_text import yaml_text

_HEAD = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'


def skypilot(spec: JobSpec) -> str:
    """A task: what each node runs is one line of shell.

    Source: SkyPilot's YAML and variables (docs.skypilot.co: reference/yaml-spec, distributed-jobs).
    """
    words = node_words(
        spec,
        rendezvous=static(Expanded("$head"), Expanded("$SKYPILOT_NODE_RANK")),
        run_id=Expanded("--run-id=$SKYPILOT_TASK_ID"),
    )
    # Not under `envs`: there an empty value means that one has to be given.
    lines = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    lines += [_HEAD] if spec.nodes > 1 else []
    task: dict[str, Any] = {"name": spec.name, "num_nodes": spec.nodes, "workdir": "."}
    resources = _resources(spec)
    if resources:
        task["resources"] = resources
    return yaml_text({**task, "run": "\n".join([*lines, shell_line(words)]) + "\n"})


def _resources(spec: JobSpec) -> dict[str, Any]:
    resources: dict[str, Any] = {}
    if spec.gpus_per_node:
        if not spec.gpu_type:
            raise UsageError("SkyPilot asks for GPUs by their name", hint="--gpu-type H100")
        resources["accelerators"] = f"{spec.gpu_type}:{spec.gpus_per_node}"
    if spec.cpus_per_node:
        resources["cpus"] = f"{spec.cpus_per_node}+"
    if spec.image:
        resources["image_id"] = f"docker:{spec.image}"
    if spec.requeue:
        resources["job_recovery"] = {"max_restarts_on_errors": 3}
    return resources
