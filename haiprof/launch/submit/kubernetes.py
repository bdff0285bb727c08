"""Kubernetes: an indexed Job, a JobSet, or a TrainJob of Kubeflow, as YAML for `kubectl create`.

Source: batch/v1 of Kubernetes; jobset.x-k8s.io/v1alpha2 (JobSet 0.10);
trainer.kubeflow.org/v1alpha1 (Kubeflow Trainer 2.2), whose runtime torch-distributed sets
PET_*, from which torchrun takes what its command line does not say.
"""

from __future__ import annotations

import re
from typing import Any

from haiprof.base.errors import UsageError
from haiprof.launch.submit.node import STATIC_PORT, Expanded, node_words, static
from haiprof.launch.submit.spec import JobSpec
from haiprof.launch.submit.yaml_text import yaml_text

_NAME_LIMIT = 40  # with what controllers add, a host name has 63 characters
_GROUP = "node"
_RUN_ID = Expanded("--run-id=$(RUN_ID)")
_JOB_UID = "batch.kubernetes.io/controller-uid"
_SET_UID = "jobset.sigs.k8s.io/jobset-uid"
_SET_RESTART = "jobset.sigs.k8s.io/restart-attempt"


def kubernetes_job(spec: JobSpec) -> str:
    """An indexed Job with the service that gives its pods names."""
    name = _name(spec)
    pod = _pod(spec, head=f"{name}-0.{name}", env=[_field("RUN_ID", _JOB_UID)])
    pod["subdomain"] = name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": name},
            "ports": [{"name": "rendezvous", "port": STATIC_PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": _job(spec, pod, retries=3 if spec.requeue else 0),
    }
    return yaml_text(service) + "---\n" + yaml_text(job)


def jobset(spec: JobSpec) -> str:
    """A JobSet: all pods start again together where one fails and requeuing is asked for."""
    name = _name(spec)
    pod = _pod(spec, head=f"{name}-{_GROUP}-0-0.{name}", env=_set_identity())
    group = {"name": _GROUP, "replicas": 1, "template": {"spec": _job(spec, pod, retries=0)}}
    body: dict[str, Any] = {"network": {"enableDNSHostnames": True}, "replicatedJobs": [group]}
    if spec.requeue:
        body["failurePolicy"] = {"maxRestarts": 3}
    return yaml_text(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": body,
        }
    )


def trainjob(spec: JobSpec) -> str:
    """A TrainJob on the runtime torch-distributed, which says where the nodes meet."""
    trainer: dict[str, Any] = {
        "image": _image(spec),
        "command": [_escape(w) for w in node_words(spec, rendezvous=(), run_id=_RUN_ID)],
        "env": [*_set_identity(), *_environment(spec)],
        "numNodes": spec.nodes,
        "numProcPerNode": spec.ranks,
    }
    if _resources(spec):
        trainer["resourcesPerNode"] = _resources(spec)
    return yaml_text(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": _name(spec)},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer},
        }
    )


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
        "env": [*env, *_environment(spec)],
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


def _field(name: str, label: str) -> dict[str, Any]:
    path = f"metadata.labels['{label}']"
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
