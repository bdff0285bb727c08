"""Training loops as people write them, each a whole script that ends by printing what it computed.

The last line a script prints is a digest of all losses and final weights, so that two runs of it
can be compared bit for bit by their output alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

PRELUDE = """
import hashlib, os, sys, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
losses = []
loss_of = nn.CrossEntropyLoss()

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

def data(count, size=4, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count * size, 16, generator=generator)
    y = torch.randint(4, (count * size,), generator=generator)
    return TensorDataset(x, y)

def batches(count, size=4, seed=1):
    return DataLoader(data(count, size, seed), batch_size=size)

def train_step(model, optimizer, batch):
    loss = loss_of(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

def leave_group():
    # torch 2.13: gloo's thread may let go of the last all-reduce only after the barrier, which
    # takes the GIL, and a thread that wants the GIL while Python ends is torn down by
    # std::terminate. A moment without the GIL lets it finish first.
    import time
    torch.distributed.barrier()
    time.sleep(0.2)
    torch.distributed.destroy_process_group()

def finish(*models):
    digest = hashlib.sha256(repr(losses).encode())
    for model in models:
        for name, value in model.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.encode() + value.detach().contiguous().numpy().tobytes())
    print(len(losses), digest.hexdigest(), flush=True)
"""

_PLAIN = """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(2):
    for batch in batches(6):
        train_step(model, optimizer, batch)
finish(model)
"""

_EVALUATION = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
held_out = batches(3, seed=2)

@torch.no_grad()
def evaluate():
    model.eval()
    total = sum(loss_of(model(x), y).item() for x, y in held_out)
    model.train()
    return total

for epoch in range(2):
    for number, batch in enumerate(batches(5)):
        train_step(model, optimizer, batch)
        if number == 2:
            losses.append(evaluate())
    losses.append(evaluate())
finish(model)
"""

_ACCUMULATION = """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
loader = batches(7)
for epoch in range(2):
    for number, (x, y) in enumerate(loader, start=1):
        loss = loss_of(model(x), y) / 3
        loss.backward()
        losses.append(loss.item())
        if number % 3 == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
finish(model)
"""

_GRAD_SCALER = """
model = net()
optimizer = torch.optim.AdamW(model.parameters())
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
for number, (x, y) in enumerate(batches(8)):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model(x).float(), y)
    if number in (2, 5):
        loss = loss * float("inf")
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(str(loss.item()))
finish(model)
"""

_GAN = """
maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
judge = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
makes = torch.optim.Adam(maker.parameters())
judges = torch.optim.Adam(judge.parameters())
score = nn.BCEWithLogitsLoss()
yes, no = torch.ones(4, 1), torch.zeros(4, 1)
for real, _ in batches(9):
    made = maker(torch.randn(4, 8))
    judges.zero_grad()
    judge_loss = score(judge(real), yes) + score(judge(made.detach()), no)
    judge_loss.backward()
    judges.step()
    makes.zero_grad()
    maker_loss = score(judge(made), yes)
    maker_loss.backward()
    makes.step()
    losses += [judge_loss.item(), maker_loss.item()]
finish(maker, judge)
"""

_LBFGS = """
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
for x, y in batches(5):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        losses.append(loss.item())
        return loss
    optimizer.step(closure)
finish(model)
"""

_NO_LOADER = """
model = net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(11):
    train_step(model, optimizer, (torch.randn(4, 16), torch.randint(4, (4,))))
finish(model)
"""

_DDP = """
from contextlib import nullcontext
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(net())
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(6, seed=dist.get_rank()):
    train_step(model, optimizer, batch)
for number, (x, y) in enumerate(batches(4, seed=dist.get_rank())):
    sync = number % 2 == 1
    with nullcontext() if sync else model.no_sync():
        loss = loss_of(model(x), y)
        loss.backward()
    losses.append(loss.item())
    if sync:
        optimizer.step()
        optimizer.zero_grad()
if dist.get_rank() == 0:
    finish(model)
leave_group()
"""

_FSDP2 = """
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (2,))
model = net()
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(6, seed=dist.get_rank()):
    train_step(model, optimizer, batch)
whole = {name: value.full_tensor() for name, value in model.state_dict().items()}
if dist.get_rank() == 0:
    copy = net()
    copy.load_state_dict(whole)
    finish(copy)
leave_group()
"""

_CHECKPOINTING = """
from torch.utils.checkpoint import checkpoint

class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=REENTRANT)
        return self.last(x)

model = Checkpointed()
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(7):
    train_step(model, optimizer, batch)
finish(model)
"""

_COMPILED = """
import torch._dynamo
compiled = torch.compile(model := net(), backend="BACKEND")
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(7):
    train_step(compiled, optimizer, batch)
finish(model)
"""

_COMPILED_BLOCKS = """
class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

model = Blocks()
for block in model.blocks:
    block.compile(backend="eager")
optimizer = torch.optim.AdamW(model.parameters())
for batch in batches(7):
    train_step(model, optimizer, batch)
finish(model)
"""

_TRAINER = """
import tempfile
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

class Words(torch.utils.data.Dataset):
    def __init__(self, count):
        self.words = torch.arange(count * 8).reshape(count, 8) % 16
    def __len__(self):
        return len(self.words)
    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}

class Keep(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        losses.extend(value for key, value in logs.items() if key in ("loss", "eval_loss"))

model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2,
                                   bos_token_id=0, eos_token_id=0))
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder, max_steps=6, per_device_train_batch_size=4, logging_steps=1,
            gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=3, seed=0,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
            log_level="error",
        ),
        train_dataset=Words(64), eval_dataset=Words(8), callbacks=[Keep()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
finish(model)
"""

_LIGHTNING = """
import logging
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net()
    def training_step(self, batch, index):
        loss = loss_of(self.net(batch[0]), batch[1])
        losses.append(loss.item())
        return loss
    def validation_step(self, batch, index):
        losses.append(loss_of(self.net(batch[0]), batch[1]).item())
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

model = Module()
lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
).fit(model, batches(6), batches(3, seed=2))
finish(model)
"""

_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
base = net()
model, optimizer, loader = accelerator.prepare(
    base, torch.optim.AdamW(base.parameters()), batches(8)
)
for x, y in loader:
    with accelerator.accumulate(model):
        loss = loss_of(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
finish(accelerator.unwrap_model(model))
"""

IN_TURN = ("plain", "evaluation", "accumulation", "grad_scaler", "gan")
"""Loops that `in_turn` runs in one process, as a notebook does."""
_IN_TURN = "".join(
    body.rpartition("finish(")[0]
    for body in (_PLAIN, _EVALUATION, _ACCUMULATION, _GRAD_SCALER, _GAN)
)

LOOPS = {
    name: PRELUDE + body
    for name, body in {
        "in_turn": _IN_TURN + "finish(model, maker, judge)\n",
        "plain": _PLAIN,
        "evaluation": _EVALUATION,
        "accumulation": _ACCUMULATION,
        "grad_scaler": _GRAD_SCALER,
        "gan": _GAN,
        "lbfgs": _LBFGS,
        "no_loader": _NO_LOADER,
        "ddp": _DDP,
        "fsdp2": _FSDP2,
        "checkpoint_reentrant": _CHECKPOINTING.replace("REENTRANT", "True"),
        "checkpoint_non_reentrant": _CHECKPOINTING.replace("REENTRANT", "False"),
        "compiled_eager": _COMPILED.replace("BACKEND", "eager"),
        "compiled_inductor": _COMPILED.replace("BACKEND", "inductor"),
        "compiled_blocks": _COMPILED_BLOCKS,
        "trainer": _TRAINER,
        "lightning": _LIGHTNING,
        "accelerate": _ACCELERATE,
    }.items()
}
"""Script by name."""

PROOFS = (
    "checkpoint_reentrant", "compiled_eager", "compiled_inductor", "compiled_blocks", "accelerate",
    "trainer", "checkpoint_non_reentrant", "fsdp2", "lightning", "lbfgs", *IN_TURN,
)  # fmt: skip
"""Dear, near another one, or a part of `in_turn`: run where proofs are asked for."""

OF_TWO_RANKS = ("ddp", "fsdp2")


def marked(names: Iterable[str], *, but: Sequence[str] | None = None) -> list[object]:
    """Parameters by name; what is in `PROOFS`, or not in `but`, is a proof."""
    chosen = [name for name in LOOPS if name not in PROOFS] if but is None else but
    proof = pytest.mark.proof
    return [pytest.param(n, marks=() if n in chosen else proof) for n in names]


def loop_command(script: Path, *, ranks: int) -> list[str]:
    """How the script is started, alone or as two ranks."""
    from tests.process.jobs import TWO_RANKS

    return [*TWO_RANKS, str(script)] if ranks > 1 else ["python", str(script)]
