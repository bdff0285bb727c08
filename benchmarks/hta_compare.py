"""HTA beside haiprof on published traces: what each says, how long it takes, and how much memory.

    python -m venv /tmp/hta-venv && /tmp/hta-venv/bin/pip install traceinsight
    python benchmarks/hta_compare.py --hta-python /tmp/hta-venv/bin/python [FOLDER_OF_TRACES]

Every reader is a fresh process that loads a trace (a folder of ranks) and asks four questions; the
time is that of both, without imports; haiprof has no cache to begin with. A number is equal where
both agree to 0.1 % (ranks in sum). Where they do not, the defects of HTA are named that apply to
the trace (docs/hta-differences.md); tests/unit/analysis/trace/ holds haiprof's numbers to exact
arithmetic, and to HTA's on the events that HTA keeps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "shared" / "traces"
RESULT = Path(__file__).parent / "results" / "hta_compare.md"
QUESTIONS = ("idle", "compute", "overlap", "idle streams", "kernels")

OURS = """
import json, resource, sys, time
import polars as pl
from haiprof.trace_analysis.device_time import COMMUNICATION, with_kind
from haiprof import TraceAnalysis
found, before = {}, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
asked = TraceAnalysis(sys.argv[1])
temporal, overlap = asked.temporal_breakdown(), asked.overlap()
idle, kernels = asked.idle_time_breakdown(), asked.kernel_breakdown()
seconds = time.perf_counter() - start
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
us = lambda frame, name: frame[name].sum() / 1e3 if frame[name].count() else None
found["idle"], found["compute"] = us(temporal, "idle_ns"), us(temporal, "compute_ns")
found["overlap"] = overlap["overlap_ratio"].mean()
found["idle streams"], found["kernels"] = us(idle, "idle_ns"), us(kernels, "sum_ns")
why = set()
for trace in asked.traces.values():
    marks = trace.steps.height
    gpu = with_kind(trace.gpu)
    talk = gpu.filter(pl.col("kind") == COMMUNICATION)["name"].cast(pl.String)
    why |= {"D1"} if (trace.gpu["ts_ns"] % 1000 != 0).any() else set()
    why |= {"D20"} if marks > 1 else set()
    why |= {"D11"} if trace.sync.height else set()
    why |= {"D12"} if trace.gpu["device"].n_unique() > 1 else set()
    why |= {"D25"} if (~talk.str.contains("^nccl|ncclKernel")).any() else set()
    names = trace.gpu["name"].unique().cast(pl.String)
    why |= {"D13"} if names.str.contains("^hip|Sync|dma").any() else set()
    why |= {"D21"} if trace.gpu.is_empty() else set()
mb = sum(trace.report.text_bytes for trace in asked.traces.values()) / 1e6
print(json.dumps({"s": seconds, "mb": grown / 1024, "text_mb": mb, "why": sorted(why), **found}))
"""
HTA = """
import json, os, resource, sys, time, warnings
warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
found, before = {}, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
def ask(names, function):
    try:
        values = function()
    except Exception as error:
        values = [f"{type(error).__name__}"] * len(names)
    found.update(zip(names, values))
start = time.perf_counter()
try:
    path = sys.argv[1]
    files = [os.path.join(path, name) for name in sorted(os.listdir(path)) if ".json" in name]
    given = {"trace_files": {0: files[0]}} if len(files) == 1 else {"trace_dir": path}
    asked = TraceAnalysis(**given)
    ranks = sorted(asked.t.traces)
except Exception as error:
    print(json.dumps({"error": type(error).__name__}))
    raise SystemExit
column = lambda frame, name: float(frame[name].sum())
def temporal():
    frame = asked.get_temporal_breakdown(visualize=False)
    return column(frame, "idle_time(us)"), column(frame, "compute_time(us)")
ask(("idle", "compute"), temporal)
ask(("overlap",), lambda: [float(asked.get_comm_comp_overlap(visualize=False)
                                 ["comp_comm_overlap_pctg"].mean()) / 100])
ask(("idle streams",), lambda: [column(asked.get_idle_time_breakdown(
    ranks=ranks, visualize=False)[0], "idle_time")])
ask(("kernels",), lambda: [column(asked.get_gpu_kernel_breakdown(
    visualize=False, num_kernels=10**6, duration_ratio=1.0)[1], "sum (us)")])
usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
child = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print(json.dumps({"s": time.perf_counter() - start, "mb": (usage + child) / 1024, **found}))
"""


def asked(python: str, code: str, path: Path) -> dict[str, Any]:
    """What a reader said in a process of its own."""
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache) / "traces"
        folder.mkdir()
        for file in sorted(path.glob("*.json.gz")):
            (folder / file.name).symlink_to(file)
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(Path.cwd())}
        done = subprocess.run(
            [python, "-c", code, str(folder)], capture_output=True, text=True, env=environment,
            check=False,
        )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else {"error": done.stderr.strip().splitlines()[-1]}


def judged(ours: float | None, theirs: object, why: list[str]) -> str:
    """Equal, ours with the defects that apply, or what HTA ended with."""
    if isinstance(theirs, str):
        return f"HTA: {theirs}"
    if not isinstance(theirs, float) or theirs != theirs:
        return "both: none" if ours is None else f"HTA: none; {_number(ours)}"
    if ours is not None and abs(ours - theirs) <= 1e-3 * max(abs(ours), abs(theirs)) + 1e-4:
        return f"equal: {_number(ours)}"
    return f"{_number(ours)}, HTA {_number(theirs)} ({', '.join(why) or 'not known why'})"


def _number(value: float | None) -> str:
    if value is None:
        return "none"
    return f"{value:.4f}" if abs(value) < 2 else f"{value:,.1f}"


def row(path: Path, hta_python: str) -> str:
    """A trace's line of the table."""
    ours, theirs = asked(sys.executable, OURS, path), asked(hta_python, HTA, path)
    if "error" in ours:
        return f"| {path.name} | haiprof: {ours['error']} |" + " |" * 8
    if "error" in theirs:
        said = [f"HTA cannot load it; {_number(ours[name])}" for name in QUESTIONS]
        times, memory = f"{ours['s']:.2f} / -", f"{ours['mb']:.0f} / -"
        ratio = "-"
    else:
        said = [judged(ours[name], theirs[name], ours["why"]) for name in QUESTIONS]
        times = f"{ours['s']:.2f} / {theirs['s']:.2f}"
        memory = f"{ours['mb']:.0f} / {theirs['mb']:.0f}"
        ratio = f"{theirs['s'] / ours['s']:.1f}"
    cells = (path.name, f"{ours['text_mb']:.1f}", *said, times, ratio, memory)
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table and stores it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    parser.add_argument("--hta-python", required=True)
    given = parser.parse_args()
    heads = ("trace", "MB of JSON", "GPU idle, µs", "computing, µs", "overlap, ratio",
             "streams idle, µs", "kernels in sum, µs", "haiprof / HTA, s", "times as fast",
             "haiprof / HTA, MB of memory")  # fmt: skip
    lines = [
        "# HTA beside haiprof",
        "",
        f"Made by `benchmarks/hta_compare.py`; load of the machine {os.getloadavg()[0]:.1f} on "
        f"{os.cpu_count()} cores. Defects (Dn): docs/hta-differences.md.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    print("\n".join(lines))
    for path in sorted(given.folder.iterdir()):
        texts = list(path.glob("*.json.gz")) if path.is_dir() else []
        if texts and not path.name.endswith("_et"):
            lines.append(row(path, given.hta_python))
            print(lines[-1], flush=True)
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
