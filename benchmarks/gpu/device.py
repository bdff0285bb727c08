"""The GPU that items work on: a real one through torch.cuda, or a simulated one in its place.

Items call torch.cuda as any program does. What a CPU cannot stand in for (tensors on "cuda", NCCL,
Inductor's CUDA graphs, pinned memory) is asked for here.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

FAKE_VARIABLE = "GPU_CHECK_FAKE"


def is_fake() -> bool:
    """Whether the GPU is simulated."""
    return bool(os.environ.get(FAKE_VARIABLE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The first GPU."""

    torch: Any
    device: str
    """Where tensors are put."""
    backend: str
    """Of torch.distributed."""
    fake: bool

    def copy(self, tensor: Any) -> Any:
        """A tensor of the host on the device; asynchronous where its memory is pinned."""
        if not self.fake:
            return tensor.to(self.device, non_blocking=tensor.is_pinned())
        from tests.simulated.trace import COPY

        with self.torch.profiler.record_function(COPY):
            return tensor.clone()

    def value(self, tensor: Any) -> float:
        """`.item()`: waits for the device."""
        if not self.fake:
            return float(tensor.item())
        from tests.simulated.trace import WAIT

        with self.torch.profiler.record_function(WAIT):
            return float(tensor.item())

    def compiled(self, model: Any) -> Any:
        """torch.compile with CUDA graphs."""
        if self.fake:
            return self.torch.compile(model, backend="eager")
        return self.torch.compile(model, mode="reduce-overhead")

    def block(self, size_bytes: int) -> object:
        """Memory of the device, taken."""
        if self.fake:
            from tests.simulated.gpu import allocate

            return allocate(size_bytes)
        return self.torch.empty(size_bytes, dtype=self.torch.uint8, device=self.device)

    def scaler(self) -> Any:
        """A GradScaler for float16."""
        return self.torch.amp.GradScaler("cpu" if self.fake else "cuda", init_scale=2.0**10)

    @property
    def half(self) -> Any:
        """What autocast computes in; CPUs have no float16 products worth waiting for."""
        return self.torch.bfloat16 if self.fake else self.torch.float16


def open_gpu() -> Gpu:
    """Imports torch and starts CUDA, or the simulation of it."""
    import torch

    if is_fake():
        from tests.simulated import gpu as simulated

        torch.set_num_threads(1)
        if torch.cuda.Event is not simulated.SimulatedEvent:
            simulated.install(torch)
        return Gpu(torch=torch, device="cpu", backend="gloo", fake=True)
    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no GPU")
    torch.cuda.init()
    return Gpu(torch=torch, device="cuda", backend="nccl", fake=False)


def busy_wait(seconds: float) -> None:
    """Host work: Python that never lets go of the interpreter."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(200))


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
