"""How much work a model must do on this machine for its loader to be a small part of a step.

    python benchmarks/faults/work.py

A drawn job whose loader takes a fifth of each step is not healthy: a fifth can be gained. So the
bare times are taken first, without haiprof and as CPU time, which neighbours change little: of a
batch made, of one received from a worker, and of a step of the model. Models work on their batch
so many times over (`WORK` of job.py) that the loader has three hundredths of the step; and what a
fault takes (`LOSE`) is counted in steps of the model as it is then, once for all its runs.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from draw import BATCHES, STEP_S, Work

LOADER_RATIO = 0.03
MOST = 12
ROUNDS = 9


def bare_job(family: str, workers: int) -> dict[str, Any]:
    """The names of job.py, with nothing wrong in it."""
    source = Path(__file__).with_name("job.py").read_text(encoding="utf-8")
    drawn = f"FAMILY, BATCH, WORKERS = {family!r}, {BATCHES[family]}, {workers}"
    names: dict[str, Any] = {"__name__": "job"}
    exec(compile(source.replace("# <constants>", drawn), "job.py", "exec"), names)
    return names


def cpu_s(act: Callable[[], object]) -> float:
    """Median CPU time of this thread in one call."""
    times = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        act()
        times.append(time.thread_time() - began)
    return statistics.median(times[1:])


def work_of(family: str) -> Work:
    """How often a model of the family works on its batch, and what follows from that."""
    job = bare_job(family, 0)
    batches, received = iter(job["make_loader"]()), iter(bare_job(family, 1)["make_loader"]())
    x, y = next(batches)
    next(received)
    loader_s = max(cpu_s(lambda: next(batches)), cpu_s(lambda: next(received)))
    model = job["Net"]()
    optimizer = job["make_optimizer"](model)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    wanted_s = max(loader_s / LOADER_RATIO, 0.75 * STEP_S)
    step_s = cpu_s(step)
    work = min(max(math.ceil(wanted_s / step_s), 1), MOST)
    turns_per_s = 20_000 / cpu_s(lambda: sum(i * i for i in range(20_000)))
    parameters = sum(p.numel() for p in model.parameters())
    return Work(work, work * step_s, parameters, turns_per_s)


def main() -> None:
    """Prints what was found of each family as JSON."""
    torch.set_num_threads(1)
    print(json.dumps({family: work_of(family) for family in BATCHES}))


if __name__ == "__main__":
    main()
