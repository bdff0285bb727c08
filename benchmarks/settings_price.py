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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
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
def between(begin: Callable[[], object], end: Callable[[], object]) -> Iterator[None]:
    """Something is switched on, and off again."""
    begin()
    try:
        yield
    finally:
        end()


def threads(count: int) -> AbstractContextManager[None]:
    """So many of torch's."""
    before, change = torch.get_num_threads(), torch.set_num_threads
    return between(lambda: change(count), lambda: change(before))


def deterministic() -> AbstractContextManager[None]:
    """Deterministic algorithms alone."""
    change = torch.use_deterministic_algorithms
    return between(lambda: change(True), lambda: change(False))


def profiled() -> AbstractContextManager[object]:
    """A profiler that is always on."""
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])


CORES = len(os.sched_getaffinity(0))
SWITCHES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], int]] = {
    "anomaly": (torch.autograd.detect_anomaly, 1),
    "profiler": (profiled, 1),
    "deterministic": (deterministic, 1),
    "mkldnn off": (lambda: torch.backends.mkldnn.flags(False), 1),
    "float16": (lambda: torch.autocast("cpu", torch.float16), 1),
    "tracemalloc": (lambda: between(tracemalloc.start, tracemalloc.stop), 1),
    **{f"{n}x threads": (partial(threads, n * CORES), CORES) for n in (2, 4, 8)},
}
"""What is switched on and off in one process, and how many threads compute."""
WITHOUT_CONVOLUTIONS = ("tracemalloc", "optimizer", "gc.collect")
Case = tuple[str, str, int, Callable[[], object], Callable[[], object], Any]


def cases(kind: str) -> Iterator[Case]:
    """Setting, what it is of, threads; the work without and with it, and what is around that."""
    job = make_job(kind)
    for name, (around, count) in SWITCHES.items():
        yield name, "forward and backward", count, job.model_work, job.model_work, around
    float64 = make_job(kind, dtype=torch.float64)
    yield "float64", "the step", 1, job.step, float64.step, nullcontext
    for name in ("foreach", "fused"):
        other = make_job(kind, **{name: True})
        job.model_work()
        other.model_work()
        title = f"optimizer's loop against {name}"
        yield title, "the optimizer", 1, other.optimizer.step, job.optimizer.step, nullcontext
    if kind == "small":
        collecting = partial(call_all, job.step, gc.collect)
        yield "gc.collect() each step", "the step", 1, job.step, collecting, nullcontext


def call_all(*calls: Callable[[], object]) -> None:
    """One after the other."""
    for call in calls:
        call()


def block(work: Callable[[], object], clock: Callable[[], float]) -> float:
    """Mean seconds of one call, over about BLOCK_S."""
    work()
    began, used, count = time.perf_counter(), clock(), 0
    while time.perf_counter() - began < BLOCK_S or count < 3:
        work()
        count += 1
    return (clock() - used) / count


def row(name: str, kind: str, of: str, clock: str, ratios: list[float]) -> None:
    """One line of the table."""
    spread = f"{statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f}"
    print(f"| {name} | {kind} | {of} | {clock} | {spread} |", flush=True)


def in_one_process(rounds: int, only: str) -> None:
    """Ratios of neighbouring blocks, without a setting and with it."""
    for kind in ("small", "large", "convolutions"):
        for name, of, count, base, other, around in cases(kind):
            left_out = kind == "convolutions" and name.startswith(WITHOUT_CONVOLUTIONS)
            if left_out or only not in name:
                continue
            torch.set_num_threads(count)
            clock, ratios = "CPU" if count == 1 else "elapsed", []
            for _ in range(rounds):
                plain = block(base, CLOCKS[clock])
                with around():
                    ratios.append(block(other, CLOCKS[clock]) / plain)
            row(name, kind, of, clock, ratios)
    torch.set_num_threads(1)


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
    print("# What settings cost\n")
    print(f"`python benchmarks/settings_price.py --rounds {chosen.rounds}`,")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {CORES} cores,")
    print(f"load {os.getloadavg()[0]:.1f} at the")
    print("start. Time with the setting over time without it; blocks of both take turns.\n")
    print("| setting | job | of | clock | median | range |\n|---|---|---|---|---|---|", flush=True)
    torch.set_num_threads(1)
    in_one_process(chosen.rounds, chosen.only)
    if chosen.only in "find_unused_parameters":
        parallel(chosen.rounds)


if __name__ == "__main__":
    main()
