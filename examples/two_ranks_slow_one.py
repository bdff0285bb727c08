"""Trains on two ranks with DistributedDataParallel, one of which is slow in one phase.

Shows: ranks side by side, and the slow one named. Each rank's own time in the slow phase tells them
apart; the others lose the same time waiting in backward, where the gradients are averaged. A rank
that is slow inside backward is told by the times at which it begins to average.
Expected verdict: uneven ranks, the slow rank and its phase. `--slow-ms 0` makes them even.

    haiprof torchrun --nproc-per-node 2 examples/two_ranks_slow_one.py --steps 200
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FEATURES = 64
CLASSES = 8
PHASES = ("dataloader", "forward", "backward")


class Waves(Dataset):
    """Sine waves of CLASSES frequencies in noise; reading one can be made slow."""

    def __init__(self, count: int, *, sleep_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.sleep_s = sleep_s
        self.classes = torch.randint(0, CLASSES, (count,), generator=generator)
        places = torch.linspace(0.0, 6.0, FEATURES) * (1 + self.classes[:, None])
        self.waves = places.sin() + 0.5 * torch.randn(count, FEATURES, generator=generator)

    def __len__(self) -> int:
        """Number of waves."""
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One wave and its class, after the storage has had its time."""
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.waves[index], self.classes[index]


class Classifier(nn.Sequential):
    """A perceptron whose forward or backward can be made slow."""

    def __init__(self, *, sleep_s: float = 0.0, backward_sleep_s: float = 0.0) -> None:
        super().__init__(
            nn.Linear(FEATURES, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(),
            nn.Linear(256, CLASSES),
        )  # fmt: skip
        self.sleep_s = sleep_s
        self.backward_sleep_s = backward_sleep_s

    def forward(self, waves: Tensor) -> Tensor:
        """Waves (batch, FEATURES) to logits (batch, CLASSES)."""
        if self.sleep_s:
            time.sleep(self.sleep_s)
        logits = super().forward(waves)
        if self.backward_sleep_s:
            logits.register_hook(lambda _: time.sleep(self.backward_sleep_s))
        return logits


def train(options: argparse.Namespace, device: torch.device) -> tuple[nn.Module, list[float]]:
    """Runs this rank's loop."""
    torch.manual_seed(options.seed)
    slow_s = options.slow_ms / 1e3 if dist.get_rank() == options.slow_rank else 0.0
    slow = {phase: slow_s * (phase == options.slow_phase) for phase in PHASES}
    waves = Waves(4096, sleep_s=slow["dataloader"] / options.batch)
    sampler = DistributedSampler(waves, seed=options.seed, drop_last=True)
    loader = DataLoader(waves, batch_size=options.batch, sampler=sampler, drop_last=True)
    classifier = Classifier(sleep_s=slow["forward"], backward_sleep_s=slow["backward"])
    model = DistributedDataParallel(classifier.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    epoch = 0
    while len(losses) < options.steps:
        sampler.set_epoch(epoch)
        epoch += 1
        for wave, label in loader:
            loss = nn.functional.cross_entropy(model(wave.to(device)), label.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0 and dist.get_rank() == 0:
                print(f"step {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == options.steps:
                break
    return model.module, losses


def save(path: Path, model: nn.Module, losses: list[float]) -> None:
    """Rank 0 writes the file itself, the others the same with their rank as suffix."""
    rank = dist.get_rank()
    target = path.with_name(f"{path.name}.{rank}") if rank else path
    torch.save({"weights": model.state_dict(), "losses": losses}, target)


def main() -> None:
    """Reads the options, joins the group, trains, prints the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--slow-ms", type=float, default=20.0, help="added to each step")
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--slow-phase", choices=PHASES, default="dataloader")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write final weights and losses here")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node 2 " + sys.argv[0])
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo" if options.device == "cpu" else "cpu:gloo,cuda:nccl")
    started = time.perf_counter()
    model, losses = train(options, torch.device(options.device))
    if dist.get_rank() == 0:
        print(f"total {len(losses)} steps, last loss {losses[-1]:.4f}", flush=True)
        print(f"{time.perf_counter() - started:.1f} s", file=sys.stderr)
    if options.save:
        save(options.save, model, losses)
    dist.barrier()  # a peer that leaves first can abort the others at exit (torch 2.13, gloo)
    time.sleep(0.2)  # gloo's thread needs the GIL once more; while Python ends that aborts, too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
