"""Trains a point-cloud classifier that computes part of its forward on the CPU, sample by sample.

Shows: the published case. The model is on the device, but the neighbourhoods that its forward
starts with (farthest points, nearest neighbours) are worked out by small operators on CPU tensors,
one sample after another, while the device waits. `--fixed` computes the same neighbourhoods for the
whole batch on the device: forward falls to about a third, the step to about half, and the losses
stay the same. Expected verdict: forward-bound without `--fixed`, no such finding with it.

    haiprof examples/cpu_bound_forward.py --time 20
    haiprof examples/cpu_bound_forward.py --time 20 --fixed
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

POINTS = 128
CENTRES = 32
NEIGHBOURS = 16
SHAPES = ("sphere", "cube", "cylinder", "plane")


def point_clouds(count: int, generator: torch.Generator) -> TensorDataset:
    """Noisy points (count, POINTS, 3) on the surface of four shapes, and which shape it is."""
    raw = torch.randn(count, POINTS, 3, generator=generator)
    sphere = functional.normalize(raw, dim=-1)
    cube = raw / raw.abs().amax(-1, keepdim=True)
    cylinder = torch.cat([functional.normalize(raw[..., :2], dim=-1), raw[..., 2:].tanh()], -1)
    plane = raw * torch.tensor([1.0, 1.0, 0.0])
    shape = torch.randint(0, len(SHAPES), (count,), generator=generator)
    points = torch.stack([sphere, cube, cylinder, plane])[shape, torch.arange(count)]
    return TensorDataset(points + 0.1 * torch.randn(points.shape, generator=generator), shape)


def spread_out(points: Tensor) -> Tensor:
    """Farthest-point sampling: indices (..., CENTRES) of points (..., POINTS, 3) far apart."""
    chosen = [points.new_zeros(points.shape[:-2], dtype=torch.long)]
    nearest = torch.full_like(points[..., 0], torch.inf)
    while len(chosen) < CENTRES:
        centre = points.take_along_dim(chosen[-1][..., None, None], dim=-2)
        nearest = torch.minimum(nearest, (points - centre).square().sum(-1))
        chosen.append(nearest.argmax(-1))
    return torch.stack(chosen, -1)


def groups(points: Tensor) -> Tensor:
    """The neighbours of each centre, relative to it: (..., CENTRES, NEIGHBOURS, 3)."""
    centres = points.take_along_dim(spread_out(points)[..., None], dim=-2)
    offsets = points[..., None, :, :] - centres[..., :, None, :]
    near = offsets.square().sum(-1).topk(NEIGHBOURS, largest=False).indices
    return offsets.take_along_dim(near[..., None], dim=-2)


@torch.no_grad()
def groups_one_by_one(points: Tensor) -> Tensor:
    """Groups of a batch as left over from a prototype: on the CPU, one sample after another."""
    return torch.stack([groups(sample) for sample in points.cpu()]).to(points.device)


@torch.no_grad()
def groups_batched(points: Tensor) -> Tensor:
    """The same groups for the whole batch at once, where the points are."""
    return groups(points)


class PointClassifier(nn.Module):
    """A small PointNet++: a perceptron per neighbourhood, its maximum, and a perceptron on top."""

    def __init__(self, *, fixed: bool, width: int = 64) -> None:
        super().__init__()
        self.fixed = fixed
        self.neighbourhood = nn.Sequential(
            nn.Linear(3, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.centre = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU())
        self.head = nn.Sequential(
            nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, len(SHAPES))
        )

    def forward(self, points: Tensor) -> Tensor:
        """Points (batch, POINTS, 3) to logits (batch, shapes)."""
        grouped = groups_batched(points) if self.fixed else groups_one_by_one(points)
        described = self.neighbourhood(grouped).amax(-2)
        return self.head(self.centre(described).amax(-2))


def train(options: argparse.Namespace) -> tuple[nn.Module, list[float]]:
    """Runs the loop until the steps or the seconds are used up."""
    device = torch.device(options.device)
    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)
    loader = DataLoader(
        point_clouds(4096, generator),
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        generator=generator,
    )
    model = PointClassifier(fixed=options.fixed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    deadline = time.monotonic() + options.seconds
    losses: list[float] = []
    while True:
        for points, shape in loader:
            loss = functional.cross_entropy(model(points.to(device)), shape.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"step {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == options.steps or (not options.steps and time.monotonic() > deadline):
                return model, losses


def main() -> None:
    """Reads the options, trains, prints the total."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fixed", action="store_true", help="find the neighbours on the device")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    parser.add_argument("--seconds", type=float, default=30.0, help="stop after so long")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="write final weights and losses here")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of an operator")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)  # a model this small gains nothing from more
    started = time.perf_counter()
    model, losses = train(options)
    print(f"total {len(losses)} steps, last loss {losses[-1]:.4f}")
    seconds = time.perf_counter() - started
    print(f"{seconds:.1f} s, {seconds / len(losses) * 1e3:.1f} ms per step", file=sys.stderr)
    if options.save:
        torch.save({"weights": model.state_dict(), "losses": losses}, options.save)


if __name__ == "__main__":
    main()
