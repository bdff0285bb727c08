"""Real jobs with one slow place each: the finding names its line, and nothing of it disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from tests.process.jobs import run_job

pytestmark = pytest.mark.slow

JOB = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
where, workers, method = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None

def work(ms):
    until = time.perf_counter() + ms / 1e3
    while time.perf_counter() < until:
        torch.ones(4).sum()  # lets go of the interpreter lock for a moment, again and again

class Data(Dataset):
    seen = False
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if where == "dataset":
            work(4)
        if where == "first" and index == 0 and not self.seen:
            self.seen = True
            work(2500)
        return torch.full((16,), float(index))

def metric(loss):
    work(12)
    return loss.item()

def main():
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    until, data = time.time() + 5, Data()
    while time.time() < until:
        for batch in DataLoader(data, batch_size=4, num_workers=workers,
                                multiprocessing_context=method):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.001)  # where samples would fall that wait for the lock
            if where == "metric":
                metric(loss)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("where", "workers", "method", "rule", "function"),
    [
        pytest.param("dataset", "0", "", "dataloader_bound", "work", marks=pytest.mark.proof),
        ("dataset", "2", "fork", "dataloader_bound", "work"),
        pytest.param("metric", "0", "", "outside_the_model", "work", marks=pytest.mark.proof),
        ("first", "0", "", "first_batch", "work"),
    ],
)
def test_finding_names_the_function_that_takes_the_time(
    tmp_path: Path, where: str, workers: str, method: str, rule: str, function: str
) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = ["python", str(tmp_path / "train.py"), where, workers, method]
    job = run_job(command, folder=tmp_path / "job", haiprof=True)
    assert job.returncode == 0, job.stderr
    assert job.log_dir is not None
    found = next(f for f in diagnose(Analyzer(job.log_dir)).findings if f.rule == rule)
    lines = found.code_lines
    assert lines, found
    assert lines[0].function == function


@pytest.mark.proof
def test_spawned_workers_are_sampled_until_they_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = ["python", str(tmp_path / "train.py"), "dataset", "1", "spawn"]
    job = run_job(command, folder=tmp_path / "job", haiprof=True)
    assert job.returncode == 0, job.stderr
    lines = job.analyzer().lines()
    assert "work" in lines.filter(lines["phase"] == "worker")["function"].to_list()


def test_recorder_leaves_stacks_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(JOB)
    command = ["python", str(tmp_path / "train.py"), "dataset", "1", "fork"]
    options = ("--recorder", "phases,host")
    job = run_job(command, folder=tmp_path / "job", haiprof=True, options=options)
    assert job.returncode == 0, job.stderr
    assert job.log_dir is not None
    assert not list(job.log_dir.glob("*/ranks/*/stacks.jsonl"))
    assert not list(job.log_dir.glob("*/ranks/*/worker-*"))
