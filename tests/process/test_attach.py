"""Running jobs are attached to: recorded ones, those whose recording has ended, foreign ones."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from haiprof import Analyzer
from tests.process.jobs import run_command
from tests.process.live import LiveJob, within

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


ENDS: set[str] = set()
"""What such jobs print at their end, each of which is treated otherwise."""


def start(folder: Path, *options: str, haiprof: bool = True) -> LiveJob:
    """A training process, under haiprof or not."""
    (folder / NAME).write_text(SCRIPT)
    return LiveJob(folder, ["python", NAME], *options, haiprof=haiprof)


def end(job: LiveJob) -> None:
    """Lets it end by itself: whatever was done to it, it computes what the others do."""
    (job.folder / "stop").touch()
    ENDS.add(job.end())
    assert (job.process.returncode, job.stderr) == (7, "")
    (said,) = ENDS
    assert said.endswith(" []\n"), "no name of haiprof's is left in the job"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveJob]:
    """One job for the tests that use it, which are in order: stopped, looked at, entered, ended."""
    with start(tmp_path_factory.mktemp("foreign"), haiprof=False) as job:
        yield job


def test_recorded_job_is_judged_by_its_next_seconds(tmp_path: Path) -> None:
    with start(tmp_path, "--quiet") as job:
        found = job.ask("attach", NAME, "--time", "3")
        assert (found["how"], found["ranks"], found["refused"]) == ("recorded", [0], {})
        assert "Slow.__getitem__" in found["verdict"]["headline"]
        whole = Analyzer(found["run"]).steps().height
        assert 0 < found["verdict"]["step_count"] < whole
        end(job)


@pytest.mark.proof
def test_job_whose_recording_has_ended_records_again_twice(tmp_path: Path) -> None:
    with start(tmp_path, "--quiet", "--time", "0.5") as job:
        within(60, lambda: not job.listed()["recording"])
        first = job.ask("attach", NAME, "--time", "2")
        second = job.ask("attach", job.pid, "--time", "2", "--trace", "--steps", "3")
        for found in (first, second):
            assert (found["how"], found["ranks"], found["refused"]) == ("resumed", [0], {})
            assert "Slow.__getitem__" in found["verdict"]["headline"]
            analyzer = Analyzer(found["run"])
            assert analyzer.ranks()["recording_ended"].to_list() == ["time"]
            assert analyzer.counters().filter(source="process").height > 0
            assert Path(found["run"]).name.startswith(f"attach-{Path(NAME).stem}-")
            assert Path(found["run"]).parent == job.logs
        (rank,) = second["trace"]["ranks"]
        assert rank["state"] == "done", rank
        assert Path(rank["path"]).is_file()
        end(job)


def test_process_without_torch_is_not_found(tmp_path: Path) -> None:
    sleeper = subprocess.Popen(["sleep", "60"])
    try:
        done = run_command(["attach", str(sleeper.pid), "--time", "1"], folder=tmp_path)
    finally:
        sleeper.kill()
        sleeper.wait()
    assert done.returncode == 3
    assert "no process of yours that has PyTorch loaded" in done.stderr
    assert not list(tmp_path.iterdir())


def test_stopped_process_is_not_entered(foreign: LiveJob) -> None:
    os.kill(foreign.process.pid, signal.SIGSTOP)
    said = foreign.ask("attach", foreign.pid, "--inject", "--time", "2", status=1)["talk"]
    assert "it is stopped by a signal" in said
    assert "nothing was changed" in said
    assert not (foreign.folder / "logs").exists()
    os.kill(foreign.process.pid, signal.SIGCONT)


def test_foreign_process_is_looked_at_from_outside(foreign: LiveJob) -> None:
    found = foreign.ask("attach", foreign.pid, "--time", "4")
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
def test_hook_is_put_into_a_foreign_process_and_out_again(foreign: LiveJob) -> None:
    for _ in range(2):
        found = foreign.ask("attach", NAME, "--inject", "--time", "2")
        assert (found["how"], found["ranks"], found["refused"]) == ("injected", [0], {})
        assert "cannot afford to lose" in found["talk"]
        assert "Slow.__getitem__" in found["verdict"]["headline"]
        analyzer = Analyzer(found["run"])
        assert analyzer.steps().height > 0
        assert analyzer.ranks()["recording_ended"].to_list() == ["time"]


def test_foreign_process_computes_what_a_recorded_one_does(foreign: LiveJob) -> None:
    end(foreign)
