"""`haiprof try-loader` on a real job: other loaders are tried; nothing else of it is changed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.process.jobs import run_command

SLOW = """
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.ones(8)


net = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
loader = DataLoader(Samples(), 2, False, timeout=0)
for step, batch in enumerate(loader):
    net(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.save(net.state_dict(), "model.pt")
    if step == int(sys.argv[1]):
        break
print("workers", loader.num_workers)
"""


def test_a_free_loader_and_workers_are_measured(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(SLOW)
    (tmp_path / "model.pt").write_text("of the real run")
    words = ("--trial-steps", "120", "--workers", "1", "--json", str(script), "100000")
    done = run_command(["try-loader", *words], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    assert "trying the loader with 1 worker: 120 steps" in done.stderr

    trials = {trial["loader"]: trial for trial in content["trials"]}
    assert list(trials) == ["as given", "kept", "1"]
    assert [trial["workers"] for trial in trials.values()] == [0, 0, 1]
    for trial in trials.values():
        assert trial["reason"] is None
        assert trial["low"] < trial["steps_per_s"] < trial["high"]
    assert trials["as given"]["steps_per_s"] < 125  # 8 ms of sleep a batch
    assert trials["kept"]["steps_per_s"] > 1.2 * trials["as given"]["steps_per_s"]
    assert "if batches cost nothing" in content["headline"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.pt", "slow.py"]
    assert (tmp_path / "model.pt").read_text() == "of the real run"


def test_a_job_without_a_loader_says_so(tmp_path: Path) -> None:
    script = tmp_path / "bare.py"
    script.write_text("import torch\nprint(torch.ones(1))\n")
    done = run_command(["try-loader", str(script)], folder=tmp_path)
    assert done.returncode != 0
    assert "nothing to try: no training step was seen" in done.stderr
