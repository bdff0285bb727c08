"""Device times on a real GPU, against times that the script measures itself."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from haiprof import Analyzer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys, torch
torch.manual_seed(0)
layers = [torch.nn.Linear(4096, 4096, bias=False) for _ in range(8)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
x = torch.randn(8192, 4096, device="cuda")
marks = []
for _ in range(40):
    events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    events[0].record()
    y = model(x)
    events[1].record()
    y.sum().backward()
    events[2].record()
    optimizer.step()
    events[3].record()
    optimizer.zero_grad()
    marks.append(events)
torch.cuda.synchronize()
for _ in range(3):  # what the device has passed is written at the next steps
    model(x).sum().backward()
    optimizer.step()
torch.cuda.synchronize()
model(x).sum().backward()
optimizer.step()
times = [[a.elapsed_time(b) * 1e6 for a, b in zip(m, m[1:])] for m in marks]
json.dump(times, open(sys.argv[1], "w"))
"""


def haiprof(*words: str, cwd: Path) -> None:
    command = [sys.executable, "-m", "haiprof", "--log-dir", str(cwd / "logs"), "--quiet", *words]
    subprocess.run(command, cwd=cwd, check=True, timeout=300)


def test_device_times_are_those_of_the_scripts_own_events(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    haiprof("train.py", "truth.json", cwd=tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    steps = Analyzer(tmp_path / "logs").steps()
    assert steps.height == 44
    for column, phase in enumerate(("forward", "backward", "optimizer")):
        measured = steps[f"{phase}_device_ns"][5:40].drop_nulls().median()
        expected = statistics.median(row[column] for row in truth[5:])
        assert isinstance(measured, float)
        assert abs(measured - expected) < max(0.02 * expected, 0.3e6), phase


def test_operators_left_on_the_cpu_are_the_verdict(tmp_path: Path) -> None:
    example = str(ROOT / "examples" / "cpu_bound_forward.py")
    haiprof(example, "--seconds", "15", "--device", "cuda", cwd=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "haiprof", "verdict", str(tmp_path / "logs"), "--json"],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    verdict = json.loads(done.stdout)
    assert verdict["headline"].startswith("operators left on the CPU")
