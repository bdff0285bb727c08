"""GPM: what it shows of a load, and how often it may be read, also beside torch.profiler."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.driver import Machine, attempt, machine, row_of, sampler
from benchmarks.gpu.load import load


def gpm(bench: Bench) -> None:
    """GPM by the time between two samples; what a matrix product shows; beside a profiler."""
    from haiprof.agent.samplers.gpu import profiling_setting

    of = machine()
    bench.note("setting of the driver", profiling_setting(Path("/")))
    with load(seconds=60):
        time.sleep(bench.scale(1.0, 0.1))
        spacing = {
            apart: gpm_at(of, apart) for apart in bench.scale((0.02, 0.05, 0.1, 0.5), (0.1,))
        }
        bench.note("by s between samples", spacing)
        with sampler() as found:
            row_of(found)
            time.sleep(bench.scale(2.0, 0.15))
            busy = row_of(found)
            bench.note("missing", {name: why.reason for name, why in found.told.items()})
    for figure in ("sm_active_ratio", "tensor_active_ratio", "dram_active_ratio"):
        if busy[figure] is None:
            why = found.told.get(figure)
            bench.skip(figure, why.reason if why else "the driver gave no value")
        else:
            bench.tell(figure, busy[figure])
    with load("--profile", seconds=bench.scale(15, 3)):
        time.sleep(bench.scale(2.0, 0.1))
        beside = gpm_at(of, bench.scale(0.5, 0.1))
    bench.tell("beside_profiler", isinstance(beside, dict))
    bench.keep_json("gpm.json", {"spacing": spacing, "busy": busy, "beside profiler": beside})


def gpm_at(of: Machine, apart_s: float) -> object:
    """Three reads of GPM so far apart, without our own lower limit."""
    from haiprof.agent.samplers.gpu import RATIOS, Gpm

    ticks = iter(range(0, 10**12, 10**9))
    found = Gpm(of.device, tuple(RATIOS), clock=lambda: next(ticks))

    def read() -> object:
        found.open()
        rows = []
        for _ in range(3):
            time.sleep(apart_s)
            rows.append([str(v) if isinstance(v, Exception) else v for v in found.read()])
        return dict(zip(RATIOS, zip(*rows, strict=True), strict=True))

    try:
        return attempt(read)
    finally:
        found.close()
