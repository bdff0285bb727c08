"""A training job of several ranks in which one of them does something wrong.

    torchrun --nproc-per-node 2 tests/process/faulty_job.py slow:1.25 --at 100 --steps 200
    torchrun --nproc-per-node 2 tests/process/faulty_job.py --follow said.txt

Faults: `healthy`, `slow:FACTOR` (of a whole step), `loader:MS`, `forward:MS`, `backward:MS`,
`spin`, `wait_for_lock`, `receive`, `stop`, `other_collective`, `killed`, and `save:SECONDS` (rank 0
saves a checkpoint for so long, the others wait). With `--follow` the file says which, and of which
rank, and may say something else later.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

BATCH = 4
PHASES = ("loader", "forward", "backward")


class SlowFile(io.BytesIO):
    """Takes its time for the first write."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def write(self, data: object) -> int:
        """The first one sleeps."""
        time.sleep(self._seconds)
        self._seconds = 0.0
        return super().write(data)  # type: ignore[arg-type]


class Samples(IterableDataset):  # type: ignore[type-arg]
    """Noise without end; reading it can be made slow."""

    sleep_s = 0.0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.sleep_s:
                time.sleep(self.sleep_s / BATCH)
            yield torch.randn(8)


class Model(torch.nn.Linear):
    """Whose forward or backward can be made slow."""

    forward_s = 0.0
    backward_s = 0.0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(batch, 8) to (batch, 8)."""
        if self.forward_s:
            time.sleep(self.forward_s)
        found = super().forward(batch)
        if self.backward_s and found.requires_grad:
            seconds = self.backward_s
            found.register_hook(lambda _: time.sleep(seconds))  # type: ignore[no-untyped-call]
        return found


def spin() -> None:
    while True:
        pass


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def receive() -> None:
    here, _there = socket.socketpair()
    here.recv(1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def other_collective() -> None:
    dist.broadcast(torch.ones(7), dist.get_rank())


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


HANGS = {f.__name__: f for f in (spin, wait_for_lock, receive, stop, other_collective, killed)}


def told(follow: Path | None, options: argparse.Namespace, step: int) -> tuple[str, float, int]:
    """The fault of this step, its size, and its rank."""
    text, rank = options.fault if step >= options.at else "healthy", options.rank
    if follow is not None:
        with contextlib.suppress(OSError, ValueError):  # not there yet, or being written
            text, rank = follow.read_text().split()
    fault, _, value = text.partition(":")
    return fault, float(value or 0), int(rank)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("fault", nargs="?", default="healthy")
    parser.add_argument("--at", type=int, default=100)
    parser.add_argument("--rank", type=int, default=1, help="who does it")
    parser.add_argument("--follow", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.1)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    samples, layer = Samples(), Model(8, 8)
    loader = iter(DataLoader(samples, batch_size=BATCH))
    model = DistributedDataParallel(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = hashlib.sha256()
    usual_s: list[float] = []
    for step in range(options.steps):
        began_s = time.monotonic()
        fault, value, who = told(options.follow, options, step)
        slow_s = dict.fromkeys(PHASES, 0.0)
        if rank == who and fault in PHASES:
            slow_s[fault] = value / 1e3
        samples.sleep_s, layer.forward_s, layer.backward_s = slow_s.values()
        if step == options.at and rank == who:
            print("FAULT", time.time_ns(), flush=True)
        if rank == who and fault in HANGS:
            HANGS.pop(fault)()
        if step == options.at and rank == 0 and fault == "save":
            torch.save(model.state_dict(), SlowFile(value))
        batch = next(loader)
        with torch.profiler.record_function(f"own step {step}"):  # tells traces which step it is
            loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.update(loss.detach().numpy().tobytes())
        time.sleep(options.step_s)
        usual_s.append(time.monotonic() - began_s)
        if fault == "slow" and rank == who:
            time.sleep((value - 1) * statistics.median(usual_s))
    if rank == 0:
        print("LOSSES", losses.hexdigest(), flush=True)
    dist.barrier()
    time.sleep(0.2)  # tests/process/loops.py says why
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
