"""Runs a script with torch.profiler around its steps, as PyTorch's recipe has it; stands beside it.

    python profiled.py train.py

Steps 20 to 50 of each process, with Python stacks; `key_averages` goes to key_averages-PID.json.
The bench's step_clock.tick, at the end of each step, stands for the user's own `profiler.step()`.
"""

import atexit
import json
import os
import runpy
import sys
from pathlib import Path

import step_clock
import torch
from torch.profiler import ProfilerActivity, profile, schedule

ROWS, FRAMES = 60, 12
FOLDER = Path.cwd()
done = []


def write(profiler):
    if not done:
        done.append(True)
        rows = profiler.key_averages(group_by_stack_n=FRAMES)
        total_us = sum(row.self_cpu_time_total for row in rows) or 1
        rows = sorted(rows, key=lambda row: -row.self_cpu_time_total)[:ROWS]
        kept = [
            {"name": row.key, "self_cpu_ratio": round(row.self_cpu_time_total / total_us, 4),
             "self_cpu_ms": round(row.self_cpu_time_total / 1e3, 3), "calls": row.count,
             "stack": [frame for frame in row.stack if frame]}
            for row in rows
        ]  # fmt: skip
        path = FOLDER / f"key_averages-{os.getpid()}.json"
        path.write_text(json.dumps(kept), encoding="utf-8")


verbose = torch._C._profiler._ExperimentalConfig(verbose=True)  # key_averages has no stack else
profiler = profile(
    activities=[ProfilerActivity.CPU], schedule=schedule(wait=20, warmup=2, active=30, repeat=1),
    with_stack=True, experimental_config=verbose, on_trace_ready=write,
)  # fmt: skip
tick = step_clock.tick


def tick_and_step(*, end=True):
    profiler.step()
    return tick(end=end)


step_clock.tick = tick_and_step
profiler.start()
atexit.register(lambda: done or profiler.stop())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
