"""A training job whose parts can be changed: loader, operators, layers, ranks, collectives.

`whatif_reruns.py` runs it. Operators and samples take a fixed time (they sleep), as a device's work
does, so that a shared machine's noise does not decide; `real` makes operators multiply matrices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler
from torch.utils.data import DataLoader, Dataset

LAYERS, BATCH, WARM, TRACED, TIMED, GROUP = 4, 4, 4, 16, 16, 4
SPUN_S = 3e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one run of the job does."""

    workers: int = 0
    sample_ms: float = 8.0
    batch: int = BATCH
    layers: int = LAYERS
    forward_ms: float = 6.0
    """Of one layer for a batch of `BATCH`."""
    backward_ratio: float = 2.0
    """How many times as long its backward takes."""
    real: int = 0
    """Size of the matrices that a layer multiplies; 0: it sleeps."""
    late_ms: float = 0.0
    """How much longer rank 1's forward pass takes."""
    reduce_count: int = 0
    """All-reduces per step."""

    def with_changes(self, **changes: float) -> Job:
        """Another job."""
        return replace(self, **changes)  # type: ignore[arg-type]


def work(seconds: float, size: int) -> None:
    """What a layer does, for so long, or with matrices of a size."""
    if size:
        matrix = torch.ones(size, size)
        torch.mm(matrix, matrix)
    else:
        wait(seconds)


def wait(seconds: float) -> None:
    """Takes this time; a sleep alone takes some 0.1 ms longer than it was asked for."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - SPUN_S, 0.0))
    while time.perf_counter() < end:
        pass


@torch.library.custom_op("rerun::forward", mutates_args=())
def forward(x: torch.Tensor, seconds: float, size: int, ratio: float) -> torch.Tensor:
    """One layer; its gradient takes `ratio` times as long."""
    work(seconds, size)
    return x.clone()


@torch.library.custom_op("rerun::backward", mutates_args=())
def backward(x: torch.Tensor, seconds: float, size: int) -> torch.Tensor:
    """Its gradient."""
    work(seconds, size)
    return x.clone()


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.seconds, ctx.size, ctx.ratio = inputs[1:]


def _gradient(ctx, gradient):  # type: ignore[no-untyped-def]
    return backward(gradient, ctx.seconds * ctx.ratio, ctx.size), None, None, None


forward.register_autograd(_gradient, setup_context=_save)


class Samples(Dataset[torch.Tensor]):
    """Samples that take a while to read."""

    def __init__(self, job: Job) -> None:
        self._seconds = job.sample_ms / 1e3

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        wait(self._seconds)
        return torch.zeros(16)


def train(job: Job, rank: int, steps: int) -> Iterator[float]:
    """Trains; yields when each step ended."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(job), batch_size=job.batch, num_workers=job.workers)
    seconds = job.forward_ms / 1e3 * job.batch / BATCH
    reduced = torch.zeros(1 << 20)
    late = job.late_ms / 1e3 / job.layers if rank == 1 else 0.0
    for batch in islice(loader, steps):
        x = model(batch)
        for _ in range(job.layers):
            x = forward(x, seconds + late, job.real, job.backward_ratio)
        x.sum().backward()
        for _ in range(job.reduce_count):
            dist.all_reduce(reduced)
        optimizer.step()
        optimizer.zero_grad()
        yield time.perf_counter()


def timed(job: Job, rank: int) -> float:
    """Time of a step in seconds, after warming up: the median of the means of `GROUP` steps.

    Two workers hand over two batches at once, so single steps are short and long in turn.
    """
    ends = list(train(job, rank, WARM + TIMED))[WARM - 1 :: GROUP]
    return median(later - earlier for earlier, later in pairwise(ends)) / GROUP


def traced(job: Job, rank: int, folder: Path) -> None:
    """Writes the job's trace into a folder."""
    plan = schedule(wait=WARM - 1, warmup=1, active=TRACED, repeat=1)
    name = f"rank{rank}"
    handler = tensorboard_trace_handler(str(folder), worker_name=name)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=handler) as prof:
        for _ in train(job, rank, WARM + TRACED + 1):
            prof.step()
