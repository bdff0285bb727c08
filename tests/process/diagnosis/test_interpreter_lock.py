"""Real jobs beside whose training another thread works: with the interpreter lock, and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Finding
from tests.process.jobs import run_job

pytestmark = pytest.mark.slow

JOB = """
import hashlib, queue, re, sys, threading, time
import torch

torch.set_num_threads(1)
ready, blob = queue.Queue(2), bytes(1 << 24)

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

other = globals()[sys.argv[1]]
threading.Thread(target=other, daemon=True).start()
model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
until = time.time() + 6
while time.time() < until:
    if other is batches:
        ready.get()
    x = torch.randn(64, 256)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


def judge(tmp_path: Path, other: str) -> list[Finding]:
    (tmp_path / "train.py").write_text(JOB)
    command = ["python", str(tmp_path / "train.py"), other]
    job = run_job(command, folder=tmp_path / "job", haiprof=True)
    assert job.returncode == 0, job.stderr
    assert job.log_dir is not None
    return list(diagnose(Analyzer(job.log_dir)).findings)


@pytest.mark.parametrize("other", ["loop", pytest.param("long_calls", marks=pytest.mark.proof)])
def test_a_thread_that_holds_the_interpreter_lock_is_named(tmp_path: Path, other: str) -> None:
    found = {finding.rule: finding for finding in judge(tmp_path, other)}["interpreter_lock"]
    assert found.lost_ratio is not None
    assert found.lost_ratio > 0.15
    assert found.code_lines[0].function.startswith(other)


def test_a_thread_that_is_only_waited_for_holds_no_lock(tmp_path: Path) -> None:
    findings = judge(tmp_path, "batches")
    problems = {finding.rule for finding in findings if finding.severity != "info"}
    assert "interpreter_lock" not in problems
    assert findings, "the loop waits for its batches, which is a finding of its own"
