"""What sampling stacks costs a training step: blocks with and without it, side by side.

    python benchmarks/stack_cost.py --md benchmarks/results/stack_cost.md

One process trains; blocks of about a second with the sampler on and with it off take turns, and
each block with it is compared with the one beside it. The sampler's own CPU time is what its thread
used, as the kernel counts it.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from loop import stepper

from haiprof.in_job.stack_sampler import StackSampler

RATES = (1.0, 20.0, 50.0)
LOOPS = {"mlp": "0.4 ms", "transformer": "30 ms"}
SETTLE_S = 3.0


@dataclass(frozen=True)
class Cost:
    """One loop at one rate."""

    loop: str
    hz: float
    step_us: float
    """Median bare step."""
    wall: float
    """Median over pairs of blocks: mean step with the sampler by that without."""
    cpu: float
    """The same of the training thread's CPU time, which neighbours of the machine move less."""
    low: float
    high: float
    """The middle half of the pairs' ratios of CPU time."""
    held: float
    """Share of the time in which the training thread had handed the interpreter lock over."""
    sample_us: float
    """CPU time of the sampling thread per sample."""
    core: float
    """The same as a share of a core."""
    late_us: float
    """Median time by which a sample came late."""


def block(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Mean step in us, and its CPU time in this thread."""
    count, began, cpu = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    wall_us = 1e6 * (time.perf_counter() - began) / count
    return wall_us, 1e6 * (time.thread_time() - cpu) / count


def measure(loop: str, hz: float, pairs: int, seconds: float) -> Cost:
    """Pairs of blocks, first one way round, then the other."""
    step = stepper(loop)
    block(step, SETTLE_S)
    walls, cpus, bare, late = [], [], [], []
    sampler_ns = held_ns = 0
    for pair in range(pairs):
        times = {}
        for sampled in (False, True) if pair % 2 else (True, False):
            sampler = _sampler(hz) if sampled else None
            if sampler is not None:
                sampler.start()
            times[sampled] = block(step, seconds)
            if sampler is not None:
                held_ns += sampler.held_ns()
                sampler.stop()
                time.sleep(0.1)  # its thread ends, and has counted its CPU time
                line = sampler.take_line() or {"late_us": [], "cpu_ns": 0}
                late += line["late_us"]
                sampler_ns += line["cpu_ns"]
        walls.append(times[True][0] / times[False][0])
        cpus.append(times[True][1] / times[False][1])
        bare.append(times[False][0])
    low, middle, high = statistics.quantiles(cpus, n=4)
    return Cost(
        loop=loop, hz=hz, step_us=statistics.median(bare), wall=statistics.median(walls),
        cpu=middle, low=low, high=high, held=held_ns / 1e9 / (pairs * seconds),
        sample_us=sampler_ns / 1e3 / max(len(late), 1), core=sampler_ns / 1e9 / (pairs * seconds),
        late_us=statistics.median(late) if late else float("nan"),
    )  # fmt: skip


def _sampler(hz: float) -> StackSampler:
    ident = threading.get_ident()
    return StackSampler(lambda: ident, hz=hz, note=print)


def report(costs: list[Cost], pairs: int, seconds: float) -> str:
    """The table as Markdown."""
    lines = [
        "# Cost of sampling stacks",
        "",
        f"`benchmarks/stack_cost.py`, torch {torch.__version__}, {pairs} pairs of blocks of "
        f"{seconds:g} s each, with the sampler and without, side by side in one process.",
        "",
        "The wall time of a block moves with the machine's neighbours by more than sampling costs; "
        "its CPU time moves less. What sampling takes at most is in the last three columns: "
        "the training thread held up, and the sampling thread's own CPU time.",
        "",
        "| step | samples per second | wall time | CPU time (middle half of the pairs) "
        "| thread held up | CPU time per sample | of a core | a sample comes late by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {cost.step_us / 1e3:.2f} ms ({cost.loop}) | {cost.hz:g} | x{cost.wall:.3f} "
        f"| x{cost.cpu:.4f} ({cost.low:.4f} to {cost.high:.4f}) | {cost.held:.3%} "
        f"| {cost.sample_us:.0f} us | {cost.core:.3%} | {cost.late_us:.0f} us |"
        for cost in costs
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--md", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    costs = [measure(loop, hz, options.pairs, options.seconds) for loop in LOOPS for hz in RATES]
    text = report(costs, options.pairs, options.seconds)
    print(text)
    if options.md:
        options.md.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
