"""`haiprof compare` on real jobs: equal ones claim nothing, slower ones are found and explained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import REPOSITORY, run_command, run_job, succeeded

pytestmark = pytest.mark.slow

# Each step sleeps for 20 ms in all: what the machine does beside it is a small part.
JOB = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0)
class Data(Dataset):
    def __len__(self): return 200
    def __getitem__(self, place):
        time.sleep(0.008 + float(sys.argv[1]))
        return torch.randn(8, 16)
model = nn.Linear(16, 16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Data(), batch_size=None):
    time.sleep(0.012)
    loss = (model(batch) - batch).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compare") / "train.py"
    path.write_text(JOB)
    return path


def recorded(script: Path, name: str, word: object, logs: Path, **variables: str) -> Path:
    command = ("python", str(script), str(word))
    folder = script.parent / name
    options = ("--quiet", "--name", "job", "--run-id", name)
    succeeded(run_job(command, folder=folder, haiprof=True, options=options, log_dir=logs,
                      extra_environment=variables))  # fmt: skip
    return logs / f"job-{name}"


def compared(*words: object, folder: Path) -> tuple[int, dict[str, Any]]:
    done = run_command(["compare", *map(str, words), "--json"], folder=folder)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.proof
def test_real_runs_ten_percent_apart_are_found_and_equal_ones_are_not(
    script: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    first = recorded(script, "first", 0.0, logs)
    second = recorded(script, "second", 0.0, logs, OMP_NUM_THREADS="2", SECRET_TOKEN="geheim")

    _, equal = compared(first, second, folder=tmp_path)
    assert equal["verdict"]["state"] in ("same", "undecided")
    variables = [d for d in equal["differs"] if d["kind"] == "variable"]
    assert {d["name"]: d["after"] for d in variables}["OMP_NUM_THREADS"] == "2"
    assert "geheim" not in json.dumps(equal)

    for attempt in range(3):  # on a machine with other load a comparison may stay undecided
        slower = recorded(script, f"slower{attempt}", 0.004, logs)
        words = ("--baseline", "last-good", "--fail-if-slower", "5%")
        status, found = compared(slower, *words, folder=tmp_path)
        assert found["baseline"]["path"] == str(second)
        assert found["step_time"]["ratio"] == pytest.approx(1.18, abs=0.08)
        if found["verdict"]["state"] != "undecided":
            break
        assert status == 5
        shutil.rmtree(slower)
    assert (found["verdict"]["state"], status) == ("slower", 10)
    cause = found["positions"][0]
    assert (cause["name"], cause["is_certain"]) == ("input", True)
    commands = [d for d in found["differs"] if d["kind"] == "command"]
    assert commands[0]["after"][-1] == "0.004"


def test_steps_of_one_run_are_compared_with_those_before(tmp_path: Path) -> None:
    run = str(REPOSITORY / "tests" / "data" / "runs" / "two_ranks_one_slow")
    done = run_command(["compare", run, "--from-step", "15", "--json"], folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    whole = run_command(["compare", run, run, "--json"], folder=tmp_path)
    assert whole.returncode == 2, "a run with itself is refused as before"
    assert found["step_time"]["after_step_count"] > 0
    none = run_command(["compare", run, "--from-step", "100000"], folder=tmp_path)
    assert none.returncode == 5
    assert "no step 100000 was recorded" in none.stderr
