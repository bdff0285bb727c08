"""What settings cost: the same training step with and without each, as a ratio.

    python benchmarks/settings_price.py [--rounds 9] [--only anomaly] > results/settings_price.md

Blocks with and without the setting take turns in one process, so that a machine that is faster at
one time than at another slows both. With one thread CPU time is compared, which neighbours change
little; what concerns several threads or processes is compared by elapsed time. `small` has many
short operators, where Python and the dispatcher take the time; `large` has few long ones, where
computing does; `convolutions` has those. A rule goes by the least of a setting's prices. More
threads than cores have no price of their own: beside neighbours on the same cores it is even
faster (threads that are too many sleep at a barrier, others spin there), and no rule goes by it.
TORCH_DISTRIBUTED_DEBUG=DETAIL has none either: gloo with DistributedDataParallel ends in a
segmentation fault then (torch 2.13.0+cpu).
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

BLOCK_S = 0.4
CLOCKS = {"CPU": time.process_time, "elapsed": time.perf_counter}


@dataclass(frozen=True)
class Job:
    """A model with its batch."""

    model: nn.Module
    batch: torch.Tensor
    optimizer: torch.optim.Optimizer

    def model_work(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()

    def step(self) -> None:
        """Forward, backward and optimizer."""
        self.model_work()
        self.optimizer.step()


def make_job(kind: str, *, dtype: torch.dtype = torch.float32, **optimizer: bool) -> Job:
    """One of the three jobs."""
    torch.manual_seed(0)
    if kind == "convolutions":
        model = nn.Sequential(*(nn.Conv2d(32, 32, 3, padding=1) for _ in range(4)))
        batch = torch.randn(16, 32, 32, 32)
    else:
        width, depth, rows = (64, 24, 32) if kind == "small" else (1024, 4, 256)
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]
        model, batch = nn.Sequential(*layers), torch.randn(rows, width)
    model, batch = model.to(dtype), batch.to(dtype)
    return Job(model, batch, torch.optim.AdamW(model.parameters(), **optimizer))  # type: ignore[arg-type]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def memory_traced() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block(work: Callable[[], None], clock: Callable[[], float]) -> float:
    """Mean seconds of one call, over about BLOCK_S."""
    work()
    began, used, count = time.perf_counter(), clock(), 0
    while time.perf_counter() - began < BLOCK_S or count < 3:
        work()
        count += 1
    return (clock() - used) / count


def pairs(
    base: Callable[[], None], other: Callable[[], None], *, rounds: int, clock: str, around: object
) -> list[float]:
    """Ratios of neighbouring blocks."""
    found = []
    for _ in range(rounds):
        plain = block(base, CLOCKS[clock])
        with around():  # type: ignore[operator]
            found.append(block(other, CLOCKS[clock]) / plain)
    return found


def row(name: str, kind: str, of: str, clock: str, ratios: list[float]) -> None:
    """One line of the table."""
    low, high = min(ratios), max(ratios)
    middle = statistics.median(ratios)
    print(
        f"| {name} | {kind} | {of} | {clock} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True
    )


def switches(rounds: int, only: str) -> None:
    """What is switched on and off in one process."""
    cores = len(os.sched_getaffinity(0))
    cpu = [torch.profiler.ProfilerActivity.CPU]
    table = (
        ("anomaly", "small large convolutions", torch.autograd.detect_anomaly, 1),
        ("profiler", "small large convolutions", lambda: torch.profiler.profile(activities=cpu), 1),
        ("deterministic", "small large convolutions", deterministic, 1),
        ("mkldnn off", "small large convolutions", lambda: torch.backends.mkldnn.flags(False), 1),
        ("float16", "small large convolutions", lambda: torch.autocast("cpu", torch.float16), 1),
        ("tracemalloc", "small large", memory_traced, 1),
        ("2x threads", "small large convolutions", lambda: threads(2 * cores), cores),
        ("4x threads", "small large convolutions", lambda: threads(4 * cores), cores),
        ("8x threads", "small large convolutions", lambda: threads(8 * cores), cores),
    )
    for name, kinds, around, count in table:
        for kind in kinds.split():
            if only and only not in name:
                continue
            torch.set_num_threads(count)
            job = make_job(kind)
            clock = "CPU" if count == 1 else "elapsed"
            found = pairs(job.model_work, job.model_work, rounds=rounds, clock=clock, around=around)
            row(name, kind, "forward and backward", clock, found)
    torch.set_num_threads(1)


def kinds_of_work(rounds: int, only: str) -> None:
    """What makes the step another one: float64, loops over parameters, gc.collect()."""
    for kind in ("small", "large", "convolutions"):
        base = make_job(kind)
        if only in "float64":
            other = make_job(kind, dtype=torch.float64)
            found = pairs(base.step, other.step, rounds=rounds, clock="CPU", around=nullcontext)
            row("float64", kind, "the step", "CPU", found)
        if only in "optimizer" and kind != "convolutions":
            base.model_work()
            for name, kwargs in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
                other = make_job(kind, **kwargs)  # type: ignore[arg-type]
                other.model_work()
                step, loop = other.optimizer.step, base.optimizer.step
                found = pairs(step, loop, rounds=rounds, clock="CPU", around=nullcontext)
                row(f"optimizer's loop against {name}", kind, "the optimizer", "CPU", found)
        if only in "gc.collect" and kind == "small":

            def collecting(job: Job = base) -> None:
                job.step()
                gc.collect()

            found = pairs(base.step, collecting, rounds=rounds, clock="CPU", around=nullcontext)
            row("gc.collect() each step", kind, "the step", "CPU", found)


def parallel_main(rounds: int) -> None:
    """One rank of two: models that differ by one argument take turns in one process."""
    torch.distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    for kind, count in (("small", 30), ("large", 10)):
        base, other = parallel_job(kind), parallel_job(kind, find_unused_parameters=True)
        found = []
        for _ in range(rounds):
            plain = counted(base.model_work, count)
            found.append(counted(other.model_work, count) / plain)
        if torch.distributed.get_rank() == 0:
            row("find_unused_parameters", kind, "forward and backward", "CPU", found)
    torch.distributed.destroy_process_group()


def parallel_job(kind: str, **more: Any) -> Job:
    """A job whose model is wrapped."""
    job = make_job(kind)
    return Job(nn.parallel.DistributedDataParallel(job.model, **more), job.batch, job.optimizer)


def counted(work: Callable[[], None], count: int) -> float:
    """CPU seconds of so many calls, the same on all ranks; one more call comes before."""
    work()
    began = time.process_time()
    for _ in range(count):
        work()
    return time.process_time() - began


def parallel(rounds: int) -> None:
    """What concerns DistributedDataParallel: two ranks on this machine, gloo."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", "2", __file__, "--as-rank", "--rounds", str(rounds)]  # fmt: skip
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=environ, check=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--as-rank", action="store_true", help="of the two that it starts itself")
    chosen = parser.parse_args()
    if chosen.as_rank:
        parallel_main(chosen.rounds)
        return
    cores = len(os.sched_getaffinity(0))
    print("# What settings cost\n")
    print(f"`python benchmarks/settings_price.py --rounds {chosen.rounds}`,")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {cores} cores,")
    print(f"load {os.getloadavg()[0]:.1f} at the")
    print("start. Time with the setting over time without it; blocks of both take turns.\n")
    print("| setting | job | of | clock | median | range |\n|---|---|---|---|---|---|", flush=True)
    torch.set_num_threads(1)
    switches(chosen.rounds, chosen.only)
    kinds_of_work(chosen.rounds, chosen.only)
    if not chosen.only or chosen.only in "distributed":
        parallel(chosen.rounds)


if __name__ == "__main__":
    main()
