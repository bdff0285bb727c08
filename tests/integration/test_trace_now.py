"""A running job of two real ranks is traced on demand: the same steps on both."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer, TraceAnalysis
from tests.integration.jobs import environment

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
    if step == 40 and dist.get_rank() == 0:
        print("TRAINS", flush=True)
    time.sleep(0.01)
"""


class Live:
    """A job that runs."""

    def __init__(self, folder: Path, *options: str, source: str = SCRIPT) -> None:
        script = folder / "train.py"
        script.write_text(source)
        self.folder = folder
        torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone"]
        launcher = [sys.executable, "-m", "haiprof", "--quiet", "--log-dir", str(folder / "logs")]
        self.process = subprocess.Popen(
            [*launcher, *options, *torchrun, "--nproc-per-node", "2", str(script)],
            env=environment(), cwd=folder, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "TRAINS\n"

    @property
    def pids(self) -> dict[int, int]:
        reports = [json.loads(f.read_text()) for f in self.folder.glob("logs/*/ranks/*/rank.json")]
        return {report["rank"]: report["pid"] for report in reports}

    def ask(self, *words: str, status: int | None = 0) -> dict[str, Any]:
        command = [sys.executable, "-m", "haiprof", *words, "--json"]
        done = subprocess.run(
            [*command, "--log-dir", str(self.folder / "logs")], env=environment(),
            capture_output=True, text=True, timeout=120, check=False, cwd=self.folder,
        )  # fmt: skip
        assert done.returncode == status or status is None, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def end(self) -> None:
        for pid in [*self.pids.values(), self.process.pid]:
            os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    job = Live(tmp_path)
    time.sleep(1.5)  # ranks report in once a second
    yield job
    job.end()


def test_all_ranks_trace_the_same_steps_twice_in_one_run(live: Live) -> None:
    pid = str(live.process.pid)
    for window, count in ((0, 5), (1, 3)):
        found = live.ask("trace-now", pid, "--steps", str(count))
        assert (found["window"], found["aligned"]) == (window, True)
        assert [rank["state"] for rank in found["ranks"]] == ["done", "done"]
        first, after = found["ranks"][0]["steps"]
        assert after - first == count
        analysis = TraceAnalysis(Path(found["run"]), window=window)
        assert sorted(analysis.traces) == [0, 1]
        for trace in analysis.traces.values():
            assert trace.steps["step"].to_list() == list(range(first, after))
    windows = Analyzer(live.folder / "logs").windows()
    assert windows["trigger"].unique().to_list() == ["request"]
    assert live.process.poll() is None
    (job,) = [job for job in live.ask("ps")["jobs"] if job["path"] == found["run"]]
    assert job["step"] > after
    assert (job["ranks"], job["world_size"]) == (2, 2)


@pytest.mark.parametrize("window", [("--steps", "3"), ("--time", "0.3")])
def test_ranks_of_a_job_with_two_optimizers_trace_the_same_steps(
    tmp_path: Path, window: tuple[str, str]
) -> None:
    job = Live(tmp_path, source=GAN)
    time.sleep(1.5)
    try:
        found = job.ask("trace-now", str(job.process.pid), *window)
        assert [rank["state"] for rank in found["ranks"]] == ["done", "done"], found
        steps = [job_steps(rank["path"]) for rank in found["ranks"]]
        assert steps[0] == steps[1]
        assert len(steps[0]) >= 3
    finally:
        job.end()


def job_steps(path: str) -> list[str]:
    """Steps in a trace, as the job itself numbers them."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name")).startswith("job_step_")})


def test_ranks_that_record_again_trace_the_same_steps(tmp_path: Path) -> None:
    job = Live(tmp_path, "--time", "0.3", source=GAN)
    time.sleep(4)
    try:
        words = ("--time", "5", "--trace", "--steps", "3")
        trace = job.ask("attach", str(job.process.pid), *words)["trace"]
        assert [rank["state"] for rank in trace["ranks"]] == ["done", "done"], trace
        assert trace["aligned"]
        first, second = (job_steps(rank["path"]) for rank in trace["ranks"])
        assert first == second
        assert len(first) == 3
    finally:
        job.end()


def test_stopped_rank_is_silent_and_the_rest_says_why(live: Live) -> None:
    os.kill(live.pids[1], signal.SIGSTOP)
    found = live.ask("trace-now", str(live.process.pid), "--timeout", "4", status=1)
    assert {rank["rank"]: rank["state"] for rank in found["ranks"]} == {0: "silent", 1: "silent"}
    assert "did not reach" in found["ranks"][0]["reason"]
    assert found["ranks"][1]["reason"] == "no answer"
    os.kill(live.pids[1], signal.SIGCONT)
    limit = time.monotonic() + 60
    while True:  # the ranks may still be at the first window, of which they hear now
        again = live.ask("trace-now", str(live.process.pid), "--steps", "2", status=None)
        states = {rank["state"] for rank in again["ranks"]}
        if states == {"done"} or time.monotonic() > limit:
            break
        time.sleep(0.5)
    assert states == {"done"}, again


def test_job_whose_recording_has_ended_refuses(tmp_path: Path) -> None:
    job = Live(tmp_path, "--time", "0.1")
    try:
        time.sleep(4)
        found = job.ask("trace-now", str(job.process.pid), status=1)
        assert {rank["state"] for rank in found["ranks"]} == {"refused"}
        assert "recording has ended" in found["ranks"][0]["reason"]
    finally:
        job.end()
