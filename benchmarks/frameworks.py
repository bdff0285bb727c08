"""Frameworks and launchers under haiprof: weights, exit, steps, positions, beside a bare run.

    python -m venv /tmp/frameworks
    /tmp/frameworks/bin/pip install . torch transformers lightning accelerate hydra-core ipython \
        'ray[train]' deepspeed torchtitan
    /tmp/frameworks/bin/python benchmarks/frameworks.py [--only NAME] [--write docs/frameworks.md]

Every row trains the same small model for 40 steps on the CPU, with gloo where there are two ranks.
What is not installed, or cannot run on a CPU, is a row that says so.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

STEPS = 40
_BIN = Path(sys.executable).parent
_COMMON = f"""
import hashlib, os, sys, time, torch
torch.manual_seed(0)
torch.set_num_threads(1)
STEPS = {STEPS}
def make_model():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
def make_loader(rows=8 * STEPS):
    values = torch.randn(rows, 16, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.DataLoader([(x, i % 4) for i, x in enumerate(values)], batch_size=8)
def train(model, optimizer, loader, backward=lambda loss: loss.backward()):
    for x, y in loader:
        optimizer.zero_grad()
        backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
def say(parameters):
    content = b"".join(p.detach().cpu().contiguous().numpy().tobytes() for p in parameters)
    sys.stdout.write(f"WEIGHTS {{hashlib.sha256(content).hexdigest()}}\\n")
    sys.stdout.flush()
def close():
    torch.distributed.barrier()
    time.sleep(0.2)  # gloo's own race, as tests/process/loops.py says
    torch.distributed.destroy_process_group()
def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""
_DDP = """
def work(rank=None, world=None):
    if rank is None:
        torch.distributed.init_process_group("gloo")
    else:
        address = f"file://{os.getcwd()}/rendezvous"
        torch.distributed.init_process_group("gloo", address, rank=rank, world_size=world)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    train(model, sgd(model), make_loader())
    say(model.parameters())
    close()
"""
_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
model = make_model()
rows = 8 * STEPS * accelerator.num_processes
model, optimizer, loader = accelerator.prepare(model, sgd(model), make_loader(rows))
train(model, optimizer, loader, accelerator.backward)
say(model.parameters())
accelerator.end_training()
"""
_POSITIONS = ("prepare", "forward", "backward", "optimizer")


@dataclass(frozen=True)
class Row:
    """One framework, as its users start it."""

    package: str
    source: str
    command: tuple[str, ...] = ("python", "job.py")
    ranks: int = 1
    cannot: str = ""
    """Why it cannot run on a CPU."""
    environment: tuple[tuple[str, str], ...] = ()


_TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2", "job.py")
ROWS = {
    "plain loop": Row("torch", """
model = make_model()
train(model, sgd(model), make_loader())
say(model.parameters())
"""),
    "DDP, torchrun": Row("torch", _DDP + "work()\n", _TORCHRUN, 2),
    "DDP, mp.spawn": Row("torch", _DDP + """
if __name__ == "__main__":
    torch.multiprocessing.spawn(work, (2,), nprocs=2)
""", ranks=2),
    "FSDP2, torchrun": Row("torch", """
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("gloo")
model = make_model()
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (2,)))
train(model, sgd(model), make_loader())
say(p.full_tensor() for p in model.parameters())
close()
""", _TORCHRUN, 2),
    "transformers Trainer": Row("transformers", """
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_model()
    def forward(self, x, labels):
        scores = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}
rows = [{"x": x, "labels": y} for x, y in make_loader().dataset]
arguments = TrainingArguments("out", max_steps=STEPS, per_device_train_batch_size=8, use_cpu=True,
    report_to=[], save_strategy="no", disable_tqdm=True, seed=0)
model = Model()
Trainer(model, arguments, train_dataset=rows).train()
say(model.parameters())
"""),
    "Lightning": Row("lightning", """
import lightning
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = make_model()
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
    def configure_optimizers(self):
        return sgd(self)
module = Module()
lightning.Trainer(accelerator="cpu", max_steps=STEPS, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False).fit(module, make_loader())
say(module.parameters())
"""),
    "Accelerate, accelerate launch": Row("accelerate", _ACCELERATE, (
        "accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", "job.py")),
    "Accelerate, torchrun": Row("accelerate", _ACCELERATE, _TORCHRUN, 2),
    "Hydra": Row("hydra-core", """
import hydra
@hydra.main(version_base=None, config_path=None)
def main(config):
    model = make_model()
    train(model, torch.optim.SGD(model.parameters(), lr=config.lr), make_loader())
    say(model.parameters())
main()
""", ("python", "job.py", "+lr=0.1")),
    "IPython %run": Row("ipython", """
model = make_model()
train(model, sgd(model), make_loader())
say(model.parameters())
""", ("ipython", "--no-banner", "--colors=nocolor", "-c", "%run job.py")),
    "DeepSpeed ZeRO-1, torchrun": Row("deepspeed", """
import deepspeed
deepspeed.init_distributed("gloo")
model = make_model()
engine, *_ = deepspeed.initialize(model=model, optimizer=sgd(model), config={
    "train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False})
for x, y in make_loader():
    engine.backward(torch.nn.functional.cross_entropy(engine(x), y))
    engine.step()
say(model.parameters())
""", _TORCHRUN, 2, environment=(("DS_ACCELERATOR", "cpu"),)),
    "Ray Train": Row("ray", _DDP + """
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
def on_worker():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    train(model, sgd(model), make_loader())
    with open(f"{FOLDER}/weights{torch.distributed.get_rank()}", "w") as file:
        sys.stdout = file
        say(model.parameters())
FOLDER = os.getcwd()
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
TorchTrainer(on_worker, scaling_config=ScalingConfig(num_workers=2)).fit()
for rank in range(2):
    sys.stdout.write(open(f"weights{rank}").read())
""", ranks=2),
    "torchtitan": Row("torchtitan", "", cannot="its trainer sets a CUDA device"),
}  # fmt: skip


def run(row: Row, folder: Path, haiprof: bool) -> tuple[int, list[str], str]:
    """Exit status, weights of each rank, and what was said."""
    folder.mkdir()
    (folder / "job.py").write_text(_COMMON + row.source)
    first, *rest = row.command
    command = [str(_BIN / first), *rest]
    if haiprof:
        command = [sys.executable, "-m", "haiprof", "--log-dir", "logs", "--quiet", "--", *command]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1",
                   "PATH": f"{_BIN}:{os.environ['PATH']}", **dict(row.environment)}  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    return done.returncode, sorted(re.findall(r"WEIGHTS (\w+)", done.stdout)), done.stderr


def compared(row: Row, folder: Path) -> list[str]:
    """Version, weights, exit, ranks and steps, positions: cells of the table."""
    try:
        version = importlib.metadata.version(row.package)
    except importlib.metadata.PackageNotFoundError:
        return ["-", "not installed here", "", "", ""]
    if row.cannot:
        return [version, f"not run: {row.cannot}", "", "", ""]
    bare, recorded = run(row, folder / "bare", False), run(row, folder / "recorded", True)
    if bare[0] or len(bare[1]) != row.ranks:
        last = (bare[2].strip().splitlines() or ["it said nothing"])[-1]
        return [version, f"cannot run here bare: {last[:100]}", "", "", ""]
    return [
        version,
        "equal to the bit" if bare[1] == recorded[1] else "**differ**",
        f"{recorded[0]}, as bare" if bare[0] == recorded[0] else f"**{recorded[0]}**",
        *recorded_cells(row, folder / "recorded"),
    ]


def recorded_cells(row: Row, folder: Path) -> list[str]:
    """Ranks and steps, and positions of the ledger; what is not as expected in bold."""
    from haiprof import Analyzer

    runs = sorted((folder / "logs").glob("*/run.json"))
    if not runs:
        return ["**no run**", ""]
    root = runs[0].parent
    steps = Analyzer(root).steps()
    counts = sorted(steps.group_by("rank").len()["len"].to_list())
    said = f"{len(counts)} x {'/'.join(map(str, sorted(set(counts)))) or 0}"
    line = [sys.executable, "-m", "haiprof", "verdict", "--json", str(root)]
    step = json.loads(subprocess.run(line, capture_output=True, check=True).stdout)["step"] or {}
    found = {name: ns for name, ns in (step.get("positions") or {}).items() if ns}
    lacking = [name for name in _POSITIONS if name not in found]
    return [
        said if counts == [STEPS] * row.ranks else f"**{said}**",
        ", ".join(found) + (f"; **not {', '.join(lacking)}**" if lacking else ""),
    ]


def main() -> None:
    """Prints the table, and writes it into a document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=list(ROWS))
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    lines = ["| | version | weights | exit status | ranks x steps | positions of the ledger |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name, row in ROWS.items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            cells = compared(row, Path(folder))
        lines.append(f"| {' | '.join([name, *cells])} |")
        print(lines[-1], flush=True)
    if options.write:
        kept = options.write.read_text().partition("| | version |")[0]
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        python = ".".join(map(str, sys.version_info[:3]))
        made = f"Python {python}, torch {importlib.metadata.version('torch')}, {today}."
        options.write.write_text(kept + "\n".join([*lines, "", made, ""]))


if __name__ == "__main__":
    main()
