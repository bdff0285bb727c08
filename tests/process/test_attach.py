"""Running jobs are attached to: recorded ones, those whose recording has ended, foreign ones."""

from __future__ import annotations

import importlib.util
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

from haiprof import Analyzer
from tests.process.jobs import environment, run_command
from tests.process.live import within

pytestmark = pytest.mark.slow

# It trains until the file `stop` is there, and tells the losses of its first 300 steps.
NAME = f"attached_train_{os.environ.get('PYTEST_XDIST_WORKER', '0')}.py"
"""Of a worker's own: a job is found by its script's name, and other workers have theirs."""
SCRIPT = """
import hashlib, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.full((16,), index / 100)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
digest, count = hashlib.sha256(), 0
while count < 300 or not os.path.exists("stop"):
    for batch in DataLoader(Slow(), batch_size=4):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        count += 1
        if count <= 300:
            digest.update(loss.detach().numpy().tobytes())
        if count == 30:
            print("TRAINS", flush=True)
print(digest.hexdigest(), sorted(name for name in globals() if "haiprof" in name), flush=True)
sys.exit(7)
"""


class Running:
    """A training process, under haiprof or not."""

    def __init__(self, folder: Path, *launcher: str) -> None:
        self.folder = folder
        (folder / NAME).write_text(SCRIPT)
        self.process = subprocess.Popen(
            [sys.executable, *launcher, str(folder / NAME)],
            cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "TRAINS\n"

    def attach(self, *words: str, status: int = 0) -> dict[str, Any]:
        logs = str(self.folder / "logs")
        done = run_command(["attach", *words, "--json", "--log-dir", logs], folder=self.folder)
        assert done.returncode == status, done.stderr
        found: dict[str, Any] = json.loads(done.stdout) if not status else {"error": done.stderr}
        return {**found, "talk": done.stderr}

    def end(self) -> str:
        """Lets it end by itself; what it printed."""
        (self.folder / "stop").touch()
        out, err = self.process.communicate(timeout=120)
        assert self.process.returncode == 7, err
        assert err == ""
        return out

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate(timeout=30)


def wait_for_the_end_of_recording(folder: Path) -> None:
    """Its rank has said so, and the launcher has had the time to hear it."""
    lines = "logs/*/ranks/0/events.jsonl"
    within(60, lambda: any("record_end" in file.read_text() for file in folder.glob(lines)))
    time.sleep(1.5)


LAUNCHER = ("-m", "haiprof", "--quiet", "--log-dir", "logs")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Running(tmp_path_factory.mktemp("bare")).end()


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One job for the tests that use it, which are in order: stopped, looked at, entered, ended."""
    job = Running(tmp_path_factory.mktemp("foreign"))
    yield job
    job.kill()


def test_recorded_job_is_judged_by_its_next_seconds(tmp_path: Path, undisturbed: str) -> None:
    job = Running(tmp_path, *LAUNCHER)
    try:
        found = job.attach(NAME, "--time", "3")
        assert (found["how"], found["ranks"], found["refused"]) == ("recorded", [0], {})
        assert "Slow.__getitem__" in found["verdict"]["headline"]
        whole = Analyzer(found["run"]).steps().height
        assert 0 < found["verdict"]["step_count"] < whole
        assert job.end() == undisturbed
    finally:
        job.kill()


@pytest.mark.proof
def test_job_whose_recording_has_ended_records_again_twice(
    tmp_path: Path, undisturbed: str
) -> None:
    job = Running(tmp_path, *LAUNCHER, "--time", "0.5")
    try:
        wait_for_the_end_of_recording(tmp_path)
        first = job.attach(NAME, "--time", "2")
        second = job.attach(str(job.process.pid), "--time", "2", "--trace", "--steps", "3")
        for found in (first, second):
            assert (found["how"], found["ranks"], found["refused"]) == ("resumed", [0], {})
            assert "Slow.__getitem__" in found["verdict"]["headline"]
            analyzer = Analyzer(found["run"])
            assert analyzer.ranks()["recording_ended"].to_list() == ["time"]
            assert analyzer.counters().filter(source="process").height > 0
            assert Path(found["run"]).name.startswith(f"attach-{Path(NAME).stem}-")
            assert Path(found["run"]).parent == tmp_path / "logs"
        (rank,) = second["trace"]["ranks"]
        assert rank["state"] == "done", rank
        assert Path(rank["path"]).is_file()
        assert job.end() == undisturbed
    finally:
        job.kill()


def test_process_without_torch_is_not_found(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        done = subprocess.run(
            [sys.executable, "-m", "haiprof", "attach", str(sleeper.pid), "--time", "1"],
            cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
        )  # fmt: skip
    finally:
        sleeper.kill()
        sleeper.wait()
    assert done.returncode == 3
    assert "no process of yours that has PyTorch loaded" in done.stderr
    assert not list(tmp_path.iterdir())


def test_stopped_process_is_not_entered(foreign: Running) -> None:
    os.kill(foreign.process.pid, signal.SIGSTOP)
    said = foreign.attach(str(foreign.process.pid), "--inject", "--time", "2", status=1)["error"]
    assert "it is stopped by a signal" in said
    assert "nothing was changed" in said
    assert not (foreign.folder / "logs").exists()
    os.kill(foreign.process.pid, signal.SIGCONT)


def test_foreign_process_is_looked_at_from_outside(foreign: Running) -> None:
    found = foreign.attach(str(foreign.process.pid), "--time", "4")
    assert found["how"] == "outside"
    (seen,) = found["seen"]
    assert seen["problem"] is None
    assert seen["sample_count"] > 0
    assert max(seen["shares"], key=seen["shares"].__getitem__) == "dataloader"
    assert found["verdict"] is None
    analyzer = Analyzer(found["run"])
    assert analyzer.counters().filter(source="process", metric="cpu_main_cores").height > 0


@pytest.mark.skipif(
    sys.version_info < (3, 14) and importlib.util.find_spec("hypno") is None,
    reason="hypno is not installed",
)
def test_hook_is_put_into_a_foreign_process_and_out_again(foreign: Running) -> None:
    for _ in range(2):
        found = foreign.attach(NAME, "--inject", "--time", "2")
        assert (found["how"], found["ranks"], found["refused"]) == ("injected", [0], {})
        assert "cannot afford to lose" in found["talk"]
        assert "Slow.__getitem__" in found["verdict"]["headline"]
        analyzer = Analyzer(found["run"])
        assert analyzer.steps().height > 0
        assert analyzer.ranks()["recording_ended"].to_list() == ["time"]


def test_foreign_process_computes_what_it_does_undisturbed(
    foreign: Running, undisturbed: str
) -> None:
    assert foreign.end() == undisturbed
