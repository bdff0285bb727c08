"""The training loops that are timed: a ~0.4 ms MLP step and a ~40 ms transformer step.

Run as a script it trains, takes the time of every step, and writes them as JSON. It knows nothing
of haiprof.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Causal(nn.Module):
    """A six-block pre-norm transformer over 128 positions."""

    def __init__(self, width: int = 128, blocks: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, codes: Tensor) -> Tensor:
        """Codes (batch, time) to logits (batch, time, 256)."""
        return self.head(self.blocks(self.embed(codes)))


def mlp() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """Three linear layers and SGD."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    )
    batches = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(64)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, DataLoader(batches * 16, batch_size=None)


def transformer() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    """`Causal` and AdamW."""
    model = Causal()
    codes = torch.randint(256, (64, 3, 65))
    batches = [(rows[:, :-1], rows[:, 1:]) for rows in codes]
    return model, torch.optim.AdamW(model.parameters()), DataLoader(batches, batch_size=None)


LOOPS = {"mlp": mlp, "transformer": transformer}


def stepper(kind: str) -> Callable[[], None]:
    """A function that trains for one step."""
    torch.manual_seed(0)
    model, optimizer, loader = LOOPS[kind]()
    loss_of = nn.CrossEntropyLoss()

    def forever() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield from loader

    batches = forever()

    def step() -> None:
        x, y = next(batches)
        logits = model(x)
        loss = loss_of(logits.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def timed(
    step: Callable[[], None], steps: int, *, clock: Callable[[], int] = time.perf_counter_ns
) -> list[int]:
    """Durations in ns of so many steps."""
    marks = [clock()]
    for _ in range(steps):
        step()
        marks.append(clock())
    return [end - begin for begin, end in pairwise(marks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=sorted(LOOPS))
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--skip", type=int, default=20, help="steps before the timed ones")
    parser.add_argument("--skip-seconds", type=float, default=0.0, help="and at least so long")
    parser.add_argument("--profiler", action="store_true", help="under torch.profiler, CPU, always")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = stepper(options.kind)
    until = time.monotonic() + options.skip_seconds
    timed(step, options.skip)
    skipped = options.skip
    while time.monotonic() < until:
        step()
        skipped += 1
    cpu_only = [torch.profiler.ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=cpu_only) if options.profiler else None
    with profiler or contextlib.nullcontext():
        rows = timed(step, options.steps)
    content = {"steps_ns": rows, "step_count": skipped + len(rows)}
    options.out.write_text(json.dumps(content))


if __name__ == "__main__":
    main()
