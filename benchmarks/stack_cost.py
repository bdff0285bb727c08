"""What sampling stacks costs a training step: the lock time and the CPU time of each sample.

    python benchmarks/stack_cost.py --md benchmarks/results/stack_cost.md

One process trains while the sampler runs. A step with samples cannot be told from one without by
the clock: neighbours of the machine and its caches move both by several percent, and sampling by a
hundredth of that. So what a sample takes is counted itself: the CPU time for which it holds the
interpreter lock, the time for which the training thread had handed that over, and all CPU time of
the sampling thread, waking up included. Times the samples per second, that is a share of any step.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from loop import stepper

from haiprof.in_job.stack_sampler import StackSampler

RATES = (1.0, 5.0, 20.0, 50.0)
LOOPS = {"mlp": "0.4 ms", "transformer": "30 ms"}
SETTLE_S = 3.0
SLICE_SAMPLES = 5
"""Of at least so many samples, and a second as in a job, CPU time is read together."""
MOST_STEP, MOST_CORE = 0.002, 0.001
"""Of a step of 30 ms, and of a core: what sampling may cost at the default rate."""


@dataclass
class Times:
    """Microseconds per sample: of each sample, or means of slices."""

    own: list[float] = field(default_factory=list)
    """The training thread took samples itself."""
    cpu: list[float] = field(default_factory=list)
    """All of the sampling thread."""

    def most(self) -> list[float]:
        """What training is held up by, at most."""
        return [own + cpu for own, cpu in zip(self.own, self.cpu, strict=True)]


class CountingSampler(StackSampler):
    """The sampler, which says how many samples it has."""

    def count(self) -> int:
        """Samples so far."""
        return len(self._samples)


@dataclass(frozen=True)
class Cost:
    """One loop at one rate."""

    loop: str
    hz: float
    step_ms: float
    count: int
    times: Times
    late_us: float


def measure(loop: str, hz: float, count: int) -> Cost:
    """Trains until so many samples have been taken."""
    step, ident, times = stepper(loop), threading.get_ident(), Times()
    settled = time.perf_counter() + SETTLE_S
    train(step, lambda: time.perf_counter() >= settled)
    sampler = CountingSampler(lambda: ident, hz=hz, note=print)
    sampler.prepare()
    thread = threading.Thread(target=sample, args=(sampler, hz, times))
    thread.start()
    step_ms = train(step, lambda: sampler.count() >= count)
    sampler.stop()
    thread.join()
    taken, line = sampler.count(), sampler.take_line() or {"late_us": [math.nan]}
    late_us = statistics.median(line["late_us"])
    return Cost(loop=loop, hz=hz, step_ms=step_ms, count=taken, times=times, late_us=late_us)


def train(step: Callable[[], None], is_over: Callable[[], bool]) -> float:
    """Median step in ms."""
    steps = []
    while not is_over():
        began = time.perf_counter()
        step()
        steps.append(1e3 * (time.perf_counter() - began))
    return statistics.median(steps)


def sample(sampler: CountingSampler, hz: float, times: Times) -> None:
    """The body of the sampling thread, with its clocks read after each slice."""
    before = (time.thread_time_ns(), sampler.held_ns(), 0)
    while sampler.sample_until(round(max(SLICE_SAMPLES / hz, 1.0) * 1e9)):
        now = (time.thread_time_ns(), sampler.held_ns(), sampler.count())
        cpu_ns, own_ns, taken = (a - b for a, b in zip(now, before, strict=True))
        if taken:
            times.cpu.append(cpu_ns / 1e3 / taken)
            times.own.append(own_ns / 1e3 / taken)
        before = now


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and where it lies with 95 % certainty (normal approximation)."""
    mean = statistics.fmean(values)
    spread = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return mean, max(mean - spread, 0.0), mean + spread


def us(values: Sequence[float]) -> str:
    """`21.3 us (20.8 to 21.9)`."""
    mean, low, high = interval(values)
    return f"{mean:.1f} us ({low:.1f} to {high:.1f})"


def share(values: Sequence[float], hz: float) -> str:
    """The same times the rate: of a second, so of any step."""
    mean, low, high = (each * hz / 1e6 for each in interval(values))
    return f"{mean:.4%} ({low:.4%} to {high:.4%})"


def report(costs: Sequence[Cost], load: float) -> str:
    """The table as Markdown."""
    lines = [
        "# Cost of sampling stacks",
        "",
        f"`benchmarks/stack_cost.py`, torch {torch.__version__}; means, 95 % intervals. Taken by "
        "the training thread is elapsed time, shared by all samples; training is held up by that "
        "and, at most, by all CPU time of the sampling thread. Shares of a step are samples per "
        f"second times that. By default samples are taken 20 times a second for 30 s, then "
        f"5 times, and once from an hour on. Allowed: {MOST_STEP:.1%} of a 30 ms step, "
        f"{MOST_CORE:.1%} of a core.",
        "",
        f"Load average of the machine before and after: {load:.1f} and {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores. Above their number all of it is more than on a free machine: "
        "caches are cold, and each wait for the interpreter lock wakes up more often.",
        "",
        "| step | samples a second | samples | taken by the training thread | held up, at most "
        "| of a step | CPU time of a sample | of a core | late by |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.step_ms:.2f} ms ({c.loop}) | {c.hz:g} | {c.count} | {us(c.times.own)} "
        f"| {us(c.times.most())} | {share(c.times.most(), c.hz)} | {us(c.times.cpu)} "
        f"| {share(c.times.cpu, c.hz)} | {c.late_us:.0f} us |"
        for c in costs
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures every loop at every rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=40, help="at the least, of each rate")
    parser.add_argument("--md", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    costs = [
        measure(loop, hz, max(options.samples, round(6 * hz))) for loop in LOOPS for hz in RATES
    ]
    text = report(costs, load)
    print(text)
    if options.md:
        options.md.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
