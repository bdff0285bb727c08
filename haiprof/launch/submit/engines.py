"""What each engine takes: Kubernetes, Ray Jobs, SkyPilot, and Slurm's batch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

import yaml

from haiprof.base.errors import UsageError
from haiprof.base.options import ENV_ACTIVE
from haiprof.launch.submit.spec import (
    STATIC_PORT,
    Expanded,
    JobSpec,
    c10d,
    haiprof_words,
    node_words,
    own_torchrun,
    rank_words,
    script_words,
    shell_line,
    static,
)


class _Dumper(yaml.SafeDumper):
    """Indents lists below their key, and writes text of several lines as it is read."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, indentless=False)

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401 - as PyYAML has it
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def yaml_text(value: Mapping[str, Any]) -> str:
    """A mapping of strings, whole numbers, switches, lists and mappings as a YAML document."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=100)


_NAME_LIMIT = 40  # with what controllers add, a host name has 63 characters
_GROUP = "node"
_RUN_ID = Expanded("--run-id=$(RUN_ID)")
_JOB_UID = "metadata.labels['batch.kubernetes.io/controller-uid']"
_SET_UID = "metadata.labels['jobset.sigs.k8s.io/jobset-uid']"
_SET_RESTART = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def kubernetes_job(spec: JobSpec) -> str:
    """An indexed Job with the service that gives its pods names."""
    name = _name(spec)
    pod = _pod(spec, head=f"{name}-0.{name}", env=[_field("RUN_ID", _JOB_UID)])
    pod["subdomain"] = name
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"batch.kubernetes.io/job-name": name},
        "ports": [{"name": "rendezvous", "port": STATIC_PORT}],
    }
    job = _job(spec, pod, retries=3 if spec.requeue else 0)
    return f"{_object('v1', 'Service', name, service)}---\n{_object('batch/v1', 'Job', name, job)}"


def jobset(spec: JobSpec) -> str:
    """A JobSet: all pods start again together where one fails and requeuing is asked for."""
    name = _name(spec)
    pod = _pod(spec, head=f"{name}-{_GROUP}-0-0.{name}", env=_set_identity())
    group = {"name": _GROUP, "replicas": 1, "template": {"spec": _job(spec, pod, retries=0)}}
    body: dict[str, Any] = {"network": {"enableDNSHostnames": True}, "replicatedJobs": [group]}
    if spec.requeue:
        body["failurePolicy"] = {"maxRestarts": 3}
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", name, body)


def trainjob(spec: JobSpec) -> str:
    """A TrainJob on the runtime torch-distributed, which says where the nodes meet."""
    trainer: dict[str, Any] = {
        "image": _image(spec),
        "command": [_escape(w) for w in node_words(spec, rendezvous=(), run_id=_RUN_ID)],
        "env": [*_set_identity(), *_pod_identity(), *_environment(spec)],
        "numNodes": spec.nodes,
        "numProcPerNode": spec.ranks,
    }
    if _resources(spec):
        trainer["resourcesPerNode"] = _resources(spec)
    body = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer}
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", _name(spec), body)


def _object(version: str, kind: str, name: str, body: Mapping[str, Any]) -> str:
    """What Kubernetes keeps, as a document of its own."""
    head = {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
    return yaml_text({**head, "spec": body})


def _job(spec: JobSpec, pod: dict[str, Any], *, retries: int) -> dict[str, Any]:
    job: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": spec.nodes,
        "parallelism": spec.nodes,
        "backoffLimit": retries,
        "template": {"spec": pod},
    }
    if spec.time_limit_s is not None:
        job["activeDeadlineSeconds"] = spec.time_limit_s
    return job


def _pod(spec: JobSpec, *, head: str, env: list[dict[str, Any]]) -> dict[str, Any]:
    rendezvous = static(head, Expanded("$(JOB_COMPLETION_INDEX)"))
    words = node_words(spec, rendezvous=rendezvous, run_id=_RUN_ID)
    container: dict[str, Any] = {
        "name": "train",
        "image": _image(spec),
        "command": [_escape(word) for word in words],
        "env": [*env, *_pod_identity(), *_environment(spec)],
    }
    if _resources(spec):
        container["resources"] = _resources(spec)
    pod: dict[str, Any] = {"restartPolicy": "Never", "containers": [container]}
    if spec.claim is not None:
        folder = spec.options["log-dir"]
        if not folder.startswith("/"):
            raise UsageError(
                f"--claim is mounted at --log-dir, and {folder} is not an absolute path"
            )
        container["volumeMounts"] = [{"name": "logs", "mountPath": folder}]
        claim = {"claimName": spec.claim}
        pod["volumes"] = [{"name": "logs", "persistentVolumeClaim": claim}]
    return pod


def _image(spec: JobSpec) -> str:
    if not spec.image:
        raise UsageError("a pod needs --image", hint="one with torch, haiprof and the script")
    return spec.image


def _resources(spec: JobSpec) -> dict[str, dict[str, str]]:
    asked = {"nvidia.com/gpu": spec.gpus_per_node, "cpu": spec.cpus_per_node}
    limits = {name: str(count) for name, count in asked.items() if count is not None}
    return {"limits": limits} if limits else {}


def _set_identity() -> list[dict[str, Any]]:
    """A set that starts again records a new run: its number of restarts is part of the id."""
    uid, restart = _field("JOBSET_UID", _SET_UID), _field("JOBSET_RESTART", _SET_RESTART)
    return [uid, restart, {"name": "RUN_ID", "value": "$(JOBSET_UID)-$(JOBSET_RESTART)"}]


def _pod_identity() -> list[dict[str, Any]]:
    """Whom to ask how it ended: the host name of an indexed Job's pod is not the pod's name."""
    return [_field(f"POD_{name.upper()}", f"metadata.{name}")
            for name in ("name", "namespace", "uid")]  # fmt: skip


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _environment(spec: JobSpec) -> list[dict[str, Any]]:
    return [{"name": n, "value": _escape(value)} for n, value in spec.environment.items()]


def _escape(word: str) -> str:
    """Kubernetes expands $(NAME) in commands and values; $$ is one $."""
    return str(word) if isinstance(word, Expanded) else word.replace("$", "$$")


def _name(spec: JobSpec) -> str:
    """As names in DNS are."""
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    return name[:_NAME_LIMIT].strip("-") or "job"


_DRIVER = '''\
"""{name} under haiprof on a Ray cluster.

    ray job submit --working-dir . -- python THIS_FILE.py
"""

import os
import subprocess
import sys
import time

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NODES = {nodes}
PORT = {port}
RESOURCES = {resources!r}  # of each node
ENVIRONMENT = {environment!r}
HAIPROF = {haiprof!r}
TORCHRUN = {torchrun!r}
SCRIPT = {script!r}


@ray.remote(max_retries=0)
def address():
    return ray.util.get_node_ip_address()


@ray.remote(max_retries=0)
def run_node(rank, head, run_id):
    nodes = [f"--node-rank={{rank}}", f"--master-addr={{head}}", f"--master-port={{PORT}}"]
    nodes = nodes if NODES > 1 else ["--standalone"]
    command = [*HAIPROF, f"--run-id={{run_id}}", "--", *TORCHRUN, *nodes, *SCRIPT]
    environment = {{**os.environ, **ENVIRONMENT}}
    return subprocess.run(command, env=environment, check=False).returncode


ray.init()
group = placement_group([RESOURCES] * NODES, strategy="STRICT_SPREAD")
ray.get(group.ready())


def on(rank):
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    return {{"scheduling_strategy": strategy, "num_cpus": RESOURCES["CPU"],
            "num_gpus": RESOURCES.get("GPU", 0)}}


head = ray.get(address.options(**on(0)).remote())
run_id = time.strftime("%Y%m%d-%H%M%S")
left = [run_node.options(**on(rank)).remote(rank, head, run_id) for rank in range(NODES)]
while left:
    (ended,), left = ray.wait(left)
    status = ray.get(ended)
    if status:  # the others would wait for this node
        sys.exit(status if status > 0 else 128 - status)
'''


def ray_driver(spec: JobSpec) -> str:
    """The driver, whole: what it starts is data in it, and never passes through a shell."""
    gpus = {"GPU": spec.gpus_per_node} if spec.gpus_per_node else {}
    return _DRIVER.format(
        name=spec.name,
        nodes=spec.nodes,
        port=STATIC_PORT,
        resources={"CPU": spec.cpus_per_node or 1, **gpus},
        environment=dict(spec.environment),
        haiprof=["haiprof", *haiprof_words(spec)],
        torchrun=["torchrun", *rank_words(spec)],
        script=script_words(spec),
    )


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
    if resources:
        task["resources"] = resources
    return yaml_text({**task, "run": "\n".join([*lines, shell_line(words)]) + "\n"})
