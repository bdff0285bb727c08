"""Real jobs with one slow place each, or a thread beside: named, and nothing disturbs."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Finding
from tests.process.jobs import run_script, succeeded

pytestmark = pytest.mark.slow

JOB = """
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
where, workers, method = sys.argv[1], int(sys.argv[2]), sys.argv[3] or None
seconds = float(sys.argv[4])

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
    until, data = time.time() + seconds, Data()
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
        pytest.param("first", "0", "", "first_batch", "work", marks=pytest.mark.proof),
    ],
)
def test_finding_names_the_function_that_takes_the_time(
    tmp_path: Path, where: str, workers: str, method: str, rule: str, function: str
) -> None:
    job = succeeded(run_script(tmp_path, JOB, where, workers, method, "5"))
    # Beside busy neighbours, workers are waited for because of them; and what the training thread
    # does to receive batches is a finding of the same rule: the load decides which comes first.
    findings = diagnose(job.analyzer()).findings
    about = [f for f in findings if f.rule in (rule, "busy_neighbours") and f.code_lines]
    assert function in [line.function for finding in about for line in finding.code_lines], findings


@pytest.mark.proof
def test_recorder_leaves_stacks_out(tmp_path: Path) -> None:
    options = ("--recorder", "phases,host")
    job = succeeded(run_script(tmp_path, JOB, "dataset", "1", "fork", "1", options=options))
    assert not list(job.logs.glob("*/ranks/*/stacks.jsonl"))
    assert not list(job.logs.glob("*/ranks/*/worker-*"))


LOCK_JOB = """
import hashlib, queue, re, sys, threading, time
import torch

torch.set_num_threads(1)
ready, blob, lock = queue.Queue(2), bytes(1 << 24), threading.Lock()

def loop():
    while True:
        sum(i * i for i in range(20_000))

def long_calls():
    while True:
        re.match("(a|aa)+$", "a" * 26 + "!")

def batches():
    while True:
        hashlib.sha256(blob).digest()  # lets go of the lock
        ready.put(None)

def saves():
    while True:
        with lock:
            time.sleep(0.03)
        time.sleep(0.01)

other = globals()[sys.argv[1]]
threading.Thread(target=other, daemon=True).start()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
until = time.time() + 6
while time.time() < until:
    if other is batches:
        ready.get()
    with lock:
        x = torch.randn(64, 256)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def judge(tmp_path: Path, other: str) -> list[Finding]:
    job = succeeded(run_script(tmp_path, LOCK_JOB, other))
    return list(diagnose(job.analyzer()).findings)


@pytest.mark.parametrize("other", ["loop", pytest.param("long_calls", marks=pytest.mark.proof)])
def test_a_thread_that_holds_the_interpreter_lock_is_named(tmp_path: Path, other: str) -> None:
    found = {finding.rule: finding for finding in judge(tmp_path, other)}["interpreter_lock"]
    assert found.lost_ratio, "how much of it depends on who else has the cores"
    assert found.code_lines[0].function.startswith(other)


@pytest.mark.proof
def test_a_thread_that_is_only_waited_for_holds_no_lock(tmp_path: Path) -> None:
    findings = judge(tmp_path, "batches")
    problems = {finding.rule for finding in findings if finding.severity != "info"}
    assert "interpreter_lock" not in problems
    waits = next(finding for finding in findings if "waiting for a lock" in finding.title)
    lines = [line.function for line in waits.code_lines if line.of.endswith("in another thread")]
    assert "batches" in lines, "what it waits for is named with what it does"


def test_a_thread_that_holds_a_lock_while_it_sleeps_is_named(tmp_path: Path) -> None:
    waits = next(each for each in judge(tmp_path, "saves") if "waiting for a lock" in each.title)
    assert "another thread is at train.py" in waits.title
    assert waits.title.endswith(" saves")
    assert [line.function for line in waits.code_lines if line.of.endswith("thread")] == ["saves"]
