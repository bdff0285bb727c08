"""What sampling stacks costs a training step, and beside it, in the parts of a run.

    python benchmarks/stack_cost.py --md benchmarks/results/stack_cost.md

Each row is of pairs of fresh processes, in turn with and without samples: the same loop, the same
number of seconds. A pair tells the median step of one by that of the other; neighbours of the
machine and its caches move that by several percent, sampling by a hundredth of it. So what samples
take is counted as well: for how long the training thread took samples itself, for how long the
sampling thread held the interpreter lock (by which it holds training up at most), and all CPU time
of the sampling thread, waking up included. All are shares of the time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LOOPS = {"mlp": "0.4 ms", "transformer": "30 ms"}
PARTS = {"first minute": 0.0, "to ten minutes": 60.0, "to an hour": 600.0, "later": 3600.0}
"""Ages of the training at which a part of a run begins."""
SETTLE_S = 3.0
MOST_HELD = 0.001
MOST_CORE = {"first minute": 0.002}
MOST_CORE_LATER = 0.0005
"""What sampling may take of the training thread, and of a core."""


def run_loop(loop: str, age_s: float | None, seconds: float) -> dict[str, float]:
    """Trains in this process; without samples where no age is given."""
    import torch
    from loop import stepper

    from haiprof.in_job.stack_sampler import StackSampler

    torch.set_num_threads(1)
    step, ident = stepper(loop), threading.get_ident()
    sampler = None
    if age_s is not None:
        sampler = StackSampler(lambda: ident, hz=100.0, note=print)
        sampler.start()
        sampler.begin_steps(age_s)
    settled = time.perf_counter() + SETTLE_S
    while time.perf_counter() < settled:
        step()
    before = sampler.costs_ns() if sampler else ()
    if sampler:
        sampler.take_line()
    steps, began = [], time.perf_counter_ns()
    while time.perf_counter_ns() - began < seconds * 1e9:
        at = time.perf_counter_ns()
        step()
        steps.append(time.perf_counter_ns() - at)
    found = {"step_ms": statistics.median(steps) / 1e6}
    if sampler:
        time.sleep(0.01)
        costs = sampler.costs_ns()
        passed_ns, count, cpu, own, lock = (b - a for a, b in zip(before, costs, strict=True))
        line = sampler.take_line() or {"late_us": [math.nan]}
        found |= {
            "hz": count / (passed_ns / 1e9), "own": own / passed_ns, "lock": lock / passed_ns,
            "core": cpu / passed_ns, "sample_us": cpu / 1e3 / max(count, 1),
            "late_us": statistics.median(line["late_us"]),
        }  # fmt: skip
        sampler.stop()
    return found


def fresh(loop: str, age_s: float | None, seconds: float) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, __file__, "--loop", loop, "--seconds", str(seconds)]
    command += [] if age_s is None else ["--age", str(age_s)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def spread(values: Sequence[float], form: str) -> str:
    """The median, and the least and the most."""
    chosen = (min(values), statistics.median(values), max(values))
    low, middle, high = (f"{value:{form}}" for value in chosen)
    return f"{middle} ({low} to {high})"


def row(loop: str, part: str, pairs: int, seconds: float) -> str:
    """One loop in one part of a run."""
    bare: list[dict[str, float]] = []
    sampled: list[dict[str, float]] = []
    for number in range(pairs):
        for age_s in (None, PARTS[part]) if number % 2 else (PARTS[part], None):
            (bare if age_s is None else sampled).append(fresh(loop, age_s, seconds))
    ratios = [a["step_ms"] / b["step_ms"] - 1 for a, b in zip(sampled, bare, strict=True)]
    columns = {name: [each[name] for each in sampled] for name in sampled[0]}
    cells = [
        f"{statistics.median(each['step_ms'] for each in bare):.2f} ms ({loop})", part,
        spread(columns["hz"], ".3g"), spread(columns["own"], ".4%"), spread(columns["lock"], ".4%"),
        spread(columns["core"], ".4%"), f"{MOST_CORE.get(part, MOST_CORE_LATER):.2%}",
        spread(columns["sample_us"], ".0f") + " us",
        f"{statistics.median(columns['late_us']):.0f} us",
        spread(ratios, "+.1%"),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Measures both loops in every part of a run, or trains once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--loop", choices=sorted(LOOPS), help="train once, and print the numbers")
    parser.add_argument("--age", type=float, help="with samples, as of a training of so many s")
    parser.add_argument("--md", type=Path)
    options = parser.parse_args()
    if options.loop:
        print(json.dumps(run_loop(options.loop, options.age, options.seconds)))
        return
    load = os.getloadavg()[0]
    rows = [row(loop, part, options.pairs, options.seconds) for loop in LOOPS for part in PARTS]
    text = f"""# Cost of sampling stacks

`benchmarks/stack_cost.py --pairs {options.pairs} --seconds {options.seconds:g}`: pairs of fresh
processes in turn; median, least and most of them. All but the last column are counted, not
compared; shares are of the time. Training is held up by what it takes itself and, at most, by the
time for which the sampling thread held the interpreter lock: allowed {MOST_HELD:.1%} in all.

Load average of the machine before and after: {load:.1f} and {os.getloadavg()[0]:.1f} on
{os.cpu_count()} cores. Beside neighbours caches are cold, and a sample takes up to twice as long.

"""
    heads = (
        "step", "part of the run", "samples a second", "taken by the training thread",
        "lock held beside it", "CPU time beside it", "allowed", "of a sample", "late by",
        "step against the bare one",
    )  # fmt: skip
    table = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|", *rows]
    text += "\n".join(table) + "\n"
    print(text)
    if options.md:
        options.md.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
