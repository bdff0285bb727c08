"""Runs a script as a user of torch.profiler, or of py-spy, looks at it; stands beside the script.

    python profiled.py train.py           torch.profiler around steps 22 to 25 of each process
    python profiled.py --mark train.py    the file `started` is made after step 20
    python profiled.py --attach COMMAND   py-spy attaches to a command once that file is there

`key_averages` with Python stacks goes to key_averages-PID.json, py-spy's raw stacks to stacks.txt.
The bench's step_clock.tick, at the end of each step, stands for the user's own `profiler.step()`.
"""

import atexit
import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROWS, FRAMES, FIRST = 60, 12, 20
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


def profile():
    """What is called at the end of each step, as in PyTorch's recipe."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    verbose = torch._C._profiler._ExperimentalConfig(verbose=True)  # there is no stack else
    profiler = profile(
        activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose,
        schedule=schedule(wait=FIRST, warmup=2, active=3, repeat=1), on_trace_ready=write,
    )  # fmt: skip
    profiler.start()
    atexit.register(lambda: done or profiler.stop())
    return profiler.step


def mark():
    if len(done) <= FIRST:
        done.append(True)
        if len(done) == FIRST:
            (FOLDER / "started").touch()


def run(script, at_end):
    import step_clock

    tick = step_clock.tick

    def tick_too(*, end=True):
        at_end()
        return tick(end=end)

    step_clock.tick = tick_too
    runpy.run_path(script, run_name="__main__")


def attach(command):
    job = subprocess.Popen(command)
    while job.poll() is None and not (FOLDER / "started").exists():
        time.sleep(0.05)
    py_spy = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    line = [py_spy, "record", "--format", "raw", "--output", "stacks.txt", "--subprocesses"]
    spy = subprocess.Popen([*line, "--pid", str(job.pid)])
    status = job.wait()
    spy.wait()
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "--attach":
        attach(sys.argv[2:])
    script = sys.argv[-1]
    at_end = mark if sys.argv[1] == "--mark" else profile()
    sys.argv = [script]
    run(script, at_end)
