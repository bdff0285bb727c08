"""Records the runs of this folder again: `python tests/data/runs/record.py [NAME ...]`.

Each job runs in /tmp/haiprof-golden, so that no path of a user stands in its recording. What is
derived (`report/`) or only needed while the job lives (`control/`) is left out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE, WORK = Path(__file__).resolve().parent, Path("/tmp/haiprof-golden")

PRELUDE = """
import gc, json, os, time
import torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
loss_of = nn.CrossEntropyLoss()
class Batches(torch.utils.data.Dataset):
    def __init__(self, count, sleep_s):
        self.count, self.sleep_s = count, sleep_s
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.rand(128, 256), torch.randint(10, (128,))
def net(width=512):
    first, last = nn.Linear(256, width), nn.Linear(width, 10)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last)
def batches(count, workers=0, sleep_s=0.0):
    data = Batches(count, sleep_s)
    return torch.utils.data.DataLoader(data, batch_size=None, num_workers=workers)
def train(model, steps, after=lambda step: None, **loading):
    optimizer = torch.optim.AdamW(model.parameters())
    for step, (x, y) in enumerate(batches(steps, **loading)):
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        after(step)
"""
BEGIN = """
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = nn.parallel.DistributedDataParallel(net())
"""
END = """
torch.distributed.barrier()
time.sleep(0.2)
torch.distributed.destroy_process_group()
"""
ONE = (sys.executable,)
TWO = (*ONE, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
EIGHT = (*TWO[:-1], "8")
TRACED = ("--trace-shapes", "--trace-memory", "--trace-flops", "--trace-modules")

# Name: what starts it, haiprof's options, the program behind PRELUDE.
RUNS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "loader_two_workers": (ONE, (), "train(net(), 300, workers=2, sleep_s=0.03)"),
    "json_after_optimizer": (ONE, (), """
def write_state(step):
    if step % 20 == 19:
        state = {name: value.tolist() for name, value in model.state_dict().items()}
        with open("state.json", "w") as file:
            json.dump(state, file)
        time.sleep(0.05)
model = net(128)
train(model, 300, after=write_state)
"""),
    "evaluation_checkpoint": (ONE, (), """
@torch.no_grad()
def evaluate(step):
    if step % 50 == 49:
        model.eval()
        for x, y in batches(20):
            loss_of(model(x), y)
        model.train()
    if step % 100 == 99:
        torch.save(model.state_dict(), "model.pt")
model = net()
train(model, 300, after=evaluate)
"""),
    "two_ranks": (TWO, (), f"{BEGIN}train(model, 150){END}"),
    "two_ranks_one_slow": (TWO, (), f"{BEGIN}train(model, 150, sleep_s=0.02 * rank){END}"),
    "lightning": (ONE, (), """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, index):
        return loss_of(self.net(batch[0]), batch[1])
    def validation_step(self, batch, index):
        loss_of(self.net(batch[0]), batch[1])
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
options = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir="saved", **options)
trainer.fit(Module(), batches(120), batches(20))
"""),
    "rank_dies": (TWO, (), f"""{BEGIN}
def fail(step):
    if rank == 1 and step == 120:
        raise ValueError("shard 17 is damaged")
train(model, 200, after=fail)
"""),
    "killed": (ONE, (), "train(net(), 300, lambda step: step == 250 and os.kill(os.getpid(), 9))"),
    "garbage": (ONE, (), """
kept = [{"number": n, "cell": [n]} for n in range(60_000)]
def log(step):
    kept.extend({"step": step, "cell": [n]} for n in range(200))
    if step % 10 == 0:
        gc.collect()
train(net(), 150, after=log)
"""),
    "traced": (ONE, ("--steps", "80:83", *TRACED), "train(net(), 120)"),
    "two_ranks_traced": (TWO, ("--steps", "30:31", "--execution-trace"),
                         f"{BEGIN}train(model, 50, sleep_s=0.01 * rank){END}"),
    "compiled": (ONE, (), "train(torch.compile(net()), 100)"),
    "actor_learner": (TWO, (), """
torch.distributed.init_process_group("gloo")
model, x = net(128), torch.zeros(128, 256)
def search():
    return sum(number * number % 7 for number in range(60_000))
def play():
    for _ in range(150):
        for _ in range(3):
            with torch.no_grad():
                model(x)
            search()
        torch.distributed.send(torch.rand(128, 256), 0)
def learn():
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(150):
        torch.distributed.recv(x, 1)
        optimizer.zero_grad()
        loss_of(model(x), torch.randint(10, (128,))).backward()
        optimizer.step()
play() if torch.distributed.get_rank() else learn()
"""),
    "averaged_weights": (TWO, (), """
torch.distributed.init_process_group("gloo")
model = net(256)
def average(step):
    if step % 20 == 19:
        both, own = [None, None], [value.tolist() for value in model.parameters()]
        torch.distributed.all_gather_object(both, own)
        with torch.no_grad():
            for mine, *values in zip(model.parameters(), *both):
                mine.copy_(sum(torch.tensor(value) for value in values) / 2)
train(model, 400, after=average)
"""),
    "eight_ranks": (EIGHT, (), """
import socket
rank = int(os.environ["RANK"])
data, stage, tensor = rank // 4, rank // 2 % 2, rank % 2
machine = data ^ stage  # of each shard and stage, both machines have some ranks
socket.gethostname = lambda: f"node{machine}"
import torch.distributed as dist
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
for fault in is_slow:
    dist.barrier()
    for step in range(60):
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
dist.barrier()
"""),
    "parameter_server": (TWO, (), """
from torch.nn.utils import parameters_to_vector, vector_to_parameters
torch.distributed.init_process_group("gloo")
model = net(256)
flat = parameters_to_vector(model.parameters()).detach()
def clip_rows():
    for value in model.parameters():
        for row in value.grad.view(len(value), -1):
            row.mul_(1 / max(float(row.norm()), 1))
def serve():
    optimizer, grad = torch.optim.SGD(model.parameters()), torch.empty_like(flat)
    for _ in range(200):
        torch.distributed.send(parameters_to_vector(model.parameters()).detach(), 1)
        torch.distributed.recv(grad, 1)
        vector_to_parameters(grad, [value.grad for value in model.parameters()])
        clip_rows()
        optimizer.step()
def work():
    for _ in range(200):
        torch.distributed.recv(flat, 0)
        vector_to_parameters(flat, model.parameters())
        model.zero_grad()
        loss_of(model(torch.rand(1024, 256)), torch.randint(10, (1024,))).backward()
        torch.distributed.send(torch.cat([p.grad.flatten() for p in model.parameters()]), 0)
for value in model.parameters():
    value.grad = torch.zeros_like(value)
work() if torch.distributed.get_rank() else serve()
"""),
    "uneven_stages": (TWO, (), """
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
blocks = [nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2 if rank else 8)]
stage = nn.Sequential(*blocks)
optimizer = torch.optim.SGD(stage.parameters())
def first(parts):
    outs = [stage(part) for part in parts]
    sent = [torch.distributed.isend(out.detach(), 1) for out in outs]
    for out in outs:
        grad = torch.empty_like(out)
        torch.distributed.recv(grad, 1)
        out.backward(grad)
    for each in sent:
        each.wait()
def last(parts):
    for part in parts:
        x = torch.empty(256, 256)
        torch.distributed.recv(x, 0)
        loss_of(stage(x.requires_grad_()), torch.randint(10, (256,))).backward()
        torch.distributed.send(x.grad, 0)
for step in range(120):
    optimizer.zero_grad()
    (last if rank else first)([torch.rand(256, 256) for _ in range(4)])
    optimizer.step()
"""),
    "gpipe": (TWO, (), """
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
blocks = [nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(4)]
stage = nn.Sequential(nn.Identity() if rank else nn.Linear(16, 128), *blocks)
optimizer = torch.optim.SGD(stage.parameters(), 1e-3)
schedule = ScheduleGPipe(PipelineStage(stage, rank, 2, torch.device("cpu")), n_microbatches=1,
                         loss_fn=lambda out, target: (out - target).square().mean())
x, y = torch.randn(16, 48, 16), torch.randn(16, 48, 128)
for step in range(80):
    optimizer.zero_grad()
    schedule.step(target=y) if rank else schedule.step(x)
    optimizer.step()
"""),
}  # fmt: skip


def record(name: str) -> None:
    """Runs one job under haiprof and keeps its run directory."""
    starter, options, body = RUNS[name]
    folder, target = WORK / name, HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(PRELUDE + body)
    kept = {key: os.environ[key] for key in ("PATH", "HOME")}
    kept |= {"PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    words = ["-m", "haiprof", "run", "--name", name, "--log-dir", "logs", *options, "--", *starter]
    began = time.monotonic()
    subprocess.run([*ONE, *words, "train.py"], cwd=folder, env=kept, capture_output=True)
    seconds = time.monotonic() - began
    (run,) = (path.parent for path in (folder / "logs").glob("*/run.json"))
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("report", "control", ".parts"))
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    print(f"{name:24} {seconds:5.1f} s {size / 1000:7.1f} KB", flush=True)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or RUNS:
        record(chosen)
