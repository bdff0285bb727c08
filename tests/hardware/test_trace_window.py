"""A trace window on a real GPU: kernels of exactly the steps asked for."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from tests.process.jobs import rank_events, run_job, succeeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(64, 512, device="cuda")
for _ in range(30):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(repr(loss.item()))
"""


def test_window_holds_kernels_of_its_steps(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    bare = succeeded(run_job(["python", str(script)], folder=tmp_path / "bare", haiprof=False))
    job = succeeded(
        run_job(
            ["python", str(script)], folder=tmp_path / "job", haiprof=True,
            options=("--quiet", "--steps", "10:15", "--trace-sync"),
        )
    )  # fmt: skip
    assert job.stdout == bare.stdout
    [line] = rank_events(job, "trace_window")
    assert (line["state"], line["steps"]) == ("recorded", [10, 15])
    assert job.log_dir is not None
    [path] = job.log_dir.glob("*/traces/*.pt.trace.json.gz")
    trace = json.loads(gzip.decompress(path.read_bytes()))
    assert trace["haiprof"]["gpu_uuid"].startswith("GPU-")
    events = trace["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert len(kernels) >= 5 * 12  # three matrix products and more per layer and step
    assert any(e.get("cat") == "cuda_sync" for e in events)
    marks = [e for e in events if e.get("cat") == "user_annotation" and "ProfilerStep" in e["name"]]
    assert sorted(e["name"] for e in marks) == [f"ProfilerStep#{n}" for n in range(10, 15)]
    lengths = [e["dur"] for e in sorted(marks, key=lambda e: e["ts"])]
    assert lengths[0] < 3 * max(lengths[1:])  # CUPTI was warm
