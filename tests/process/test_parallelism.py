"""Eight real ranks, DP x PP x TP: a stage, a shard, a machine and one rank are slow in turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof.diagnosis.engine import diagnose
from haiprof.run_analysis.parallelism import find_layout
from haiprof.run_analysis.run_files import open_run
from haiprof.run_analysis.run_frames import RunFrames
from tests.process.jobs import TWO_RANKS, run_job, succeeded

pytestmark = pytest.mark.slow

SCRIPT = """
import json, os, socket, time
rank = int(os.environ["RANK"])
data, stage, tensor = rank // 4, rank // 2 % 2, rank % 2
machine = data ^ stage  # of each shard and stage, both machines have some ranks
socket.gethostname = lambda: f"node{machine}"
import torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")

def family(members, name):
    groups = [dist.new_group(ranks, group_desc=name) for ranks in members]
    return next(group for group, ranks in zip(groups, members) if rank in ranks)

TP = family([[0, 1], [2, 3], [4, 5], [6, 7]], "TENSOR_MODEL_PARALLEL_GROUP")
PP = family([[0, 2], [1, 3], [4, 6], [5, 7]], "mesh_pp")
DP = family([[0, 4], [1, 5], [2, 6], [3, 7]], "data_parallel")

class Part(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    def forward(self, x):
        if is_slow[fault]:
            time.sleep(0.02)
        y = self.net(x)
        whole = y.detach().clone()
        dist.all_reduce(whole, group=TP)
        return y + (whole - y.detach())

is_slow = {"stage": stage == 1, "shard": data == 1, "machine": machine == 1, "rank": rank == 5,
           "none": False}
part, peer = Part(), rank + 2 if stage == 0 else rank - 2
optimizer = torch.optim.SGD(part.parameters(), lr=1e-4)
times = {}
for fault in is_slow:
    dist.barrier()
    begun = time.time_ns()
    for step in range(100):
        if stage == 0:
            y = part(torch.randn(16, 64))
            dist.send(y.detach(), peer, group=PP)
            gradient = torch.empty(16, 64)
            dist.recv(gradient, peer, group=PP)
            y.backward(gradient)
        else:
            x = torch.empty(16, 64)
            dist.recv(x, peer, group=PP)
            x.requires_grad_()
            part(x).square().sum().backward()
            dist.send(x.grad, peer, group=PP)
        for parameter in part.parameters():
            dist.all_reduce(parameter.grad, group=DP)
        optimizer.step()
        optimizer.zero_grad()
    times[fault] = (begun, time.time_ns())
if rank == 0:
    json.dump(times, open("times.json", "w"))
dist.barrier()
"""
EIGHT_RANKS = (*TWO_RANKS[:-1], "8")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, int]]]:
    folder = tmp_path_factory.mktemp("parallel")
    (folder / "train.py").write_text(SCRIPT)
    done = succeeded(run_job((*EIGHT_RANKS, str(folder / "train.py")), folder=folder / "run",
                             haiprof=True, options=("--quiet",)))  # fmt: skip
    assert done.log_dir is not None
    times = json.loads((done.folder / "times.json").read_text())
    return done.log_dir, {name: tuple(pair) for name, pair in times.items()}


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("stage", "pipeline stage 1 of 0-1 (ranks 2, 3, 6 and 7)"),
        ("shard", "data shard 1 of 0-1 (ranks 4-7)"),
        ("machine", "machine node1 (ranks 2-5)"),
    ],
)
def test_part_that_is_slow_is_named_as_what_it_is(
    job: tuple[Path, dict[str, tuple[int, int]]], fault: str, name: str
) -> None:
    logs, times = job
    verdict = diagnose(RunFrames(logs, between=times[fault]))
    # Beside other tests the machine may hold the job up even more: what is said of the part counts.
    first = next(finding for finding in verdict.findings if finding.rule == "slow_part")
    assert first.title.startswith(f"{name} holds the job up: its ranks need "), verdict.headline
    assert first.gain is not None
    assert 15e6 < first.gain.step_ns - first.gain.left_ns < 30e6, "the sleep of 20 ms"
    assert "sleep" in str(first.code_lines[0]) or first.code_lines[0].function == "Part.forward"


@pytest.mark.parametrize("fault", ["none", "rank"])
def test_no_part_is_named_where_none_is_slow(
    job: tuple[Path, dict[str, tuple[int, int]]], fault: str
) -> None:
    logs, times = job
    verdict = diagnose(RunFrames(logs, between=times[fault]))
    assert "slow_part" not in [finding.rule for finding in verdict.findings]


def test_ranks_have_coordinates(job: tuple[Path, dict[str, tuple[int, int]]]) -> None:
    layout = find_layout(open_run(job[0]))
    assert layout is not None
    assert layout.names([5]) == "rank 5 (PP 0, TP 1, DP 1)"
    assert layout.names([1, 4]) == "ranks 1 and 4"
