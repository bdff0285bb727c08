"""What haiprof costs a step on a GPU: hooks, events, windows, and what a window leaves behind."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device import Gpu, open_gpu
from benchmarks.gpu.loops import Step, decoder, mean_us, paired_ratio, products
from benchmarks.gpu.recording import hooked, lines_of

BEFORE = 8  # steps of a block before its window
Way = Callable[[], float]


def launch_bound(bench: Bench) -> None:
    """The decoder: every us on the host is a us of the step."""
    gpu = open_gpu()
    step = decoder(gpu, layers=bench.scale(8, 1), width=bench.scale(256, 32))
    compare(bench, gpu, step, steps=bench.scale(60, 6), rounds=bench.scale(12, 3))


def product_bound(bench: Bench) -> None:
    """Large matrix products: the host is ahead, and what it does costs nothing."""
    gpu = open_gpu()
    step = products(gpu, width=bench.scale(8192, 64), dtype=gpu.torch.bfloat16)
    compare(bench, gpu, step, steps=bench.scale(30, 6), rounds=bench.scale(8, 3))


def compare(bench: Bench, gpu: Gpu, step: Step, *, steps: int, rounds: int) -> None:
    """Blocks of steps in turn: bare, recorded, in a window of haiprof's, under torch.profiler."""
    mean_us(gpu, step, 10)
    count = iter(range(1 << 30))

    def folder() -> Path:
        return bench.scratch / f"run-{next(count)}"

    def recorded(trace: dict[str, Any] | None) -> float:
        with hooked(folder(), trace):
            for _ in range(BEFORE):
                step()
            return mean_us(gpu, step, steps)

    window = {"steps": [BEFORE, BEFORE + steps + 1]}
    ways: dict[str, Way] = {
        "bare": lambda: mean_us(gpu, step, steps),
        "again": lambda: mean_us(gpu, step, steps),
        "default": lambda: recorded(None),
    }
    blocks: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            blocks[name].append(way())
    for name in ("again", "default"):
        ratio, spread = paired_ratio(blocks["bare"], blocks[name])
        bench.tell(f"{name}_ratio", ratio)
        bench.note(f"{name} ± on the ratio", spread)
    bench.tell("bare_us", statistics.median(blocks["bare"]))
    added = statistics.median(d - b for b, d in zip(blocks["bare"], blocks["default"], strict=True))
    bench.tell("default_added_us", added)
    bare = statistics.median(blocks["bare"])
    own = statistics.median(under_profiler(gpu, step, steps) for _ in range(3))
    bench.tell("profiler_ratio", own / bare)
    traced = statistics.median(recorded(window) for _ in range(3))
    bench.tell("window_ratio", traced / bare)
    bench.tell("window_against_profiler_ratio", traced / own)


def under_profiler(gpu: Gpu, step: Step, steps: int) -> float:
    """Us of a step under torch.profiler itself."""
    activity = gpu.torch.profiler.ProfilerActivity
    with gpu.torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profiler:
        for _ in range(2):
            step()
        took = mean_us(gpu, step, steps)
    del profiler
    return took


def after_window(bench: Bench) -> None:
    """Steps before a window against those after it, with whatever CUPTI leaves behind."""
    gpu = open_gpu()
    torch = gpu.torch
    count = bench.scale(500, 30)
    step = decoder(gpu, layers=bench.scale(6, 1), width=bench.scale(256, 32))
    mean_us(gpu, step, bench.scale(100, 5))
    before = block_times(gpu, step, count)
    with hooked(bench.scratch / "run", {"steps": [4, 9]}) as run:
        for _ in range(14):
            step()
        torch.cuda.synchronize()
    bench.tell("window_state", state_of(run))
    after = block_times(gpu, step, count)
    bench.tell("before_us", statistics.median(before))
    bench.tell("after_ratio", statistics.median(after) / statistics.median(before))
    bench.note("blocks before and after, us", [before, after])


def block_times(gpu: Gpu, step: Step, count: int) -> list[float]:
    """Mean us of ten blocks of steps."""
    return [mean_us(gpu, step, max(count // 10, 1)) for _ in range(10)]


def state_of(run: Any) -> str:
    """What became of the first window: `recorded`, or why not."""
    windows = lines_of(run, "trace_window")
    if not windows:
        return "no window"
    state, reason = windows[0]["state"], windows[0]["reason"]
    return str(state) if reason is None else f"{state}: {reason}"


def events(bench: Bench) -> None:
    """One event record, one query, and the pool's work for the four spans of a step."""
    gpu = open_gpu()
    cuda, count = gpu.torch.cuda, bench.scale(20_000, 500)
    for name, timing in (("timed", True), ("untimed", False)):
        marks = [cuda.Event(enable_timing=timing) for _ in range(64)]
        bench.tell(
            f"{name}_record_us", per_call_us(cuda, lambda n, m=marks: m[n % 64].record(), count)
        )
    reached = cuda.Event(enable_timing=True)
    reached.record()
    cuda.synchronize()
    bench.tell("query_us", per_call_us(cuda, lambda _: reached.query(), count))
    bench.tell("pool_step_us", pool_us(gpu, bench.scale(2_000, 100)))


def per_call_us(cuda: Any, call: Callable[[int], object], count: int) -> float:
    """Median over blocks of the host's time for one call."""
    took = []
    for _ in range(10):
        cuda.synchronize()
        began = time.perf_counter_ns()
        for number in range(count // 10):
            call(number)
        took.append((time.perf_counter_ns() - began) / 1e3 / (count // 10))
    return statistics.median(took)


def pool_us(gpu: Gpu, steps: int) -> float:
    """What haiprof's device timer takes for a step of dataloader, forward, backward, optimizer."""
    from haiprof.in_job.device import DeviceTimer
    from haiprof.run_format.schema import BACKWARD, DATA, FORWARD, OPTIMIZER

    records: list[bytes] = []
    timer = DeviceTimer(gpu.torch, records)

    def step(number: int) -> None:
        for kind in (DATA, FORWARD, BACKWARD, OPTIMIZER):
            end = timer.begin(kind)
            if end is not None:
                end()
        timer.close(number)

    step(0)
    return per_call_us(gpu.torch.cuda, step, steps)
