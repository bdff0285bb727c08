"""A job of three real ranks stands still: the snapshot names the rank that the others wait for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live import LiveJob, torchrun

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys, time, threading, socket, signal
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)

def spin():
    while True:
        pass

def wait_for_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def receive():
    here, there = socket.socketpair()
    here.recv(1)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def other_collective():
    dist.broadcast(torch.ones(7), 1)

def healthy():
    pass

for step in range(100_000):
    if step == 30 and rank == 1:
        print("FAULT", flush=True)
        globals()[fault]()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


@pytest.fixture
def hanging_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[LiveJob]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = torchrun(3, str(script), request.param)
    with LiveJob(tmp_path, command, "--quiet", said="FAULT") as job:
        job.reported(3)
        time.sleep(2)  # a second until the ranks' first status, one to stand still
        yield job


def snapshot(job: LiveJob) -> dict[str, Any]:
    found = job.ask("snapshot", job.pid)
    kept = json.loads(Path(found["path"]).read_text())
    assert kept == {name: found[name] for name in kept}
    return found


@pytest.mark.parametrize(
    ("hanging_job", "said"),
    [
        ("spin", "spin"),
        ("wait_for_lock", "wait_for_lock"),
        ("receive", "receive"),
        ("stop", "stopped by a signal"),
        ("other_collective", "broadcast"),
    ],
    indirect=["hanging_job"],
)
def test_rank_that_holds_the_others_up_is_named(hanging_job: LiveJob, said: str) -> None:
    found = snapshot(hanging_job)
    assert found["moves"] is False
    assert [suspect["rank"] for suspect in found["suspects"]] == [1]
    (suspect,) = found["suspects"]
    assert suspect["certain"]
    assert said in suspect["reason"] + suspect["doing"]
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1, 2]
    assert hanging_job.process.poll() is None, "looking at a job does not end it"


@pytest.mark.parametrize("hanging_job", ["healthy"], indirect=True)
def test_healthy_job_has_no_suspect_and_goes_on(hanging_job: LiveJob) -> None:
    found = snapshot(hanging_job)
    assert found["moves"] is True
    assert found["suspects"] == []
    assert all(rank["answered"] and rank["stack"] for rank in found["ranks"])
    dumps = list(hanging_job.logs.glob("*/ranks/*/collectives-*.json.gz"))
    assert dumps == [], "a job that moves is not asked for its collectives"
    assert snapshot(hanging_job)["moves"] is True
