"""Kubeflow Trainer's status server, played by a local one with a certificate of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.notifications import find_total_steps
from tests.process.jobs import run_job, training
from tests.sampling import first_of
from tests.webhook import Webhook

pytestmark = pytest.mark.slow

LOOP = training(
    "for number in range(100):", each="time.sleep(0.05)",
    after="print(model.weight.sum().item()); sys.exit({status})",
)  # fmt: skip


@dataclass
class Pod:
    """What Trainer mounts into one."""

    folder: Path

    def __post_init__(self) -> None:
        self.identity, self.token = self.folder / "tls.pem", self.folder / "token"
        key, certificate = self.folder / "tls.key", self.folder / "ca.crt"
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj",
             "/CN=trainer", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out",
             certificate], check=True, capture_output=True,
        )  # fmt: skip
        self.identity.write_bytes(key.read_bytes() + certificate.read_bytes())
        self.token.write_text("a-token\n")

    def variables(self, url: str) -> dict[str, str]:
        values = {"URL": url, "TOKEN": self.token, "CA_CERT": self.folder / "ca.crt"}
        named = {f"KUBEFLOW_TRAINER_SERVER_{name}": str(value) for name, value in values.items()}
        return {**named, "DISABLE_KUBEFLOW_INTEGRATION": "TRUE"}


def run(tmp_path: Path, variables: dict[str, str], status: int = 0, *, haiprof: bool = True) -> Any:
    script = tmp_path / "loop.py"
    script.write_text(LOOP.replace("{status}", str(status)))
    command = (sys.executable, str(script), "--max-steps", "100")
    folder = tmp_path / ("recorded" if haiprof else "bare")
    return run_job(command, folder=folder, haiprof=haiprof, extra_environment=variables)


def metrics(body: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in body["trainerStatus"]["metrics"]}


@pytest.mark.parametrize("status", first_of([0, 3], 0))
def test_steps_progress_and_verdict_reach_the_server_as_trainer_reads_them(
    tmp_path: Path, status: int
) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    pod = Pod(tmp_path)
    with Webhook(identity=pod.identity) as server:
        job = run(tmp_path, pod.variables(server.url), status)
    assert job.returncode == status
    assert set(server.tokens) == {"Bearer a-token"}
    for body in server.bodies:
        read = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        assert read.to_dict()["trainerStatus"]["metrics"] == body["trainerStatus"]["metrics"]
        assert body["trainerStatus"]["lastUpdatedTime"]
        assert all(1 <= len(value) <= 64 for value in metrics(body).values())
    first, last = server.bodies[0]["trainerStatus"], server.bodies[-1]["trainerStatus"]
    assert 0 < first["progressPercentage"] < 100
    assert 0 < first["estimatedRemainingSeconds"] < 60
    assert int(metrics(server.bodies[0])["haiprof_steps"]) < 100
    assert metrics(server.bodies[-1])["haiprof_steps"] == "100"
    assert metrics(server.bodies[-1])["haiprof_verdict"]
    assert (last["progressPercentage"] == 100) == (status == 0)


@pytest.mark.proof
def test_server_that_never_answers_changes_neither_exit_status_nor_output(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    bare = run(tmp_path, {}, 3, haiprof=False)
    with Webhook(identity=pod.identity, answers=False) as server:
        job = run(tmp_path, pod.variables(server.url), 3)
    assert (job.returncode, job.stdout) == (bare.returncode, bare.stdout)
    assert "the TrainJob's last status was not delivered" in job.stderr


@pytest.mark.proof
def test_server_of_another_certificate_gets_nothing(tmp_path: Path) -> None:
    pod, other = Pod(tmp_path), tmp_path / "other"
    other.mkdir()
    with Webhook(identity=Pod(other).identity) as server:
        job = run(tmp_path, pod.variables(server.url))
    assert job.returncode == 0
    assert server.bodies == []
    assert "TrainJob status: the server was not reached" in job.stderr


@pytest.mark.proof
def test_status_is_left_to_transformers_unless_that_is_switched_off(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pod = Pod(tmp_path)
    with Webhook(identity=pod.identity) as server:
        variables = pod.variables(server.url)
        del variables["DISABLE_KUBEFLOW_INTEGRATION"]
        job = run(tmp_path, variables)
    assert server.bodies == []
    assert "left to transformers' Trainer" in job.stderr


@pytest.mark.parametrize(
    ("command", "steps"),
    [
        ("python train.py --max-steps 500", 500),
        ("python train.py --max_steps=500", 500),
        ("python train.py trainer.max_steps=500 lr=0.1", 500),
        ("torchrun -m torchtitan.train --training.steps 500", 500),
        ("python pretrain_gpt.py --train-iters 500", 500),
        ("python train.py --steps 500", None),  # of an epoch, perhaps
        ("python train.py --max-steps -1", None),
        ("python train.py --max-steps", None),
        ("python train.py", None),
    ],
)
def test_steps_of_the_whole_job_are_known_where_its_command_says_them(
    command: str, steps: int | None
) -> None:
    assert find_total_steps(command.split()) == steps
