"""Real jobs that die and go on: their wall time adds up, and lost steps are those of their log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process.jobs import run_command, run_job

pytestmark = pytest.mark.slow

JOB = """

import json, os, sys, time
import torch, torch.distributed as dist
out, total, death = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
world = int(os.environ.get("WORLD_SIZE", 1))
if world > 1:  # torchrun's store lives on over restarts: gloo would find addresses of the last one
    store = f"file://{out}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]),
                            world_size=world)
rank = dist.get_rank() if world > 1 else 0
net = torch.nn.Linear(64, 64)
model = torch.nn.parallel.DistributedDataParallel(net) if world > 1 else net
optimizer = torch.optim.SGD(model.parameters(), lr=.01)
first = 0
if os.path.exists(f"{out}/last.pt"):
    state = torch.load(f"{out}/last.pt")
    net.load_state_dict(state["model"])
    first = state["step"]
batches = iter(torch.utils.data.DataLoader(torch.randn(4000, 64), batch_size=4))
log = open(f"{out}/log-{rank}", "a")
for step in range(first, total):
    model(next(batches)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(.01)
    print(step, file=log, flush=True)
    if (step + 1) % 10 == 0 and rank == 0:
        torch.save({"model": net.state_dict(), "step": step + 1}, f"{out}/whole.pt")
        os.replace(f"{out}/whole.pt", f"{out}/last.pt")
    if step == death and not os.path.exists(f"{out}/died"):
        if world > 1:
            dist.barrier()
        if rank == world - 1:
            open(f"{out}/died", "w")
            raise ValueError("bad sample")
"""
RESTARTED = ("torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3",
             "--monitor-interval", "0.1")  # fmt: skip


def goodput(logs: Path) -> dict[str, Any]:
    said = run_command(["goodput", "--json", str(logs)], folder=logs)
    assert said.returncode == 0, said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    assert found["residual_ns"] == 0
    assert sum(found["accounts"].values()) == found["wall_ns"]
    return found


def check_steps(found: dict[str, Any], out: Path, firsts: list[int]) -> None:
    """Against the job's own log."""
    trained = [int(line) for line in (out / "log-0").read_text().split()]
    assert sum(start["step_count"] for start in found["starts"]) == len(trained)
    lost = len(trained) - len(set(trained))
    assert found["lost_steps"] == [lost, lost]
    assert sum(start["kept_steps"] for start in found["starts"]) == 45
    assert [start["first_step"] for start in found["starts"]] == firsts
    went_on = [start["went_on"] for start in found["starts"]]
    assert went_on == ["first", *["checkpoint"] * (len(firsts) - 1)]
    assert {start["file"] for start in found["starts"][1:]} == {str(out / "last.pt")}
    accounts = found["accounts"]
    # Each of them sleeps for 10 ms; the last one of a start ends with its optimizer, before that.
    assert accounts["lost_steps"] > (lost - len(firsts) + 1) * 10e6
    assert accounts["productive_steps"] > 45 * 10e6
    assert accounts["checkpoint"] > 0
    assert accounts["uncertain_steps"] == accounts["hang"] == accounts["unknown"] == 0


def write(folder: Path) -> tuple[str, Path]:
    script, out = folder / "job.py", folder / "out"
    script.write_text(JOB)
    out.mkdir()
    return str(script), out


def test_restarts_by_torchrun_add_up(tmp_path: Path) -> None:
    script, out = write(tmp_path)
    job = run_job((*RESTARTED, script, str(out), "45", "17"), folder=tmp_path / "run",
                  haiprof=True, options=("--quiet",))  # fmt: skip
    assert job.log_dir is not None
    found = goodput(job.log_dir)
    assert (len(found["runs"]), len(found["starts"])) == (1, 2), job.stderr
    check_steps(found, out, [0, 10])
    assert found["accounts"]["waiting_for_ranks"] > 0
    assert found["accounts"]["queue"] == 0
    assert found["accounts"]["init"] > found["accounts"]["productive_steps"], "imports of torch"


def test_separate_runs_of_one_run_id_add_up_with_the_queue(tmp_path: Path) -> None:
    script, out = write(tmp_path)
    jobs = [
        run_job(
            ("python", script, str(out), "45", "17"), folder=tmp_path / f"run-{number}",
            haiprof=True, options=("--quiet", "--run-id=7"), log_dir=tmp_path / "logs",
        )
        for number in range(2)
    ]  # fmt: skip
    assert [job.returncode for job in jobs] == [1, 0]
    found = goodput(tmp_path / "logs")
    assert [Path(run).name for run in found["runs"]] == ["job-7", "job-7-2"]
    check_steps(found, out, [0, 10])
    assert found["accounts"]["queue"] > 0
    card = run_command(["goodput", str(tmp_path / "logs")], folder=tmp_path).stdout
    assert "2 runs joined: --run-id 7" in card
    assert "8 steps lost" in card
    assert "in none of these: 0 ns" in card
