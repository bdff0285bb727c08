"""A submitted job, and what each engine takes: Kubernetes, Ray Jobs, SkyPilot, Slurm's script."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

import yaml

from haiprof.base.errors import UsageError
from haiprof.base.options import (
    ENV_ACTIVE,
    OPTIONS,
    merge_options,
    option_spec,
    options_from_environment,
    options_from_files,
    parse_dotted,
    parse_value,
    safe_name,
)
from haiprof.base.version import PACKAGE


def resolve_options(
    dotted: Sequence[str], given: Mapping[str, str | None], environ: Mapping[str, str], *,
    program: str, pyproject: Path = Path("pyproject.toml"),
) -> tuple[dict[str, str], Path]:  # fmt: skip
    """What the job's command line says, so that nothing has to travel beside it."""
    texts = {spec.name: environ[spec.env] for spec in OPTIONS if environ.get(spec.env)}
    parsed = options_from_environment(environ)
    texts |= {k: f"{v:g}" for k, v in parsed.items() if k.startswith("interval.")}
    for word in dotted:
        parse_dotted(word)
        name, _, text = word.removeprefix("profile.").partition("=")
        spec = option_spec(name)
        texts[name if spec is None else spec.name] = text
    texts |= {name: text for name, text in given.items() if text is not None}
    options = merge_options(
        options_from_files(pyproject),
        options_from_environment(environ),
        dict(parse_value(name, text, origin=f"--{name}") for name, text in texts.items()),
    )
    name = options.name or Path(program).name.removesuffix(".py")
    texts |= {"name": safe_name(name), "log-dir": options.address or str(options.log_dir)}
    return texts, options.log_dir


_MAX_NODES = 100_000
# What sbatch's own parser, which knows quotes, escapes and comments, reads as one plain word.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:;@+*&|!/\[\]()=%-]*\Z")
_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]+\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?\Z")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+)\Z")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job."""

    program: str  # a Python file, the module where `module` says so, or any program (here only)
    module: bool = False
    arguments: tuple[str, ...] = ()  # the script's own, untouched
    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    """haiprof's options as text, by their names on its command line; each once."""
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None  # what the engine calls the GPUs, such as H100
    cpus_per_node: int | None = None
    time_limit_s: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for the job, beside what its engine passes on."""
    requeue: bool = False
    partition: str | None = None
    account: str | None = None
    directives: Mapping[str, str] = field(default_factory=dict)  # of sbatch; empty for a switch
    image: str | None = None  # container image
    claim: str | None = None  # PersistentVolumeClaim that holds the log directory
    haiprof: tuple[str, ...] = ("haiprof",)  # where nodes have the same file system as this one

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= _MAX_NODES:
            raise UsageError(f"--nodes {self.nodes}: 1 to {_MAX_NODES}")
        for flag, count in (
            ("--nproc-per-node", self.ranks_per_node), ("--gpus-per-node", self.gpus_per_node),
            ("--cpus-per-node", self.cpus_per_node),
        ):  # fmt: skip
            if count is not None and count < 1:
                raise UsageError(f"{flag} {count}: 1 or more")
        for flag, word in (
            ("--partition", self.partition), ("--account", self.account),
            ("--gpu-type", self.gpu_type),
        ):  # fmt: skip
            if word is not None and not _PLAIN.match(word):
                raise UsageError(f"{flag} {word!r}: no such name can be")
        for name, value in self.directives.items():
            if not _DIRECTIVE.match(name) or (value and not _PLAIN.match(value)):
                raise UsageError(f"--sbatch {name}={value}: not an option that sbatch reads")

    @property
    def is_python(self) -> bool:
        """Whether Python runs the program, so that torchrun can start it."""
        return self.module or self.program.endswith(".py")

    @property
    def ranks(self) -> int:
        """Processes on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def time_limit(self) -> str | None:
        """As Slurm writes it: days-hours:minutes:seconds."""
        if self.time_limit_s is None:
            return None
        minutes, seconds = divmod(self.time_limit_s, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"


def parse_time_limit(text: str) -> int:
    """Seconds of a limit as Slurm takes it: MINUTES, [HOURS:]MINUTES:SECONDS, DAYS-HOURS[:...]."""
    days, clock = _DAYS.match(text), _CLOCK.match(text)
    if text.isascii() and text.isdecimal():
        seconds = int(text) * 60
    elif found := days or clock:
        numbers = [0, *(int(group or 0) for group in found.groups())]
        d, hours, minutes, rest = numbers[-4:]
        seconds = ((d * 24 + hours) * 60 + minutes) * 60 + rest
    else:
        hint = "minutes, HH:MM:SS, or DAYS-HH:MM:SS"
        raise UsageError(f"--time-limit {text!r}: not a time", hint=hint)
    if not seconds:
        raise UsageError(f"--time-limit {text}: more than 0")
    return seconds


def parse_environment(words: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of `--env NAME=VALUE`; `--env NAME` takes the value that it has here."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _VARIABLE.match(name):
            raise UsageError(f"--env {word!r}: expected NAME=VALUE, or NAME")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: not set here", hint=f"--env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def parse_directives(words: Iterable[str]) -> dict[str, str]:
    """Options of `--sbatch NAME=VALUE`, or `--sbatch NAME` for a switch."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


STATIC_PORT = 29500  # of the first node's rendezvous, where every job has nodes of its own


class Expanded(str):
    """A word that the engine expands; all others are literal."""

    __slots__ = ()


def node_words(
    spec: JobSpec, *, rendezvous: Sequence[str], haiprof: Sequence[str] = ("haiprof",),
    torchrun: str = "torchrun", run_id: str | None = None,
) -> list[str]:  # fmt: skip
    """What each node runs."""
    words = [*haiprof, *haiprof_words(spec), *([] if run_id is None else [run_id])]
    meeting = list(rendezvous) if spec.nodes > 1 else ["--standalone"]
    return [*words, "--", torchrun, *rank_words(spec), *meeting, *script_words(spec)]


def rank_words(spec: JobSpec) -> list[str]:
    """How many processes there are, for torchrun."""
    return [f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.ranks}"]


def script_words(spec: JobSpec) -> list[str]:
    """What torchrun starts: after -- its parser looks at no word, or `--n 5` were its own."""
    words = [_not_a_macro(word) for word in (spec.program, *spec.arguments)]
    return [*(["-m"] if spec.module else []), "--", *words]


def _not_a_macro(word: str) -> str:
    """Torchrun puts the rank's number for $local_rank, and $ for $$: others stay."""
    # Source: torch.distributed.elastic.utils.api.macros.
    altered = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if altered else word


def haiprof_words(spec: JobSpec) -> list[str]:
    """Options of haiprof, each once."""
    return [f"--{name}={text}" for name, text in spec.options.items()]


def c10d(endpoint: str, identity: str) -> list[str]:
    """Options of torchrun for nodes that meet at the first one, whoever that is."""
    return ["--rdzv-backend=c10d", type(endpoint)(f"--rdzv-endpoint={endpoint}"),
            type(identity)(f"--rdzv-id={identity}")]  # fmt: skip


def static(address: str, node_rank: str) -> list[str]:
    """Options of torchrun for nodes that were given numbers."""
    return [type(node_rank)(f"--node-rank={node_rank}"),
            type(address)(f"--master-addr={address}"), f"--master-port={STATIC_PORT}"]  # fmt: skip


def shell_line(words: Sequence[str]) -> str:
    """One command for a shell; an `Expanded` word goes between double quotes."""
    return " ".join(f'"{w}"' if isinstance(w, Expanded) else shlex.quote(w) for w in words)


def own_torchrun() -> str:
    """The command torchrun beside this interpreter, else whatever has that name."""
    installed = Path(sys.executable).parent / "torchrun"
    return str(installed) if installed.exists() else "torchrun"


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
        "completionMode": "Indexed", "completions": spec.nodes, "parallelism": spec.nodes,
        "backoffLimit": retries, "template": {"spec": pod},
    }  # fmt: skip
    if spec.time_limit_s is not None:
        job["activeDeadlineSeconds"] = spec.time_limit_s
    return job


def _pod(spec: JobSpec, *, head: str, env: list[dict[str, Any]]) -> dict[str, Any]:
    rendezvous = static(head, Expanded("$(JOB_COMPLETION_INDEX)"))
    words = node_words(spec, rendezvous=rendezvous, run_id=_RUN_ID)
    container: dict[str, Any] = {
        "name": "train", "image": _image(spec), "command": [_escape(word) for word in words],
        "env": [*env, *_pod_identity(), *_environment(spec)],
    }  # fmt: skip
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
    name = re.sub(r"[^a-z0-9]+", "-", spec.name.lower()).strip("-")
    return name[:_NAME_LIMIT].strip("-") or "job"


def ray_driver(spec: JobSpec) -> str:
    """The driver, whole: what it starts is data in it, and never passes through a shell."""
    gpus = {"GPU": spec.gpus_per_node} if spec.gpus_per_node else {}
    driver = (PACKAGE / "launch" / "submit" / "ray_driver.txt").read_text(encoding="utf-8")
    return driver.format(
        name=spec.name, nodes=spec.nodes, port=STATIC_PORT,
        resources={"CPU": spec.cpus_per_node or 1, **gpus}, environment=dict(spec.environment),
        haiprof=["haiprof", *haiprof_words(spec)], torchrun=["torchrun", *rank_words(spec)],
        script=script_words(spec),
    )  # fmt: skip


FIRST_PORT, PORTS = 20_000, 10_000  # of the rendezvous: below those of clients (32768 to 60999)
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
        "job-name": spec.name, "nodes": spec.nodes, "ntasks-per-node": 1,
        "gpus-per-node": gpus if spec.gpus_per_node else None, "cpus-per-task": spec.cpus_per_node,
        "time": spec.time_limit, "partition": spec.partition, "account": spec.account,
        "requeue" if spec.requeue else "no-requeue": "",
        "open-mode": "append" if spec.requeue else None,
    }  # fmt: skip
    return {k: str(v) for k, v in named.items() if v is not None} | dict(spec.directives)


def sbatch_script(spec: JobSpec) -> str:
    """The script for `sbatch FILE`. haiprof stands in srun's line: no environment has to travel."""
    head = Expanded("$endpoint")
    meeting = c10d(head, Expanded("$SLURM_JOB_ID"))
    words = node_words(
        spec, rendezvous=meeting, haiprof=list(spec.haiprof), torchrun=own_torchrun()
    )
    options = (f"{name}={value}" if value else name for name, value in sbatch_options(spec).items())
    lines = ["#!/bin/bash", *(f"#SBATCH --{option}" for option in options)]
    lines += ["", f"unset {ENV_ACTIVE}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    if spec.nodes > 1:
        lines += [f"endpoint={ENDPOINT}  # of the rendezvous: this is the first node"]
    srun = shell_line(["srun", *srun_options(spec)])
    lines += [f"exec {srun} \\", f"  {shell_line(words)}"]
    return "\n".join(lines) + "\n"


_HEAD = 'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'


def skypilot(spec: JobSpec) -> str:
    """A task: what each node runs is one line of shell."""
    # Source: SkyPilot's YAML and variables (docs.skypilot.co: reference/yaml-spec,
    # distributed-jobs).
    words = node_words(
        spec,
        rendezvous=static(Expanded("$head"), Expanded("$SKYPILOT_NODE_RANK")),
        run_id=Expanded("--run-id=$SKYPILOT_TASK_ID"),
    )
    # Not under `envs`: there an empty value means that one has to be given.
    lines = [f"export {name}={shlex.quote(value)}" for name, value in spec.environment.items()]
    lines += [_HEAD] if spec.nodes > 1 else []
    task: dict[str, Any] = {"name": spec.name, "num_nodes": spec.nodes, "workdir": "."}
    if spec.gpus_per_node and not spec.gpu_type:
        raise UsageError("SkyPilot asks for GPUs by their name", hint="--gpu-type H100")
    asked = {
        "accelerators": spec.gpus_per_node and f"{spec.gpu_type}:{spec.gpus_per_node}",
        "cpus": spec.cpus_per_node and f"{spec.cpus_per_node}+",
        "image_id": spec.image and f"docker:{spec.image}",
        "job_recovery": {"max_restarts_on_errors": 3} if spec.requeue else None,
    }
    if resources := {name: value for name, value in asked.items() if value}:
        task["resources"] = resources
    return yaml_text({**task, "run": "\n".join([*lines, shell_line(words)]) + "\n"})
