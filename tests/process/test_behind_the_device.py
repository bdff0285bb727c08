"""What the host does while its GPU is busy gains nothing; on a simulated GPU with a queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.base.ledger import Account, Ledger
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import as_document
from tests.process.jobs import SIMULATED_GPU, run_script, succeeded

pytestmark = pytest.mark.slow

JOB = f"""{SIMULATED_GPU}
DEVICE_NS, STEPS, TURNS = int(sys.argv[1]) * 1_000_000, int(sys.argv[2]), 80_000

class Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(DEVICE_NS // 2)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(DEVICE_NS // 2)
        return gradient

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(384, 384) for _ in range(8)))
    def forward(self, x):
        return self.layers(Work.apply(x))

def while_queued():
    return sum(i * i for i in range(TURNS))  # HIDDEN

def while_idle():
    return sum(i * i for i in range(TURNS))  # EXPOSED

net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
for _ in range(STEPS):
    loss = net(torch.randn(128, 384, requires_grad=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    while_queued()
    torch.cuda.synchronize()
    while_idle()
"""
LINES = {
    line.split("# ")[1]: number
    for number, line in enumerate(JOB.splitlines(), start=1)
    if line.endswith(("HIDDEN", "EXPOSED"))
}


def record(folder: Path, device_ms: int, steps: int) -> Ledger:
    job = succeeded(run_script(folder, JOB, str(device_ms), str(steps)))
    ledger = diagnose(job.analyzer()).ledger
    assert ledger is not None
    return ledger


def account_of(ledger: Ledger, word: str) -> Account:
    (found,) = (account for account in ledger.accounts if account.line == LINES[word])
    return found


def test_code_gains_only_what_the_device_waits_for_it(tmp_path: Path) -> None:
    # So long that the host is behind the device, also where other processes have its cores.
    ledger = record(tmp_path / "busy", 120, 80)
    hidden, exposed = account_of(ledger, "HIDDEN"), account_of(ledger, "EXPOSED")
    assert hidden.ns_per_step > 2e6
    assert hidden.gain_ns < 0.2 * hidden.ns_per_step
    assert exposed.gain_ns > 0.7 * exposed.ns_per_step
    assert exposed.gain_low_ns == 0  # no counter of the GPU: its events give a bound
    assert ledger.device_idle_is_bound
    assert ledger.device_idle_ns is not None
    idle_ns = ledger.mean_ns - 120e6  # of each step the device computes for 120 ms
    assert 0.95 * idle_ns < ledger.device_idle_ns < idle_ns + 0.25 * ledger.mean_ns


@pytest.mark.proof
def test_all_host_code_gains_where_the_device_waits(tmp_path: Path) -> None:
    ledger = record(tmp_path / "idle", 0, 250)
    for word in ("HIDDEN", "EXPOSED"):
        account = account_of(ledger, word)
        assert account.gain_ns > 0.8 * account.ns_per_step > 1e6


@pytest.mark.proof
def test_verdict_of_a_run_with_a_traced_gpu_has_the_ledger_of_the_gpu(tmp_path: Path) -> None:
    job = run_script(tmp_path, JOB, "5", "250", options=("--trace",))
    document = as_document(diagnose(job.analyzer()))
    step, ledger = document["device"]["step"], document["device"]["ledger"]
    assert sum(row["ns_per_step"] for row in ledger) + step["residual_ns"] == pytest.approx(
        step["mean_ns"]
    )
    assert any(row["activity"].startswith("compute") for row in ledger)
    assert "ledger of the device's time" in " ".join(job.stderr.replace("│", " ").split())
