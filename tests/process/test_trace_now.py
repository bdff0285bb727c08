"""A running job of two real ranks is traced on demand: the same steps on both.

A job that nothing disturbs is traced in test_live_jobs.py.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from haiprof.run_format.layout import RunPaths
from tests.process.live import LiveJob, plain_ranks, within

pytestmark = pytest.mark.slow

GAN = """
import time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
models = [DistributedDataParallel(torch.nn.Linear(8, 8)) for _ in range(2)]
optimizers = [torch.optim.SGD(model.parameters(), lr=.01) for model in models]
for step in range(1_000_000):
    with torch.profiler.record_function(f"job_step_{step}"):
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
    if step == 40 and dist.get_rank() == 0:
        print("TRAINS", flush=True)
    time.sleep(0.004)
"""

SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for step in range(100_000):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    if step == 20 and dist.get_rank() == 0:
        print("TRAINS", flush=True)
    time.sleep(0.04)
"""


def started(folder: Path, *options: str, source: str = SCRIPT) -> LiveJob:
    """The job, whose ranks have both reported in."""
    script = folder / "train.py"
    script.write_text(source)
    job = LiveJob(folder, plain_ranks(2, str(script)), "--quiet", *options)
    job.reported(2)
    return job


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveJob]:
    with started(tmp_path) as job:
        yield job


@pytest.mark.proof
@pytest.mark.parametrize(
    "window", [("--steps", "3"), pytest.param(("--time", "0.3"), marks=pytest.mark.proof)]
)
def test_ranks_of_a_job_with_two_optimizers_trace_the_same_steps(
    tmp_path: Path, window: tuple[str, str]
) -> None:
    with started(tmp_path, source=GAN) as job:
        found = job.ask("trace-now", job.pid, *window)
        assert [rank["state"] for rank in found["ranks"]] == ["done", "done"], found
        steps = [job_steps(rank["path"]) for rank in found["ranks"]]
        assert steps[0] == steps[1]
        assert len(steps[0]) >= 3


def job_steps(path: str) -> list[str]:
    """Steps in a trace, as the job itself numbers them."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name")).startswith("job_step_")})


HURRIES = """
import os, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=.1)
for step in range(1_000_000):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    if step == 40 and dist.get_rank() == 0:
        print("TRAINS", flush=True)
    if not os.path.exists("hurry"):
        time.sleep(0.05)
"""


@pytest.mark.proof
def test_job_that_becomes_faster_than_it_said_is_asked_again(tmp_path: Path) -> None:
    with started(tmp_path, source=HURRIES) as job, ThreadPoolExecutor(1) as pool:
        run = RunPaths(next((tmp_path / "logs").iterdir()))
        asking = pool.submit(job.ask, "trace-now", job.pid, "--steps", "3")
        within(30, lambda: any(run.control_requests.glob("*")))
        (tmp_path / "hurry").touch()
        found = asking.result()
    assert [rank["state"] for rank in found["ranks"]] == ["done", "done"], found
    assert found["aligned"]


@pytest.mark.proof
def test_ranks_that_record_again_trace_the_same_steps(tmp_path: Path) -> None:
    with started(tmp_path, "--time", "0.3", source=GAN) as job:
        within(60, lambda: not job.listed()["recording"])
        words = ("--time", "5", "--trace", "--steps", "3")
        trace = job.ask("attach", job.pid, *words)["trace"]
        assert [rank["state"] for rank in trace["ranks"]] == ["done", "done"], trace
        assert trace["aligned"]
        first, second = (job_steps(rank["path"]) for rank in trace["ranks"])
        assert first == second
        assert len(first) == 3


@pytest.mark.proof
def test_stopped_rank_is_silent_and_the_rest_says_why(live: LiveJob) -> None:
    os.kill(live.pids()[1], signal.SIGSTOP)
    found = live.ask("trace-now", live.pid, "--timeout", "4", status=1)
    assert {rank["rank"]: rank["state"] for rank in found["ranks"]} == {0: "silent", 1: "silent"}
    assert "did not reach" in found["ranks"][0]["reason"]
    assert found["ranks"][1]["reason"] == "no answer"
    os.kill(live.pids()[1], signal.SIGCONT)
    limit = time.monotonic() + 60
    while True:  # the ranks may still be at the first window, of which they hear now
        again = live.ask_any("trace-now", live.pid, "--steps", "2")
        states = {rank["state"] for rank in again["ranks"]}
        if states == {"done"} or time.monotonic() > limit:
            break
        time.sleep(0.5)
    assert states == {"done"}, again


@pytest.mark.proof
def test_job_whose_recording_has_ended_refuses(tmp_path: Path) -> None:
    with started(tmp_path, "--time", "0.1") as job:
        within(60, lambda: not job.listed()["recording"])
        found = job.ask("trace-now", job.pid, status=1)
        assert {rank["state"] for rank in found["ranks"]} == {"refused"}
        assert "recording has ended" in found["ranks"][0]["reason"]
