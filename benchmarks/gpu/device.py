"""The GPU that items work on: a real one through torch.cuda, or a simulated one in its place.

Items call torch.cuda as any program does. What a CPU cannot stand in for (tensors on "cuda", NCCL,
Inductor's CUDA graphs, pinned memory) is asked for here.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
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
        from benchmarks.gpu.synthetic import COPY

        with self.torch.profiler.record_function(COPY):
            return tensor.clone()

    def value(self, tensor: Any) -> float:
        """`.item()`: waits for the device."""
        if not self.fake:
            return float(tensor.item())
        from benchmarks.gpu.synthetic import WAIT

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
            from benchmarks.gpu.simulated import allocate

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
        from benchmarks.gpu import simulated

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
