"""A training loop on the GPU that tells what each step took; the load of `gpu_questions.py`.

    python benchmarks/gpu_load.py SECONDS [--steps FILE] [--copy GIB] [--profile]

FILE gets a line of JSON per step: end in CLOCK_MONOTONIC ns, the step's ns, and the ns of a
cuMemAlloc with its cuMemFree, which wait for the driver's lock that NVML calls hold.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import time
from pathlib import Path

import torch

ALLOCATED_BYTES = 64 << 20


def copied(gib: int) -> None:
    """Copies so much from pinned host memory, when told to."""
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


def trained(seconds: float, steps: Path, profile: bool) -> None:
    """Trains a small network for so long."""
    layers = [torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    driver = ctypes.CDLL("libcuda.so.1")
    for _ in range(5):
        one_step(model, optimizer, x, driver)
    print("running", flush=True)
    profiler = torch.profiler.profile() if profile else contextlib.nullcontext()
    with steps.open("w") as file, profiler:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            print(json.dumps(one_step(model, optimizer, x, driver)), file=file, flush=True)


def one_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, driver: ctypes.CDLL
) -> tuple[int, int, int]:
    """End, duration, and duration of an allocation from the driver, in ns."""
    began = time.perf_counter_ns()
    optimizer.zero_grad()
    model(x).float().sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    stepped = time.perf_counter_ns()
    block = ctypes.c_uint64()
    driver.cuMemAlloc_v2(ctypes.byref(block), ctypes.c_size_t(ALLOCATED_BYTES))
    driver.cuMemFree_v2(block)
    ended = time.perf_counter_ns()
    return ended, stepped - began, ended - stepped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seconds", type=float)
    parser.add_argument("--steps", type=Path, default=Path("/dev/null"))
    parser.add_argument("--copy", type=int, default=0, metavar="GIB")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.copy:
        copied(options.copy)
    else:
        trained(options.seconds, options.steps, options.profile)


if __name__ == "__main__":
    main()
