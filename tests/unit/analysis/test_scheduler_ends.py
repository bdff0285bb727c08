"""What Slurm and Kubernetes said of a run's end, joined to how its ranks ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.job_environment import find_pod
from haiprof.run_analysis.deaths import Death
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.writer import write_json
from tests.unit.analysis.test_deaths import T0, Job, S

END_S = T0 // S + 30


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A run whose launcher wrote no end."""
    found = Job(tmp_path / "run", hosts=3)
    manifest = replace(read_manifest(found.run), end_wall_ns=None, exit_status=None)
    write_manifest(found.run, manifest)
    for number in range(3):
        folder = found.run.node(f"node{number}")
        folder.root.mkdir(parents=True, exist_ok=True)
        write_json(folder.agent, {"slurm_node": f"n{number}"}, below=found.run.root)
    return found


def say(
    job: Job, state: str, *, shown: str | None = None, nodes: object = (), steps: object = (),
    **more: str,
) -> None:  # fmt: skip
    row = {"JobIDRaw": "12", "State": state, "ExitCode": "0:0", "End": str(END_S), **more}
    content: dict[str, Any] = {"job": "12", "sacct": row, "steps": list(steps), "nodes": nodes}  # type: ignore[call-overload]
    if shown:
        content["scontrol"] = {"JobState": shown, "EndTime": str(END_S)}
    write_json(job.run.scheduler, {"slurm": content, "pods": []}, below=job.run.root)


def say_of_pod(job: Job, rank: int, **more: object) -> None:
    pod = {"host": job.host(rank), "name": f"train-{rank}", "node": "gke-1", **more}
    write_json(job.run.scheduler, {"slurm": None, "pods": [pod]}, below=job.run.root)


def killed(job: Job, *ranks: int) -> None:
    for rank in ranks:
        job.over(rank, 29.5 + rank / 10, number=signal.SIGKILL)


def found(death: Death) -> tuple[str, tuple[int, ...], bool]:
    return death.cause, death.ranks, death.certain


def test_run_of_which_nobody_says_that_it_failed_has_no_death(job: Job) -> None:
    assert job.deaths() == []
    say(job, "COMPLETED")
    assert job.deaths() == []


@pytest.mark.parametrize(("state", "more", "expected", "said"), [
    ("TIMEOUT", {}, ("time_limit", (), True), "Slurm's time limit was reached"),
    ("DEADLINE", {}, ("time_limit", (), True), "--deadline"),
    ("PREEMPTED", {}, ("preempted", (), True), "another job had precedence"),
    ("REQUEUED", {}, ("requeued", (), True), "Slurm requeued it"),
    ("CANCELLED by 1000", {}, ("cancelled", (), True), "scancel by user 1000"),
    ("NODE_FAIL", {"FailedNode": "n1"}, ("node_lost", (1,), True), "a node of the job: n1"),
    ("NODE_FAIL", {"FailedNode": "None"}, ("node_lost", (), True), "a node of the job"),
    ("OUT_OF_MEMORY", {"ReqMem": "16G"}, ("out_of_memory", (), False), "16G asked for"),
    ("FAILED", {"ExitCode": "1:0"}, ("unknown", (), False), "nothing says why"),
])  # fmt: skip
def test_state_tells_what_nobody_of_the_job_could_write(
    job: Job, state: str, more: Mapping[str, str], expected: object, said: str
) -> None:
    say(job, state, **more)
    death = job.death()
    assert found(death) == expected
    assert said in death.headline
    assert death.scheduler[0].startswith(f"Slurm: job 12 {state}, exit ")
    assert death.died_ns == (END_S * S if death.cause != "unknown" else None)


def test_ranks_killed_with_the_whole_job_are_told_as_stopped_by_the_time_limit(job: Job) -> None:
    killed(job, 0, 1, 2)
    assert job.death().cause == "killed"
    say(job, "TIMEOUT")
    death = job.death()
    assert found(death) == ("time_limit", (), True)
    assert {fate.role for fate in death.fates} == {"stopped"}


def test_killed_rank_of_a_step_out_of_memory_died_of_that(job: Job) -> None:
    killed(job, 1)
    step = {"JobIDRaw": "12.0", "State": "OUT_OF_MEMORY", "ExitCode": "0:125", "MaxRSS": "15.9G"}
    say(job, "FAILED", ExitCode="1:0", steps=[step])
    death = job.death()
    assert found(death) == ("out_of_memory", (1,), False)
    said = "step 12.0 OUT_OF_MEMORY, exit 0:125, at most 15.9G resident in a task"
    assert said in death.scheduler[1]
    node = {"name": "n1", "state": "IDLE+DRAIN", "reason": "GPU fell off the bus"}
    say(job, "FAILED", nodes=[node])
    assert job.death().scheduler[-1] == "Slurm: node n1 is IDLE+DRAIN: GPU fell off the bus"


def test_exception_before_time_limit_is_the_cause_and_the_record_stands_beside_it(job: Job) -> None:
    job.died(1, 0, "ValueError", "bad")
    say(job, "TIMEOUT")
    death = job.death()
    assert found(death) == ("exception", (1,), True)
    assert death.scheduler == ("Slurm: job 12 TIMEOUT, exit 0:0",)


def test_what_the_accounting_says_is_surer_than_what_the_signal_looked_like(job: Job) -> None:
    job.line("node0", {"type": "signal", "signal": 15, "wall_ns": T0, "from_pid": 77,
                       "from_command": "slurmstepd: [12.batch]", "slurm_job": "12"})  # fmt: skip
    for rank in range(3):
        job.over(rank, 0.1, number=signal.SIGTERM)
    assert job.death().cause == "cancelled"
    assert not job.death().certain
    say(job, "PREEMPTED")
    assert found(job.death()) == ("preempted", (), True)


def test_scontrol_alone_tells_it_too(job: Job) -> None:
    said = {"job": "12", "scontrol": {"JobState": "TIMEOUT", "EndTime": str(END_S)}}
    write_json(job.run.scheduler, {"slurm": said}, below=job.run.root)
    assert found(job.death()) == ("time_limit", (), True)


@pytest.mark.parametrize(("pod", "cause", "said"), [
    ({"container": {"reason": "OOMKilled", "exitCode": 137, "ended_s": END_S}},
     "out_of_memory", "for want of memory (OOMKilled)"),
    ({"reason": "Evicted", "message": "The node was low on resource: memory."},
     "evicted", "evicted its pod (Evicted): The node was low on resource: memory."),
    ({"reason": "DeadlineExceeded", "container": {"reason": "Error", "exitCode": 137}},
     "time_limit", "activeDeadlineSeconds"),
    ({"disruption": "PreemptionByScheduler", "container": {"reason": "Error"}},
     "preempted", "another pod had precedence"),
    ({"disruption": "DeletionByTaintManager"}, "node_lost", "tainted"),
    ({"disruption": "EvictionByEvictionAPI"}, "evicted", "drained"),
])  # fmt: skip
def test_reason_of_a_pod_tells_how_its_ranks_died(
    job: Job, pod: Mapping[str, object], cause: str, said: str
) -> None:
    killed(job, 1)
    say_of_pod(job, 1, **pod)
    death = job.death()
    assert found(death) == (cause, (1,), True)
    assert said in death.headline
    assert death.scheduler[0].startswith("Kubernetes: pod train-1 ")


def test_container_that_failed_of_its_own_leaves_the_cause_to_the_ranks(job: Job) -> None:
    job.died(1, 0, "ValueError", "bad")
    say_of_pod(job, 1, container={"reason": "Error", "exitCode": 1, "message": "ValueError: bad"})
    death = job.death()
    assert death.cause == "exception"
    assert death.scheduler == (
        "Kubernetes: pod train-1 Error, exit 1, on node gke-1, ValueError: bad",
    )


# -- which pod this is -----------------------------------------------------------------------------

UID = "0f9c2b1e-8f5d-4f6b-9c0d-1a2b3c4d5e6f"
MOUNT = (
    f"812 790 259:1 /var/lib/kubelet/pods/{UID}/etc-hosts /etc/hosts rw,noatime - ext4 /dev/nvme rw"
)


def pod_tree(root: Path, *, namespace: str = "ml") -> Path:
    account = root / "var/run/secrets/kubernetes.io/serviceaccount"
    for folder in (account, root / "proc/self", root / "etc"):
        folder.mkdir(parents=True)
    (account / "namespace").write_text(namespace)
    (root / "proc/self/mountinfo").write_text(f"1 2 0:1 / / rw - overlay o rw\n{MOUNT}\n")
    (root / "etc/hostname").write_text("train-node-0-abcde\n")
    return root


def test_pod_is_told_by_what_the_kubelet_mounts(tmp_path: Path) -> None:
    root = pod_tree(tmp_path)
    assert find_pod({}, root=root) is None
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    expected = {"name": "train-node-0-abcde", "namespace": "ml", "uid": UID}
    assert find_pod(inside, root=root) == expected
    named = {"POD_NAME": "own", "POD_NAMESPACE": "other", "POD_UID": "7"}
    assert find_pod(inside | named, root=root) == {"name": "own", "namespace": "other", "uid": "7"}
    assert find_pod(inside, root=tmp_path / "nothing") is None
    assert find_pod(inside, root=pod_tree(tmp_path / "x", namespace="../secrets")) is None
