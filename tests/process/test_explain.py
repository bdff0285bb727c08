"""`haiprof --explain` and `verdict --collect` on a real job: what backward does has its line."""

from __future__ import annotations

from pathlib import Path

import pytest

import haiprof
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.trace_analysis.python_code import operator_lines
from tests.process.jobs import run_script
from tests.process.live import LiveJob

LOOP = """
import sys
import torch

torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.layer(x)
        row = x[0]
        for _ in range(400):
            row = row * self.scale  # LOOP
        return x + row

net = Net()
print("TRAINS", flush=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for _ in range(int(sys.argv[1])):
    loss = net(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.gettrace(), f"{loss.item():.17g}")
"""
LINE = LOOP.splitlines().index("            row = row * self.scale  # LOOP") + 1


def check_loop(verdict: Verdict) -> None:
    assert verdict.ledger is not None
    (account,) = (a for a in verdict.ledger.accounts if a.explanation == "many_small_operators")
    assert (account.line, account.function) == (LINE, "Net.forward")
    assert account.gain_ns > 0.2 * verdict.ledger.mean_ns  # most of forward and backward
    assert "many_small_operators" in {finding.rule for finding in verdict.findings}


def test_a_loop_of_small_operators_is_found_with_its_backward(tmp_path: Path) -> None:
    job = run_script(tmp_path, LOOP, "150", options=("--explain",))
    assert job.stdout.startswith("TRAINS\nNone "), "nothing follows its lines afterwards"
    (trace,) = haiprof.TraceAnalysis(job.analyzer().run.root).traces.values()
    assert trace.steps.height == 2
    lines = {row["line"]: row for row in operator_lines(trace).to_dicts()}
    assert lines[LINE]["operator_count"] == lines[LINE]["node_count"] == 800
    check_loop(diagnose(job.analyzer()))
    assert "many small operators" in job.stderr
    assert "training stopped for" in " ".join(job.stderr.replace("│", " ").split())


@pytest.mark.proof
def test_collect_takes_its_window_by_itself(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    words = ["python", str(tmp_path / "loop.py"), "1000000"]
    with LiveJob(tmp_path, words, "--quiet") as job:
        job.reported(1)
        content = job.ask("verdict", str(job.run.root), "--collect", "--time", "10")
    (account,) = (a for a in content["ledger"] if a["explanation"] == "many_small_operators")
    assert account["line"] == LINE
    assert "training stopped for" in " ".join(content["traces"])
