"""A small real training job with one fault, chosen by name; without one it is healthy.

    python benchmarks/faults/job.py --model mlp --fault sleep_forward --seconds 10
    torchrun --nproc-per-node 2 benchmarks/faults/job.py --model mlp --fault rank_forward

It knows nothing of haiprof. Sizes are such that a step takes 10 to 40 ms on one core.
"""

# ruff: noqa: D102 - forward, backward and step are torch's own names

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
CLASSES = 16
VOCABULARY = 64


# -- models -------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """Four layers of 512."""

    shape = (512,)

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(512, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
            nn.Linear(width, width), nn.GELU(), nn.Linear(width, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Three convolutions and a head."""

    shape = (3, 24, 24)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(48, CLASSES),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Transformer(nn.Module):
    """Two encoder layers over 48 tokens."""

    shape = (48,)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 256, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(96, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed((x.abs() * 20).long() % VOCABULARY)).mean(1))


class Recurrent(nn.Module):
    """One LSTM over 32 steps."""

    shape = (32, 48)

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(48, 128, batch_first=True)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class TinyOperators(nn.Module):
    """A model of very many very small operators."""

    shape = (64,)

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(64)) for _ in range(4)])
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(60):
            for scale in self.scales:
                x = torch.tanh(x * scale + 0.01)
        return self.head(x)


MODELS = {
    "mlp": Mlp, "cnn": Cnn, "transformer": Transformer, "lstm": Recurrent, "tiny": TinyOperators,
}  # fmt: skip


# -- what is wrong ------------------------------------------------------------------------------


def spin(seconds: float) -> None:
    """Uses the CPU for so long."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(500))


class Samples(Dataset):
    """Random samples; making one may be slow in several ways."""

    def __init__(self, options: argparse.Namespace, shape: tuple[int, ...]) -> None:
        self.fault = options.fault
        self.length = options.length
        self.shape = shape
        self.opened = False
        self.pool = torch.randn(256, *shape, generator=torch.Generator().manual_seed(1))
        self.file = Path(tempfile.gettempdir()) / f"samples-{os.getppid()}"
        if self.fault == "slow_storage" and not self.file.exists():
            self.file.write_bytes(os.urandom(1 << 16))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._delay(index)
        return self.pool[index % len(self.pool)], index % CLASSES

    def _delay(self, index: int) -> None:
        fault = self.fault
        if fault == "slow_storage":
            with self.file.open("rb") as file:  # a request of 1 ms per sample, as over a network
                os.pread(file.fileno(), 1 << 14, 0)
                time.sleep(0.001)
        elif fault in ("heavy_transform", "few_workers"):
            spin(0.0015)
        elif fault == "slow_index" and index % 997 == 7:
            time.sleep(0.6)
        elif fault == "first_batch" and not self.opened:
            self.opened = True
            time.sleep(4.0)
        elif fault == "rank_dataloader" and RANK == WORLD - 1:
            time.sleep(0.0008)


class Backwards(torch.autograd.Function):
    """Nothing forward; sleeps backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grad, None


class Faulty(nn.Module):
    """A model with a fault in its forward or backward."""

    def __init__(self, inner: nn.Module, options: argparse.Namespace) -> None:
        super().__init__()
        self.inner = inner
        self.fault = options.fault
        self.calls = 0
        self.dice = random.Random(5 + RANK)

    def forward(self, x: Tensor) -> Tensor:
        fault, last = self.fault, RANK == WORLD - 1
        self.calls += 1
        if fault == "sleep_forward" or (fault == "rank_forward" and last):
            time.sleep(0.03)
        elif fault == "python_forward":
            spin(0.03)
        elif fault == "jitter" and self.dice.random() < 0.05:
            time.sleep(0.15)
        elif fault == "drift":
            time.sleep(0.0001 * self.calls)
        elif fault == "regression" and self.calls > 160:
            time.sleep(0.02)
        elif fault == "hang" and last and self.calls > 60:
            time.sleep(1e6)
        if fault == "sleep_backward_end":  # after all gradients that anybody averages
            x = Backwards.apply(x.requires_grad_(), 0.09)
        out = self.inner(x)
        if fault == "sleep_backward" or (fault == "rank_backward" and last):
            out = Backwards.apply(out, 0.09 if fault == "sleep_backward" else 0.04)
        return out


class SlowAdam(torch.optim.AdamW):
    """An optimizer with Python work of its own."""

    seconds = 0.0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        spin(self.seconds / 2)
        time.sleep(self.seconds / 2)
        return super().step(closure)  # type: ignore[arg-type]


class Node:
    """Part of a reference cycle."""

    def __init__(self) -> None:
        self.me = self
        self.load = [[] for _ in range(20)]


# -- the loop -----------------------------------------------------------------------------------


class Job:
    """One training job."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        model = MODELS[options.model]()
        self.shape = MODELS[options.model].shape
        model = Faulty(model, options) if options.fault else model
        if options.fault == "recompiles" or options.compile:
            torch._dynamo.config.recompile_limit = 10_000
            torch._dynamo.config.accumulated_recompile_limit = 10_000
            model = torch.compile(model, backend="eager", dynamic=False)
        self.model = DistributedDataParallel(model) if WORLD > 1 else model
        slow = 0.06 if options.fault == "sleep_optimizer" else 0.0
        if options.fault == "rank_optimizer" and RANK == WORLD - 1:
            slow = 0.03
        SlowAdam.seconds = slow
        kind = SlowAdam if slow else torch.optim.AdamW
        self.optimizer = kind(self.model.parameters(), lr=1e-3)
        self.data = Samples(options, self.shape)
        self.kept: list[object] = []
        self.dice = random.Random(3 + RANK)
        self.step = 0
        self.deadline = 0.0
        self.folder = Path(tempfile.mkdtemp())

    def loader(self) -> DataLoader:
        """As the options say."""
        options = self.options
        many = {"persistent_workers": options.persistent} if options.workers else {}
        return DataLoader(
            self.data, batch_size=options.batch, shuffle=True, drop_last=True,
            num_workers=options.workers, generator=torch.Generator().manual_seed(RANK), **many,
        )  # fmt: skip

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end, one epoch after another."""
        if self.options.loader:
            loader = self.loader()
            while True:
                yield from loader
        x = torch.randn(self.options.batch, *self.shape)
        y = torch.randint(CLASSES, (self.options.batch,))
        while True:
            yield x, y

    def run(self) -> int:
        """Trains until the time is up on rank 0; returns the number of steps."""
        options, micro = self.options, 0
        loss_of = nn.CrossEntropyLoss()
        for x, y in self.batches():
            self.deadline = self.deadline or time.monotonic() + options.seconds
            x, y = self.changed(x, y)
            loss = loss_of(self.model(x), y)
            (loss / options.accumulate).backward()
            micro += 1
            if micro % options.accumulate:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.between(loss)
            if self.over():
                return self.step
        return self.step

    def changed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch as the fault would have it."""
        fault = self.options.fault
        if fault == "data_imbalance":
            turn = (self.step + RANK) % WORLD == 0 if WORLD > 1 else False
            times = self.dice.choice((3, 4)) if turn else 1
            return x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)
        if fault == "rank_data" and RANK == WORLD - 1:
            return x.repeat_interleave(3, 0), y.repeat_interleave(3, 0)
        if fault == "recompiles":
            count = 8 + self.step % (len(x) - 8)
            return x[:count], y[:count]
        if self.options.noise:
            count = max(1, int(len(x) * (1 - self.options.noise * self.dice.random())))
            return x[:count], y[:count]
        return x, y

    def between(self, loss: Tensor) -> None:
        """What people do after a step, and what goes wrong there."""
        fault, step = self.options.fault, self.step
        if fault == "outside":
            time.sleep(0.05)
        elif fault == "rank_outside" and RANK == 0:
            time.sleep(0.03)
        elif fault == "python_outside":
            spin(0.05)
        elif fault == "gc_storm":
            self.kept.append([Node() for _ in range(400)])
            del self.kept[:-300]
            for _ in range(2):
                [Node() for _ in range(500)]
            if step % 2 == 0:
                gc.collect()
        elif fault == "memory_creep":
            self.kept.append(torch.ones(1 << 19))
        elif fault == "checkpoints" and step % 8 == 0 and RANK == 0:
            weights = [torch.randn(1 << 20) for _ in range(40)]
            torch.save({"model": self.model.state_dict(), "more": weights}, self.folder / "c.pt")
        elif fault == "evaluation" and step % 20 == 0:
            self.evaluate(150)
        if self.options.evaluate and step % 50 == 0:
            self.evaluate(2)
        if self.options.save and step % 100 == 0 and RANK == 0:
            torch.save(self.model.state_dict(), self.folder / "healthy.pt")
        if self.options.print_loss and step % 10 == 0 and RANK == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)

    def evaluate(self, batches: int) -> None:
        """Without gradients."""
        self.model.eval()
        with torch.no_grad():
            for _ in range(batches):
                self.model(torch.randn(self.options.batch, *self.shape))
        self.model.train()

    def over(self) -> bool:
        """Whether rank 0's time is up: told every 10 steps to all."""
        late = time.monotonic() > self.deadline
        if WORLD == 1:
            return late
        if self.step % 10:
            return False
        flag = torch.tensor([late])
        dist.broadcast(flag, 0)
        return bool(flag.item())


def gan(options: argparse.Namespace) -> int:
    """A generator and a discriminator that train in turns."""
    torch.manual_seed(options.seed)
    make, judge = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512)), Mlp()
    first = torch.optim.Adam(make.parameters(), lr=1e-4)
    second = torch.optim.Adam(judge.parameters(), lr=1e-4)
    loss_of, end, step = nn.CrossEntropyLoss(), time.monotonic() + options.seconds, 0
    data = DataLoader(Samples(options, (512,)), batch_size=options.batch, drop_last=True)
    while True:
        for x, y in data:
            fake = make(torch.randn(len(x), 64))
            second.zero_grad()
            (loss_of(judge(x), y) + loss_of(judge(fake.detach()), y)).backward()
            second.step()
            first.zero_grad()
            loss_of(judge(fake), y).backward()
            first.step()
            step += 1
            if time.monotonic() > end:
                return step


def lightning(options: argparse.Namespace) -> int:
    """The same MLP in Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Mlp()

        def training_step(self, batch: list[Tensor], _: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_time={"seconds": options.seconds}, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = Samples(options, (512,))
    trainer.fit(Module(), DataLoader(data, batch_size=options.batch, drop_last=True))
    return int(trainer.global_step)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(*MODELS, "gan", "lightning"), default="mlp")
    parser.add_argument("--fault", default="")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=64 * 400)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--no-loader", dest="loader", action="store_false")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="0 leaves torch's default")
    parser.add_argument("--noise", type=float, default=0.0, help="share by which batches vary")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--print-loss", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Runs the job."""
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    if WORLD > 1:
        dist.init_process_group("gloo")
    alone = {"gan": gan, "lightning": lightning}.get(options.model)
    steps = alone(options) if alone else Job(options).run()
    print(f"total {steps} steps", file=sys.stderr)
    if WORLD > 1:
        dist.barrier()
        time.sleep(0.2)  # as examples/two_ranks_slow_one.py
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
