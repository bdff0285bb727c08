"""The training loops that items time: one bound by launches, one by matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from benchmarks.gpu.device import Gpu

Step = Callable[[], Any]


def decoder(gpu: Gpu, *, layers: int, width: int = 256, tokens: int = 16) -> Step:
    """A small causal decoder on short sequences: every kernel is shorter than its launch."""
    torch = gpu.torch
    torch.manual_seed(0)
    nn = torch.nn
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(512, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, 512),
    ).to(gpu.device)
    codes = torch.randint(512, (2, tokens), device=gpu.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> Any:
        loss = nn.functional.cross_entropy(model(codes).flatten(0, 1), codes.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def products(gpu: Gpu, *, width: int, layers: int = 4, dtype: Any = None, rows: int = 0) -> Step:
    """Large linear layers: kernels of a ms, the device always behind."""
    torch = gpu.torch
    torch.manual_seed(0)
    dtype = dtype or torch.float32
    linear = [torch.nn.Linear(width, width, bias=False, dtype=dtype) for _ in range(layers)]
    model = torch.nn.Sequential(*linear).to(gpu.device)
    x = torch.randn(rows or width, width, dtype=dtype, device=gpu.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)

    def step() -> Any:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def timed(gpu: Gpu, step: Step, count: int) -> list[float]:
    """Microseconds of each step, the device awaited at the end of each."""
    marks = [time.perf_counter_ns()]
    for _ in range(count):
        step()
        gpu.torch.cuda.synchronize()
        marks.append(time.perf_counter_ns())
    return [(end - begin) / 1e3 for begin, end in pairwise(marks)]


def mean_us(gpu: Gpu, step: Step, count: int) -> float:
    """Microseconds of a step, the device awaited once: as a job runs."""
    gpu.torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(count):
        step()
    gpu.torch.cuda.synchronize()
    return (time.perf_counter_ns() - began) / 1e3 / count


def paired_ratio(base: list[float], other: list[float]) -> tuple[float, float]:
    """Median ratio of blocks that ran side by side, and its robust standard error."""
    ratios = [b / a for a, b in zip(base, other, strict=True)]
    middle = statistics.median(ratios)
    spread = statistics.median(abs(ratio - middle) for ratio in ratios)
    return middle, 1.48 * spread / len(ratios) ** 0.5
