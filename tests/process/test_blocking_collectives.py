"""Collectives that a job's own code calls in each step are named with their line; DDP's are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Finding
from tests.process.jobs import TWO_RANKS, Job, run_job, succeeded

pytestmark = pytest.mark.slow
RULE = "blocking_collectives"
SCRIPT = """
import os, sys, time
import torch
import torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.use_deterministic_algorithms(dist.get_rank() == 1)
layers = [m for _ in range(4) for m in (nn.Linear(128, 128), nn.ReLU())]
model = nn.parallel.DistributedDataParallel(
    nn.Sequential(*layers), find_unused_parameters=True, bucket_cap_mb=3)
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


def judge(folder: Path, word: str) -> tuple[Job, list[Finding]]:
    """A run of the script, and what is found in it."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    job = run_job((*TWO_RANKS, str(script), word), folder=folder / "job", haiprof=True)
    verdict = diagnose(succeeded(job).analyzer())
    assert RULE not in dict(verdict.abstained)
    return job, list(verdict.findings)


def test_metrics_shared_in_each_step_and_settings_that_differ_are_named(tmp_path: Path) -> None:
    job, findings = judge(tmp_path, "each_step")
    (finding,) = (each for each in findings if each.rule == RULE)
    line = 1 + SCRIPT.splitlines().index(next(s for s in SCRIPT.splitlines() if "# CALL" in s))
    named = finding.code_lines[0]
    assert (Path(named.file).name, named.line, named.function) == (
        "train.py", line, "share_metrics",
    )  # fmt: skip
    assert "torch.distributed.distributed_c10d.all_gather_object" in named.callees
    settings = job.analyzer().settings()
    assert settings.keys() == {0, 1}
    ddp = settings[0].models[0].ddp
    assert ddp is not None
    assert (ddp["find_unused_parameters"], ddp["bucket_bytes"]) == (True, 3 << 20)
    assert (settings[0].looks.no_sync_count, settings[0].flags["backend"]) == (0, "gloo")
    (found,) = (each for each in findings if each.rule == "settings_differ")
    assert "use_deterministic_algorithms" in found.title
    assert found.severity == "info"


@pytest.mark.proof
def test_what_ddp_calls_is_no_finding(tmp_path: Path) -> None:
    assert RULE not in [each.rule for each in judge(tmp_path, "never")[1]]
