"""Collectives that a job's own code calls in each step are named with their line; DDP's are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Finding
from tests.process.jobs import TWO_RANKS, Job, succeeded

pytestmark = pytest.mark.slow
RULE = "blocking_collectives"
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
layers = [m for _ in range(4) for m in (nn.Linear(128, 128), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 128)
seen = [None, None]
def share_metrics(loss):
    for _ in range(40):
        dist.all_gather_object(seen, {"loss": loss})  # CALL
for step in range(60 if sys.argv[1] == "each_step" else 400):
    time.sleep(0.005)  # a batch comes from elsewhere
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if sys.argv[1] == "each_step":
        share_metrics(loss.item())
dist.barrier()
time.sleep(0.2)
dist.destroy_process_group()
"""


@pytest.fixture
def found(tmp_path: Path, job_cache: Callable[..., Job]) -> Callable[[str], Finding | None]:
    """The rule's finding on a run of the script."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def judge(word: str) -> Finding | None:
        job = succeeded(job_cache(*TWO_RANKS, str(script), word, haiprof=True))
        verdict = diagnose(job.analyzer())
        assert RULE not in dict(verdict.abstained)
        return next((each for each in verdict.findings if each.rule == RULE), None)

    return judge


def test_metrics_shared_in_each_step_are_named_with_their_line(
    found: Callable[[str], Finding | None],
) -> None:
    finding = found("each_step")
    assert finding is not None
    line = 1 + SCRIPT.splitlines().index(next(s for s in SCRIPT.splitlines() if "# CALL" in s))
    named = finding.code_lines[0]
    assert (Path(named.file).name, named.line, named.function) == (
        "train.py", line, "share_metrics",
    )  # fmt: skip
    assert "torch.distributed.distributed_c10d.all_gather_object" in named.callees


@pytest.mark.proof
def test_what_ddp_calls_is_no_finding(found: Callable[[str], Finding | None]) -> None:
    assert found("never") is None
