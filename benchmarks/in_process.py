"""What the hook and a trace window cost: blocks of steps in one process, shuffled in each round.

    python benchmarks/in_process.py --rounds 9 --json benchmarks/results/in_process.json
    python benchmarks/in_process.py --loops mlp --ways bare hook --rounds 100 [--cpu-time]

The hook is compared with the bare loop, and steps before a window that never comes with the hook
alone; inside a window of haiprof's, steps are compared with those inside `torch.profiler.profile`
with the same options on the bare loop. The stall is what the training thread stands still for at
the window's end, with the files written. There is neither sampler nor launcher. `--cpu-time` counts
the training thread's CPU time, for machines on which others run, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.compare import against, interleaved, save, table
from benchmarks.gpu.recording import hooked, read_trace
from benchmarks.loop import stepper, timed

BEFORE = 8  # steps of a block before its window
LENGTH = {"mlp": 60, "transformer": 8}
SETS = {"plain": (), "stacks": ("stacks",), "shapes and stacks": ("stacks", "shapes")}
TORCH_NAMES = {"stacks": "with_stack", "shapes": "record_shapes"}
NEVER = 10**9
PAIRS = (
    ("bare", "hook"), ("hook", "hook, window to come"),
    *((f"torch.profiler, {name}", f"haiprof, {name}") for name in SETS),
    ("haiprof, plain", "haiprof, execution trace"),
)  # fmt: skip
WAYS = tuple(dict.fromkeys(way for pair in PAIRS for way in pair))
Block = dict[str, float]


def block(step: Callable[[], None], length: int, clock: Callable[[], int], way: str) -> Block:
    """A block of steps in one of the ways."""
    tool, _, what = way.partition(", ")
    window: dict[str, Any] = {"steps": [BEFORE, BEFORE + length]}
    if tool == "torch.profiler":
        return under_torch(step, length, clock, SETS[what])
    if what == "window to come":
        window = {"steps": [NEVER, NEVER + 1]}
    window |= {"execution_trace": True} if what == "execution trace" else {}
    window |= dict.fromkeys(SETS.get(what, ()), True)
    count = BEFORE + length + 2
    with tempfile.TemporaryDirectory() as folder:
        if tool == "bare":
            return judged(timed(step, count, clock=clock), length)
        with hooked(Path(folder), window if what else None) as run:
            times = timed(step, count, clock=clock)
        found = judged(times, length)
        for path in run.trace_parts.glob("*.part.json"):
            sidecar = json.loads(path.read_text())
            stop_ms, export_ms = sidecar["stop_ns"] / 1e6, sidecar["export_ns"] / 1e6
            found |= {"stop_ms": stop_ms, "export_ms": export_ms, "stall_ms": stop_ms + export_ms}
            found |= first_step(path.with_name(f"{sidecar['stem']}.trace.json"))
    return found


def judged(times_ns: list[int], length: int) -> Block:
    """The median step of those that a window holds."""
    return {"step_us": statistics.median(times_ns[BEFORE + 1 : BEFORE + length]) / 1e3}


def under_torch(
    step: Callable[[], None], length: int, clock: Callable[[], int], what: tuple[str, ...]
) -> Block:
    """torch.profiler around the bare loop, its schedule as in its documentation."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "trace.json")
        times, ends = [], []
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            schedule=torch.profiler.schedule(wait=BEFORE - 1, warmup=1, active=length, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
            **{TORCH_NAMES[name]: True for name in what},
        ) as profiler:
            for _ in range(BEFORE + length):
                times += timed(step, 1, clock=clock)
                ends += timed(profiler.step, 1, clock=clock)
    both = [sum(pair) for pair in zip(times, ends, strict=True)]  # ours marks steps too
    return {**judged(both, length), "stall_ms": ends[-1] / 1e6}


def first_step(path: Path) -> Block:
    """The first recorded step against the median of the others."""
    marks = [e for e in read_trace(path)["traceEvents"]
             if e.get("name", "").startswith("ProfilerStep#")]  # fmt: skip
    lengths = [e["dur"] for e in sorted(marks, key=lambda e: e["ts"])]
    return {"first_ratio": lengths[0] / statistics.median(lengths[1:])}


def compare(kind: str, options: argparse.Namespace) -> dict[str, object]:
    """Every way of one loop; prints the tables."""
    step, length = stepper(kind), LENGTH[kind]
    timed(step, 20)
    clock = time.thread_time_ns if options.cpu_time else time.perf_counter_ns
    ways: dict[str, Callable[[], object]] = {
        way: partial(block, step, length, clock, way) for way in options.ways
    }
    results = interleaved(ways, options.rounds)
    content: dict[str, object] = {"runs": results}
    steps = {way: [run["step_us"] for run in runs] for way, runs in results.items()}
    rows = [against(steps[base], steps[way], f"{way} against {base}")
            for base, way in PAIRS if {base, way} <= steps.keys()]  # fmt: skip
    print(table(rows, title=f"{kind}: median step of a block", unit="us"))
    content["rows"] = [asdict(row) for row in rows]
    for way, runs in results.items():
        kept = {k for run in runs for k in run} - {"step_us"}
        line = {k: statistics.median(run[k] for run in runs if k in run) for k in sorted(kept)}
        if line:
            print(f"{way}: " + ", ".join(f"{k} {v:.2f}" for k, v in line.items()))
            content[way] = line
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--loops", nargs="+", default=sorted(LENGTH), choices=sorted(LENGTH))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--cpu-time", action="store_true", help="of the training thread")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    content: dict[str, object] = {"load_average": os.getloadavg()}
    for kind in options.loops:
        content[kind] = compare(kind, options)
    if options.json:
        save(options.json, content)


if __name__ == "__main__":
    main()
