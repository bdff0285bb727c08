"""Work on the GPU beside an item, in a process of its own; says `running` once it computes.

    python benchmarks/gpu/load.py SECONDS [--steps FILE] [--copy GIB] [--profile]

FILE gets a line of JSON per step: end in CLOCK_MONOTONIC ns, the step's ns, and the ns of a
cuMemAlloc with its cuMemFree, which wait for the driver's lock that NVML calls hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ALLOCATED_BYTES = 64 << 20


@contextmanager
def load(*words: str, seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    """The load beside; ended at the end."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(seconds), *words], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True, env={**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "running\n":
            raise RuntimeError("the load beside does not run")
        yield process
    finally:
        process.kill()
        process.communicate()


def copies(gib: int) -> None:
    """Copies so much from pinned host memory, when told to."""
    import torch

    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    print("running", flush=True)
    input()
    for _ in range(gib):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    print(gib << 30, flush=True)
    input()


def train(seconds: float, steps: Path, *, profile: bool) -> None:
    """Trains a small network for so long, a third of a ms between two looks at the clock."""
    import torch

    layers = [torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    driver = ctypes.CDLL("libcuda.so.1")
    block = ctypes.c_uint64()

    def step() -> None:
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()
        torch.cuda.synchronize()

    def allocate() -> None:
        driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(ALLOCATED_BYTES))
        driver.cuMemFree_v2(block)

    for _ in range(5):
        step()
    profiler = torch.profiler.profile() if profile else contextlib.nullcontext()
    with profiler:
        note_steps(seconds, steps, step, allocate)


def note_steps(
    seconds: float, steps: Path, step: Callable[[], object], allocate: Callable[[], object]
) -> None:
    """Runs steps until the time is up; a line per step."""
    print("running", flush=True)
    end = time.monotonic() + seconds
    with steps.open("w") as file:
        while time.monotonic() < end:
            began = time.perf_counter_ns()
            step()
            stepped = time.perf_counter_ns()
            allocate()
            ended = time.perf_counter_ns()
            print(json.dumps([ended, stepped - began, ended - stepped]), file=file, flush=True)


def pretend(seconds: float, steps: Path, gib: int) -> None:
    """The same words without a GPU."""
    if gib:
        print("running", flush=True)
        input()
        print(gib << 30, flush=True)
        input()
    else:
        note_steps(seconds, steps, lambda: time.sleep(0.002), lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--steps", type=Path, default=Path("/dev/null"))
    parser.add_argument("--copy", type=int, default=0, metavar="GIB")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if os.environ.get("GPU_CHECK_FAKE"):
        pretend(options.seconds, options.steps, options.copy)
    elif options.copy:
        copies(options.copy)
    else:
        train(options.seconds, options.steps, profile=options.profile)


if __name__ == "__main__":
    main()
