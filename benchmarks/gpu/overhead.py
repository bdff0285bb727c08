"""What haiprof costs a step on a GPU: hooks, events, windows, and what a window leaves behind."""

from __future__ import annotations

import bisect
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device import Gpu, Step, decoder, mean_us, open_gpu, paired_ratio, products
from benchmarks.gpu.recording import hooked, lines_of, raw_traces, read_trace

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


LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
Events = list[dict[str, Any]]


def device_time(bench: Bench) -> None:
    """Device time of spans of a ms and more, against the same spans as CUPTI saw them."""
    gpu = open_gpu()
    torch = gpu.torch
    width = bench.scale(8192, 256)
    a = torch.randn(width, width, device=gpu.device)
    timed_ms, cupti_ms = spans(bench, gpu, a)
    pairs = [(ours, cupti_ms[name]) for name, ours in timed_ms.items() if name in cupti_ms]
    bench.tell("spans", len(pairs))
    if not pairs:
        bench.skip("median_difference_ratio", "the profile has no span on the GPU")
        return
    differences = [abs(ours - theirs) / theirs for ours, theirs in pairs if theirs > 0]
    bench.tell("median_difference_ratio", statistics.median(differences))
    bench.tell("largest_difference_us", max(abs(o - t) for o, t in pairs) * 1e3)
    bench.note("ms by haiprof and by CUPTI", pairs[:40])


def spans(bench: Bench, gpu: Gpu, a: Any) -> tuple[dict[str, float], dict[str, float]]:
    """Ms of the same spans by name: by haiprof's device timer, and by CUPTI."""
    from haiprof.in_job.device import DeviceTimer
    from haiprof.run_format.schema import BACKWARD, DEVICE, FORWARD, OPTIMIZER

    torch, records = gpu.torch, []
    timer = DeviceTimer(torch, records)
    activity = torch.profiler.ProfilerActivity
    kinds = ((FORWARD, "forward", 2), (BACKWARD, "backward", 4), (OPTIMIZER, "optimizer", 1))
    count = bench.scale(20, 6)
    path = bench.scratch / "spans.json"
    with torch.profiler.profile(activities=[activity.CPU, activity.CUDA]) as profiler:
        for number in range(count + 2):
            for kind, name, length in kinds:
                end = timer.begin(kind)
                with torch.profiler.record_function(f"{name}#{number}"):
                    for _ in range(length):
                        torch.mm(a, a)
                if end is not None:
                    end()
            timer.close(number)
            torch.cuda.synchronize()
            time.sleep(0.0005)
    profiler.export_chrome_trace(str(path))
    found = [DEVICE.struct.unpack(record) for record in records]
    names = [column.name for column in DEVICE.columns]
    timed = {
        f"{name}#{row[0]}": row[names.index(f"{name}_ns")] / 1e6
        for row in found if row[0] > 0
        for _, name, _ in kinds
    }  # fmt: skip
    events = read_trace(path)["traceEvents"]
    seen = {e["name"]: e["dur"] / 1e3 for e in events if e.get("cat") == "gpu_user_annotation"}
    return timed, seen


# -- overlap ---------------------------------------------------------------------------------------


def overlap(bench: Bench) -> None:
    """Two streams that could run side by side, without our events between them and with."""
    gpu = open_gpu()
    cycles = 4_000_000
    alone = median_ms(gpu, cycles, streams=1, timer=None)
    bench.note("one stream, ms", alone)
    bare = median_ms(gpu, cycles, streams=2, timer=None) / alone
    bench.tell("bare_ratio", bare)
    from haiprof.in_job.device import DeviceTimer

    timer = DeviceTimer(gpu.torch, [])
    with_events = median_ms(gpu, cycles, streams=2, timer=timer) / alone
    bench.tell("recorded_ratio", with_events)
    bench.tell("recorded_against_bare_ratio", with_events / bare)


def median_ms(gpu: Gpu, cycles: int, *, streams: int, timer: Any) -> float:
    """Milliseconds until work that was queued in turns on so many streams is done."""
    from haiprof.run_format.schema import BACKWARD, FORWARD, OPTIMIZER

    cuda = gpu.torch.cuda
    others = [cuda.Stream() for _ in range(streams - 1)]
    took = []
    for number in range(12):
        cuda.synchronize()
        began = time.perf_counter_ns()
        for kind in (FORWARD, BACKWARD, OPTIMIZER):
            for stream in others:
                with cuda.stream(stream):
                    cuda._sleep(cycles // 3)
            end = None if timer is None else timer.begin(kind)
            cuda._sleep(cycles // 3)
            if end is not None:
                end()
        if timer is not None:
            timer.close(number)
        cuda.synchronize()
        took.append((time.perf_counter_ns() - began) / 1e6)
    return statistics.median(took[2:])


# -- kernels of a window ---------------------------------------------------------------------------


def first_kernels(bench: Bench) -> None:
    """A window of haiprof's: its kernels are all there, from the first one on."""
    gpu = open_gpu()
    torch = gpu.torch
    x = torch.zeros(1024, device=gpu.device)
    step = products(gpu, width=bench.scale(512, 32))

    def many() -> None:
        step()
        for _ in range(120):
            x.add_(1.0)

    with hooked(bench.scratch / "run", {"steps": [6, 10]}) as run:
        for _ in range(16):
            many()
        torch.cuda.synchronize()
    bench.tell("window_state", state_of(run))
    path = next(iter(raw_traces(run)), None)
    if path is None:
        bench.skip("first_step_ratio", "no trace")
        return
    events = read_trace(path)["traceEvents"]
    by_step = kernels_by_step(events)
    counts = [by_step[name] for name in sorted(by_step)]
    bench.note("kernels by step", by_step)
    bench.tell("steps_with_kernels", sum(count > 0 for count in counts))
    if counts and max(counts):
        bench.tell("first_step_ratio", counts[0] / statistics.median(counts))
    bench.tell("first_100_present_ratio", first_present(events))
    bench.keep(path, "window-of-four-steps.trace.json")


def kernels_by_step(events: Events) -> dict[str, int]:
    """Kernels whose launch lies in each ProfilerStep."""
    marks = [e for e in events if e.get("cat") == "user_annotation"
             and str(e["name"]).startswith("ProfilerStep#")]  # fmt: skip
    marks.sort(key=lambda e: e["ts"])
    starts = [float(e["ts"]) for e in marks]
    kernels = Counter(e["args"].get("correlation") for e in events if e.get("cat") == "kernel")
    found = {str(e["name"]): 0 for e in marks}
    for call in runtime_calls(events):
        at = bisect.bisect_right(starts, float(call["ts"])) - 1
        if at >= 0 and float(call["ts"]) < starts[at] + float(marks[at]["dur"]):
            found[str(marks[at]["name"])] += kernels.get(call["args"].get("correlation"), 0)
    return found


def runtime_calls(events: Events) -> Events:
    """Calls of the CUDA runtime and driver."""
    return [e for e in events if e.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in e]


def first_present(events: Events) -> float:
    """Of the first 100 launches in the window, the share whose kernel is in the trace too."""
    calls = [e for e in runtime_calls(events) if e["name"] in LAUNCHES]
    first = sorted(calls, key=lambda e: e["ts"])[:100]
    kernels = {e["args"].get("correlation") for e in events if e.get("cat") == "kernel"}
    there = sum(call["args"].get("correlation") in kernels for call in first)
    return there / len(first) if first else 0.0
