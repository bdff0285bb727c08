"""What a trace window costs: inside it against torch.profiler's own, outside it against none.

    python benchmarks/window.py --rounds 5 --json benchmarks/results/window.json

All ways run in one process, in blocks that are shuffled in each round. Inside, a step of haiprof's
window is compared with a step of `torch.profiler.profile` with the same options on the bare loop.
Outside, steps before a window that never comes are compared with haiprof without one. The stall is
what the training thread stands still for at the end, with the files written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from compare import against, interleaved, save, table
from loop import stepper, timed

from haiprof.in_job.installer import Installer
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.windows.driver import attach
from haiprof.run_format.layout import RunPaths

BEFORE = 8  # steps of a block before its window
LENGTH = {"mlp": 60, "transformer": 8}
SETS = {"plain": (), "stacks": ("stacks",), "shapes and stacks": ("stacks", "shapes")}
TORCH_NAMES = {"stacks": "with_stack", "shapes": "record_shapes"}
NEVER = 10**9


def bare_torch(step: Callable[[], None], length: int, what: tuple[str, ...]) -> dict[str, float]:
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
                times += timed(step, 1)
                ends += timed(profiler.step, 1)
    both = [sum(pair) / 1e3 for pair in zip(times, ends, strict=True)]  # ours marks steps too
    return {"step_us": statistics.median(both[BEFORE + 1 : -1]), "stall_ms": ends[-1] / 1e6}


def haiprof(step: Callable[[], None], length: int, config: dict[str, object]) -> dict[str, float]:
    """A block with the hook in, and a window where `config` says one."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunPaths(Path(folder))
        run.ranks.mkdir()
        recorder = Recorder(run, time_s=0.0, warmup_s=0.0)
        installer = Installer(recorder)
        installer.install()
        if config:
            attach(config, recorder=recorder, state=installer.state)
        times = timed(step, BEFORE + length + 2)
        recorder.finish()
        content = {"step_us": statistics.median(times[BEFORE + 1 : BEFORE + length]) / 1e3}
        for path in run.trace_parts.glob("*.part.json"):
            sidecar = json.loads(path.read_text())
            content["stall_ms"] = (sidecar["stop_ns"] + sidecar["export_ns"]) / 1e6
            content["stop_ms"] = sidecar["stop_ns"] / 1e6
            content["export_ms"] = sidecar["export_ns"] / 1e6
            content |= first_step(path.with_name(f"{sidecar['stem']}.trace.json"))
    return content


def first_step(path: Path) -> dict[str, float]:
    """The first recorded step against the median of the others."""
    events = json.loads(path.read_text())["traceEvents"]
    marks = [e for e in events if e.get("name", "").startswith("ProfilerStep#")]
    lengths = [e["dur"] for e in sorted(marks, key=lambda e: e["ts"])]
    return {"first_ratio": lengths[0] / statistics.median(lengths[1:])}


def compare(kind: str, rounds: int) -> dict[str, object]:
    """Every way of one loop; prints the tables."""
    step, length = stepper(kind), LENGTH[kind]
    timed(step, 20)
    window = {"steps": [BEFORE, BEFORE + length]}
    ways: dict[str, Callable[[], object]] = {
        "hook": lambda: haiprof(step, length, {}),
        "hook, window to come": lambda: haiprof(step, length, {"steps": [NEVER, NEVER + 1]}),
    }
    for name, what in SETS.items():
        chosen = {**window, **dict.fromkeys(what, True)}
        ways[f"torch.profiler, {name}"] = lambda what=what: bare_torch(step, length, what)  # type: ignore[misc]
        ways[f"haiprof, {name}"] = lambda chosen=chosen: haiprof(step, length, chosen)  # type: ignore[misc]
    traced = {**window, "execution_trace": True}
    ways["haiprof, plain, execution trace"] = lambda: haiprof(step, length, traced)
    results = interleaved(ways, rounds)
    content: dict[str, object] = {"runs": results}
    steps = {way: [run["step_us"] for run in runs] for way, runs in results.items()}
    rows = [against(steps["hook"], steps["hook, window to come"], "outside: window to come")]
    for name in SETS:
        pair = steps[f"torch.profiler, {name}"], steps[f"haiprof, {name}"]
        rows.append(against(*pair, f"inside, {name}: haiprof against torch.profiler"))
    pair = steps["haiprof, plain"], steps["haiprof, plain, execution trace"]
    rows.append(against(*pair, "inside: execution trace against none"))
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
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    content: dict[str, object] = {"load_average": os.getloadavg()}
    for kind in options.loops:
        content[kind] = compare(kind, options.rounds)
    if options.json:
        save(options.json, content)


if __name__ == "__main__":
    main()
