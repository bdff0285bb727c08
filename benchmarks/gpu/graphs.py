"""CUDA graphs beside haiprof: captured while it records, replayed in a window, and Inductor's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device import Gpu, open_gpu
from benchmarks.gpu.overhead import kernels_by_step, state_of
from benchmarks.gpu.recording import device_rows, hooked, lines_of, raw_traces, read_trace


class Graphed:
    """A training step that is captured once and replayed: forward and backward in the graph."""

    def __init__(self, gpu: Gpu, width: int) -> None:
        torch = gpu.torch
        torch.manual_seed(0)
        self._torch = torch
        layers = [torch.nn.Linear(width, width) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers).to(gpu.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.x = torch.randn(64, width, device=gpu.device)
        self.loss: Any = None
        self.graph: Any = None

    def eager(self) -> None:
        """One step without a graph."""
        self.optimizer.zero_grad(set_to_none=False)
        self.loss = self.model(self.x).square().mean()
        self.loss.backward()
        self.optimizer.step()

    def capture(self) -> None:
        """As torch.cuda.graphs' documentation has it: warmed up on a side stream, then captured."""
        cuda = self._torch.cuda
        side = cuda.Stream()
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            for _ in range(3):
                self.eager()
        cuda.current_stream().wait_stream(side)
        self.graph = cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=False)
        self.loss = None  # its graph would keep gradient nodes that belong to another stream
        with cuda.graph(self.graph):
            self.loss = self.model(self.x).square().mean()
            self.loss.backward()

    def replay(self) -> None:
        """One step of the graph, the optimizer's outside of it."""
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        self.graph.replay()
        self.optimizer.step()


def losses(gpu: Gpu, width: int, steps: int, within: Callable[[], Any]) -> list[str]:
    """Losses of a captured and replayed training, to the bit; `within` is around all of it."""
    found = []
    with within():
        job = Graphed(gpu, width)
        for _ in range(3):
            job.eager()
        job.capture()
        for _ in range(steps):
            job.replay()
            found.append(gpu.value(job.loss).hex())
    return found


def capture(bench: Bench) -> None:
    """Captured and replayed while haiprof records: the same losses, and no wrong device time."""
    import contextlib

    gpu = open_gpu()
    width, steps = bench.scale(1024, 32), bench.scale(60, 12)
    bare = losses(gpu, width, steps, contextlib.nullcontext)
    folder = bench.scratch / "run"
    recorded = losses(gpu, width, steps, lambda: hooked(folder))
    bench.tell("same_losses", bare == recorded)
    from haiprof.run_format.layout import RunPaths

    run = RunPaths(folder)
    bench.tell("hook_errors", len(lines_of(run, "hook_error")) + len(lines_of(run, "patch_failed")))
    rows = device_rows(run)
    bench.tell("device_records", len(rows))
    times = [row["interval_ns"] for row in rows if not math.isnan(row["interval_ns"])]
    bench.tell("impossible_times", sum(not 0 <= ns < 60e9 for ns in times))
    bench.note("records", rows[:8])


def window_after_capture(bench: Bench) -> None:
    """A graph is captured first; then a window over its replays."""
    gpu = open_gpu()
    job = Graphed(gpu, bench.scale(1024, 32))
    job.eager()
    job.capture()
    traced_replays(bench, gpu, job, "run")


def window_before_capture(bench: Bench) -> None:
    """A window, then the capture of a graph, then another window over its replays."""
    gpu = open_gpu()
    job = Graphed(gpu, bench.scale(1024, 32))
    with hooked(bench.scratch / "first", {"steps": [4, 6]}) as run:
        for _ in range(8):
            job.eager()
    bench.tell("first_window_state", state_of(run))
    job.capture()
    traced_replays(bench, gpu, job, "second")


def traced_replays(bench: Bench, gpu: Gpu, job: Graphed, name: str) -> None:
    """A window of three replays: it is there, and has the graph's kernels in every step."""
    with hooked(bench.scratch / name, {"steps": [4, 7]}) as run:
        for _ in range(12):
            job.replay()
        gpu.torch.cuda.synchronize()
    bench.tell("window_state", state_of(run))
    path = next(iter(raw_traces(run)), None)
    if path is None:
        bench.skip("replayed_steps_with_kernels", "no trace")
        return
    events = read_trace(path)["traceEvents"]
    by_step = kernels_by_step(events)
    bench.note("kernels by step", by_step)
    bench.tell("replayed_steps_with_kernels", sum(count >= 8 for count in by_step.values()))
    bench.tell("graph_launches", sum(e.get("name") == "cudaGraphLaunch" for e in events))
    bench.keep(path, f"graph-{name}.trace.json")


def reduce_overhead(bench: Bench) -> None:
    """torch.compile(mode="reduce-overhead") with haiprof from the start, and a window."""
    import contextlib

    gpu = open_gpu()
    bare = compiled_losses(bench, gpu, contextlib.nullcontext)
    folder = bench.scratch / "run"
    recorded = compiled_losses(bench, gpu, lambda: hooked(folder, {"steps": [12, 14]}))
    bench.tell("same_losses", bare == recorded)
    from haiprof.run_format.layout import RunPaths

    run = RunPaths(folder)
    bench.tell("window_state", state_of(run))
    bench.tell("hook_errors", len(lines_of(run, "hook_error")))
    path = next(iter(raw_traces(run)), None)
    if path is not None:
        by_step = kernels_by_step(read_trace(path)["traceEvents"])
        bench.tell("steps_with_kernels", sum(count > 0 for count in by_step.values()))


def compiled_losses(bench: Bench, gpu: Gpu, within: Callable[[], Any]) -> list[str]:
    """Losses of a compiled training, to the bit."""
    torch = gpu.torch
    width = bench.scale(512, 16)
    with within():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)]
        model = torch.nn.Sequential(*layers).to(gpu.device)
        compiled = gpu.compiled(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(64, width, device=gpu.device)
        found = []
        for _ in range(18):
            loss = compiled(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(gpu.value(loss).hex())
    return found
