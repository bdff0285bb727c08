"""Real jobs traced through Kineto's side: under haiprof, without it, on two ranks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.trace_format.kineto.rank_trace import Trace
from tests.process.jobs import run_command
from tests.process.live import within

pytestmark = pytest.mark.slow

TRAIN = """

import os, time, torch
import torch.distributed as dist
ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(16, 16)
if ranks > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).sum()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
    stop = torch.tensor([float(os.path.exists("stop"))])
    if ranks > 1:
        dist.all_reduce(stop)
    if stop.item():
        break
if ranks > 1:
    dist.barrier()
    time.sleep(0.2)  # as examples/two_ranks_slow_one.py
    dist.destroy_process_group()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Short, since a Unix socket's address is."""
    with tempfile.TemporaryDirectory(prefix="hk-", dir="/tmp") as name:
        yield Path(name)


def environment(folder: Path, **more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KINETO")}
    return {**kept, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", **more}


def haiprof(folder: Path, *words: str, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run_command(words, folder=folder, extra_environment=env)


@contextlib.contextmanager
def running(folder: Path, *words: str, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    with (folder / f"out-{time.time_ns()}").open("w") as out:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, env=dict(env), stdout=out,
                                   stderr=subprocess.STDOUT, text=True)  # fmt: skip
        try:
            yield process
        finally:
            (folder / "stop").touch()
            try:
                process.wait(60)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()


@contextlib.contextmanager
def agent(folder: Path, env: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "haiprof", "kineto-agent"],
        cwd=folder, env=dict(env), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert "listening" in process.stderr.readline()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        if process.stderr is not None:
            process.stderr.close()


def traces(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["aligned"] in (True, None), said
    processes: list[dict[str, Any]] = said["processes"]
    assert all(each["state"] == "done" for each in processes), processes
    return processes


def test_job_with_only_the_variable_is_traced(folder: Path, sockets: Path) -> None:
    env = environment(folder, KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR=str(sockets))
    with agent(folder, env), running(folder, "train.py", env=env) as job:
        words = ("trace-now", str(job.pid), "--steps", "5", "--stacks", "-o", "traces", "--json")
        found = traces(haiprof(folder, *words, env=env))
    trace = Trace(found[0]["path"])
    assert found[0]["optimizer_step_count"] >= 5  # Kineto stops when its own thread comes to it
    assert trace.rank == 0
    assert trace.world_size == 1
    assert trace.metadata["haiprof"]["pid"] == job.pid
    assert trace.metadata["haiprof"]["steps"] is None
    assert "does not run under haiprof" in trace.metadata["haiprof"]["steps_reason"]
    assert len(trace.python)
    assert job.returncode == 0
    assert not (sockets / "dynolog").exists()


def test_job_of_slurm_is_chosen_by_its_number_and_begins_at_a_time(
    folder: Path, sockets: Path
) -> None:
    env = environment(folder, KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR=str(sockets))
    other, own = env | {"SLURM_JOB_ID": "11"}, env | {"SLURM_JOB_ID": "12"}
    with (agent(folder, env), running(folder, "train.py", env=other),
          running(folder, "train.py", env=own) as job):  # fmt: skip
        start = time.time() + 20
        at = ("--time", "0.5", "--start-at", f"{start:.3f}")
        words = ("slurm:12", *at, "-o", "traces", "--json")
        done = haiprof(folder, "trace-now", *words, env=env)
        assert "again" not in done.stderr, "one request, however long before its window"
        found = traces(done)
        assert [each["pid"] for each in found] == [job.pid]
        assert found[0]["start_wall_ns"] >= (start - 0.5) * 1e9
        # No daemon of dynolog's listens at that port.
        asked = ("--job-id", "12", "--log-file", "t.json", "--iterations", "3", "--json")
        done = haiprof(folder, "trace", "dyno", "gputrace", "--port", "9", *asked, env=env)
        (dyno,) = traces(done)
        status = haiprof(folder, "trace", "dyno", "status", "--port", "9", "--json", env=env)
        assert job.pid in json.loads(status.stdout)["agents"][f"{sockets}/dynolog"]
    assert dyno["path"] == str(folder / f"t_{job.pid}.json")
    assert Trace(dyno["path"]).rank == 0
    assert list(folder.glob("*.gz")) == []


@pytest.mark.proof
def test_two_ranks_record_the_same_steps_and_torchrun_none(folder: Path, sockets: Path) -> None:
    env = environment(folder, KINETO_USE_DAEMON="1", KINETO_IPC_SOCKET_DIR=str(sockets))
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    with agent(folder, env), running(folder, *words, env=env) as job:
        asked = ("trace-now", str(job.pid), "--steps", "5", "-o", "traces", "--json")
        found = traces(wait_for_ranks(folder, asked, env))
    assert [each["rank"] for each in found] == [0, 1]
    assert all(each["optimizer_step_count"] >= 5 for each in found)
    firsts = [each["first_optimizer_wall_ns"] for each in found]
    assert abs(firsts[0] - firsts[1]) < found[0]["step_ns"]
    assert [Trace(each["path"]).world_size for each in found] == [2, 2]
    assert job.returncode == 0


def wait_for_ranks(
    folder: Path, asked: tuple[str, ...], env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """On a loaded machine the ranks may need longer to import torch than the command waits."""
    for _ in range(4):
        done = haiprof(folder, *asked, env=env)
        if done.returncode != 5:
            break
    return done


def test_job_under_haiprof_gets_the_steps_that_haiprof_counts(folder: Path) -> None:
    env = environment(folder)
    words = ("-m", "haiprof", "--kineto", "--quiet", "--log-dir", "logs", "kineto_job.py")
    (folder / "train.py").rename(folder / "kineto_job.py")
    with running(folder, *words, env=env) as job:
        asked = ("trace-now", "kineto_job.py", "--log-dir", "logs", "--backend", "kineto", "--json")
        answers = (haiprof(folder, *asked, env=env) for _ in range(99))
        found = traces(within(60, lambda: one if (one := next(answers)).returncode == 0 else None))
        (run,) = (folder / "logs").iterdir()
        assert list((run / "control").glob("kineto-*/dynolog"))
    assert job.returncode == 0
    assert not list((run / "control").glob("kineto-*"))
    trace = Trace(found[0]["path"])
    assert Path(found[0]["path"]).parent == run / "traces"
    first, after = found[0]["steps"]
    assert after - first in (4, 5)
    assert trace.steps["step"].to_list() == list(range(first, after))
    assert trace.metadata["haiprof"]["run"] == run.name
    name = pl.col("name").cast(pl.String)
    for phase, operator in (("forward", "aten::linear"), ("backward", "autograd::engine::eval")):
        ranges = trace.phase_ranges.filter(name == phase).select("ts_ns", "dur_ns").rows()
        assert len(ranges) >= after - first
        for start, duration in ranges:
            held = pl.col("ts_ns").is_between(start, start + duration)
            assert trace.ops.filter(name.str.starts_with(operator) & held).height, phase
