"""From a trace file to loaded frames: haiprof beside HTA, the JSON scanner and gunzip, on one core.

    python -m venv /tmp/hta-venv && /tmp/hta-venv/bin/pip install traceinsight
    python benchmarks/inflate.py TRACE /tmp/big 1 8
    python benchmarks/trace_load.py --hta-python /tmp/hta-venv/bin/python /tmp/big/*.json TRACE...

Every measurement is a fresh process on one core, with its imports done; haiprof's has no cache to
begin with and writes one. HTA is timed by its `TraceAnalysis(trace_files=...)` alone. Of the rounds
the fastest counts, for each reader its own: other work on the machine only ever adds; `CPU ratio`
is that of the processor's seconds, which other work hardly touches. Peak memory is what the process
grew by. `Python s` is haiprof without its compiled scanner, as where there is no compiler.
`computes` is the GPU time in which a kernel computes, by both.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import save

OURS = """
import json, resource, sys, time
import polars
from haiprof import TraceAnalysis
from haiprof.trace_format.kineto import load as native
assert native.is_compiled(), "the scanner was not built: python setup.py build_ext --inplace"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
analysis = TraceAnalysis(sys.argv[1])
trace = next(iter(analysis.traces.values()))
rows = trace.gpu.height + trace.ops.height + trace.runtime.height
loaded, cpu = time.perf_counter() - start, time.process_time() - cpu
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
compute = analysis.temporal_breakdown()["compute_ns"].sum() / 1e3
start = time.perf_counter()
TraceAnalysis(sys.argv[1]).temporal_breakdown()
warm = time.perf_counter() - start
print(json.dumps({"s": loaded, "cpu_s": cpu, "peak_bytes": grown * 1024, "compute_us": compute,
                  "warm_s": warm, "text_bytes": trace.report.text_bytes,
                  "events": trace.report.event_count}))
"""
PYTHON = OURS.replace("assert native", "native._compiled = None #")
HTA = """
import json, resource, sys, time, warnings
warnings.filterwarnings("ignore")
from hta.trace_analysis import TraceAnalysis
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start, cpu = time.perf_counter(), time.process_time()
analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
loaded, cpu = time.perf_counter() - start, time.process_time() - cpu
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
try:
    frame = analysis.get_temporal_breakdown(visualize=False)
    compute = float(frame["compute_time(us)"].sum())
except Exception as error:
    compute = type(error).__name__
print(json.dumps({"s": loaded, "cpu_s": cpu, "peak_bytes": grown * 1024, "compute_us": compute}))
"""
SCAN = """
import gzip, json, msgspec, sys, time, zlib
start = time.perf_counter()
data = open(sys.argv[1], "rb").read()
if data[:2] == b"\\x1f\\x8b":
    data = gzip.decompress(data)
unpacked = time.perf_counter() - start
start = time.perf_counter()
msgspec.json.decode(data, type=msgspec.Raw)
class Nothing(msgspec.Struct):
    pass
msgspec.json.decode(data, type=Nothing)
print(json.dumps({"read_s": unpacked, "scan_s": time.perf_counter() - start}))
"""


def measured(python: str, code: str, trace: Path, home: Path) -> dict[str, object]:
    """What one fresh process says, or why it failed."""
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        ["taskset", "-c", "0", python, "-c", code, str(trace)],
        env={**os.environ, "XDG_CACHE_HOME": str(home), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:120]}
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(trace: Path, hta_python: str | None, rounds: int) -> dict[str, object]:
    """One trace by every reader, the best of several rounds."""
    found = [one_round(trace, hta_python) for _ in range(rounds)]
    best: dict[str, object] = {"trace": f"{trace.parent.name}/{trace.name}"}
    for reader, duration in (("haiprof", "s"), ("python", "s"), ("hta", "s"), ("scan", "scan_s")):
        best[reader] = min((each[reader] for each in found), key=lambda said: said.get(duration, 0))
        said = [each[reader]["cpu_s"] for each in found if "cpu_s" in each[reader]]
        best[reader] |= {"cpu_s": min(said)} if said else {}
    return best


def one_round(trace: Path, hta_python: str | None) -> dict[str, dict]:
    """One trace by every reader once; a link in an empty folder, so that no cache is found."""
    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / "traces" / trace.name
        link.parent.mkdir()
        link.symlink_to(trace.resolve())
        home = Path(folder) / "cache"
        ours = measured(sys.executable, OURS, link, home)
        shutil.rmtree(home)
        python = measured(sys.executable, PYTHON, link, home)
        theirs = (
            measured(hta_python, HTA, trace.resolve(), home)
            if hta_python
            else {"error": "not asked"}
        )
        scan = measured(sys.executable, SCAN, trace, home)
    return {"haiprof": ours, "python": python, "hta": theirs, "scan": scan}


def line(found: dict[str, dict]) -> str:
    """One line of the table."""
    ours, theirs, scan = found["haiprof"], found["hta"], found["scan"]
    size = ours["text_bytes"]
    cells = [f"{size / 1e6:.1f}", f"{ours['s']:.2f}", f"{size / 1e6 / ours['s']:.0f}"]
    cells += [f"{ours['peak_bytes'] / size:.2f}", f"{ours['warm_s']:.3f}"]
    cells += [f"{found['python']['s']:.2f}"]
    if "error" in theirs:
        cells += ["-", "-", "-", "-", theirs["error"][:40]]
    else:
        compute = theirs["compute_us"]
        shown = compute if isinstance(compute, str) else f"{compute:.0f}"
        cells += [f"{theirs['s']:.2f}", f"{theirs['peak_bytes'] / size:.1f}"]
        cells += [f"x{theirs['s'] / ours['s']:.1f}", f"x{theirs['cpu_s'] / ours['cpu_s']:.1f}"]
        cells += [f"{ours['compute_us']:.0f} / {shown}"]
    cells += [f"{size / 1e6 / scan['scan_s']:.0f}", f"{size / 1e6 / scan['read_s']:.0f}"]
    return f"| {found['trace'][-44:]} | " + " | ".join(cells) + " |"


def main() -> None:
    """Prints the table, one line per trace."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--hta-python", help="a Python that has traceinsight")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(
        "| trace | MB of JSON | haiprof s | MB/s | peak B/B | warm s | Python s | HTA s | peak B/B"
        " | ratio | CPU ratio | computes us, haiprof / HTA | scan MB/s | read MB/s |\n|"
        + "---|"
        * 14
    )
    results = []
    for trace in options.traces:
        results.append(row(trace, options.hta_python, options.rounds))
        results[-1]["load_average"] = os.getloadavg()
        print(line(results[-1]), flush=True)  # type: ignore[arg-type]
        if options.json:
            save(options.json, {"rounds": options.rounds, "results": results})


if __name__ == "__main__":
    main()
