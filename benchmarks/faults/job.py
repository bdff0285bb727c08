"""A small training job, healthy as it stands; draw.py puts pieces of kinds in where `# <place>` is.

    python benchmarks/faults/job.py
    torchrun --nproc-per-node 2 benchmarks/faults/job.py

It knows nothing of haiprof. With the `WORK` that work.py finds a step takes about 20 ms on one
core, and the loader a small part of it; draw.py writes what a fault takes in numbers that are the
same in each run.
"""

# ruff: noqa: D101, D102, F401, F841, N812, SIM113 - a script whose parts are put together

from __future__ import annotations

import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from step_clock import LAST as LAST_STEP
from step_clock import tick
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, default_collate

FAMILY, STYLE = "mlp", "plain"
SECONDS, BATCH, LENGTH = 9.0, 64, 64 * 400
LOADER, WORKERS, PERSISTENT, ACCUMULATE, THREADS = True, 0, True, 1, 1
STEP, WORK = 0.02, 1  # a step in s; a model works on its batch so many times over
LOSE, EVERY, TURNS = 0.0, 1, 1  # a fault takes so many s every so many steps; turns of a loop
CLIP = 1.0
# <constants>

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
LAST = RANK == WORLD - 1
CLASSES, VOCABULARY = 16, 64
FOLDER = Path(tempfile.mkdtemp())
DICE = random.Random(5 + RANK)


# -- models -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    shape = (512,)

    def __init__(self, width: int = 640) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(512, width), nn.GELU(), nn.Linear(width, width))
        self.last = nn.Sequential(nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first(x)))


class Cnn(nn.Module):
    shape = (3, 24, 24)

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        )  # fmt: skip
        self.last = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first(x)))


class Unet(nn.Module):
    shape = (3, 16, 16)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 32, 3, padding=1)
        self.down = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.last = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        top = F.relu(self.first(x))
        return self.head((self.last(F.relu(self.down(top))) + top).mean((2, 3)))


class Transformer(nn.Module):
    shape = (48,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(VOCABULARY, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.0, batch_first=True)
        self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first((x.abs() * 20).long() % VOCABULARY)).mean(1))


class Vit(nn.Module):
    shape = (3, 24, 24)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 96, 4, stride=4)
        layer = nn.TransformerEncoderLayer(96, 4, 192, dropout=0.1, batch_first=True)
        self.last = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first(x).flatten(2).transpose(1, 2)).mean(1))


class Recurrent(nn.Module):
    shape = (32, 48)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 64)
        self.last = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first(x))[0][:, -1])


class Recommender(nn.Module):
    shape = (64,)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.EmbeddingBag(4096, 128, mode="sum")
        self.last = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.head = nn.Linear(512, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.first((x.abs() * 1000).long() % 4096)))


class Graph(nn.Module):
    shape = (64, 16)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 96)
        self.last = nn.ModuleList([nn.Linear(192, 96) for _ in range(3)])
        self.head = nn.Linear(96, CLASSES)
        source = torch.arange(64).repeat(4)
        self.register_buffer("source", source)
        self.register_buffer("target", (source * 7 + torch.arange(256)) % 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.last:
            gathered = torch.zeros_like(x).index_add(1, self.target, x[:, self.source])
            x = F.relu(layer(torch.cat((x, gathered), -1)))
        return self.head(x.mean(1))


FAMILIES = {
    "mlp": Mlp, "cnn": Cnn, "unet": Unet, "transformer": Transformer, "vit": Vit,
    "lstm": Recurrent, "recommender": Recommender, "graph": Graph,
}  # fmt: skip


def working(family: type[nn.Module]) -> type[nn.Module]:
    """The family with more work: each batch stands in it `WORK` times over."""

    class Working(family):
        def forward(self, x: Tensor) -> Tensor:
            if WORK == 1:
                return super().forward(x)
            many = super().forward(x.repeat(WORK, *[1] * (x.dim() - 1)))
            return many.unflatten(0, (WORK, -1)).mean(0)

    return Working


FAMILIES = {name: working(family) for name, family in FAMILIES.items()}


class Net(nn.Module):
    """A model of the family, with what a kind adds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = FAMILIES[FAMILY]()
        self.calls = 0
        # <model_init>

    def forward(self, x: Tensor, labels: Tensor | None = None, **_: object) -> object:
        self.calls += 1
        # <forward>
        out = self.inner(x)
        # <after_forward>
        return out if labels is None else {"loss": F.cross_entropy(out, labels), "logits": out}


# -- data ---------------------------------------------------------------------------------------


class Samples(Dataset):
    """Samples of a pool of random ones."""

    def __init__(self) -> None:
        shape = FAMILIES[FAMILY].shape
        self.pool = torch.randn(256, *shape, generator=torch.Generator().manual_seed(1))
        self.calls = 0
        # <data_init>

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.calls += 1
        x = self.pool[index % len(self.pool)]
        # <item>
        return x, index % CLASSES


def collate(samples: list[tuple[Tensor, int]]) -> list[Tensor]:
    # <collate>
    return default_collate(samples)


def make_loader() -> DataLoader:
    data, more = Samples(), {}
    if WORKERS:
        more["persistent_workers"] = PERSISTENT
    # <loader>
    return DataLoader(
        data, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        collate_fn=collate, generator=torch.Generator().manual_seed(RANK), **more,
    )  # fmt: skip


def batches(loader: DataLoader | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end, one epoch after another."""
    while loader is not None:
        yield from loader
    x, y = torch.randn(BATCH, *FAMILIES[FAMILY].shape), torch.randint(CLASSES, (BATCH,))
    while True:
        yield x, y


# -- the loop -----------------------------------------------------------------------------------

ENDS = [0.0]
KEPT: list[object] = []


def over(step: int) -> bool:
    """Whether this was the last step: by number, or by rank 0's time, told every 10 steps."""
    ended = tick(end=False)
    if LAST_STEP:
        return ended
    ENDS[0] = ENDS[0] or time.monotonic() + SECONDS
    late = time.monotonic() > ENDS[0]
    if WORLD == 1 or step % 10:
        return late and WORLD == 1
    flag = torch.tensor([late])
    dist.broadcast(flag, 0)
    return bool(flag.item())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    kind, more = torch.optim.AdamW, {}
    # <optimizer>
    return kind([p for p in model.parameters() if p.requires_grad], lr=1e-4, **more)


def before_training(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # <before_training>
    return


def change_batch(x: Tensor, y: Tensor, step: int) -> tuple[Tensor, Tensor]:
    # <batch>
    return x, y


def before_update(model: nn.Module, step: int) -> None:
    # <before_update>
    return


def after_step(model: nn.Module, step: int, loss: Tensor) -> None:
    # <after_step>
    return


def evaluate(model: nn.Module, count: int, batch: int = BATCH) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            model(torch.randn(batch, *FAMILIES[FAMILY].shape))
    model.train()


def plain() -> None:
    model = Net()
    # <model>
    optimizer = make_optimizer(model)
    net = DistributedDataParallel(model) if WORLD > 1 else model
    before_training(model, optimizer)
    step = micro = 0
    for x, y in batches(make_loader() if LOADER else None):
        x, y = change_batch(x, y, step)
        hold = WORLD > 1 and (micro + 1) % ACCUMULATE
        with net.no_sync() if hold else contextlib.nullcontext():
            loss = F.cross_entropy(net(x), y) / ACCUMULATE
            loss.backward()
        micro += 1
        if micro % ACCUMULATE:
            continue
        before_update(net, step)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        after_step(net, step, loss)
        if over(step):
            break


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = make_optimizer(model)
    net, prepared, loader = accelerator.prepare(model, optimizer, make_loader())
    before_training(model, optimizer)
    step = 0
    for x, y in batches(loader):
        x, y = change_batch(x, y, step)
        loss = F.cross_entropy(net(x), y)
        accelerator.backward(loss)
        before_update(net, step)
        prepared.step()
        prepared.zero_grad()
        step += 1
        after_step(net, step, loss)
        if over(step):
            break


def trainer() -> None:
    import transformers

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: object, state: object, *_: object, **more: object):
            before_update(more["model"], state.global_step)

        def on_step_end(self, args: object, state: object, control: object, **more: object) -> None:
            after_step(more["model"], state.global_step, torch.zeros(()))
            control.should_training_stop = over(state.global_step)

    def together(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        x, y = collate(samples)
        return {"x": x, "labels": y}

    model = Net()
    optimizer = make_optimizer(model)
    before_training(model, optimizer)
    settings = transformers.TrainingArguments(
        output_dir=str(FOLDER), max_steps=10**6, per_device_train_batch_size=BATCH, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", logging_steps=50,
        dataloader_num_workers=WORKERS, dataloader_persistent_workers=bool(WORKERS),
        remove_unused_columns=False, max_grad_norm=CLIP,
    )  # fmt: skip
    job = transformers.Trainer(
        model, settings, train_dataset=Samples(), data_collator=together, callbacks=[Watch()],
        optimizers=(optimizer, None),
    )  # fmt: skip
    job.train()


def lightning() -> None:
    import lightning

    class Watch(lightning.Callback):
        def on_before_optimizer_step(self, job: object, module: object, _: object) -> None:
            before_update(module.model, job.global_step)

        def on_train_batch_end(self, job: object, module: object, *_: object) -> None:
            after_step(module.model, job.global_step, torch.zeros(()))
            job.should_stop = over(job.global_step)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            x, y = batch
            # <training_step>
            return F.cross_entropy(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = make_optimizer(self.model)
            before_training(self.model, optimizer)
            return optimizer

    job = lightning.Trainer(
        max_epochs=-1, min_epochs=0, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(FOLDER),
        callbacks=[Watch()],
    )  # fmt: skip
    job.fit(Module(), make_loader())


def own() -> None:
    step = 0
    # <own>


def main() -> None:
    if THREADS:
        torch.set_num_threads(THREADS)
    torch.manual_seed(3)
    if WORLD > 1:
        dist.init_process_group("gloo")
    # <setup>
    globals()[STYLE]()
    if WORLD > 1:
        dist.barrier()
        time.sleep(0.2)  # as examples/two_ranks_slow_one.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
