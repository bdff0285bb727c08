"""How reading traces scales: gzip, two processes, eight ranks, a warm cache, a large file.

    python benchmarks/inflate.py TRACE /tmp/ranks 8 2
    python benchmarks/inflate.py TRACE /tmp/large 1 58
    python benchmarks/trace_scale.py /tmp/ranks --large /tmp/large/rank-0.json

Every measurement is a fresh process with an empty cache, unless it says warm; rounds are shuffled
and the best of each is shown, since other work on the machine only ever adds. `one core` is held
to by taskset. A command is a whole process, with its imports and its output.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import interleaved, save

LOAD = """
import json, os, resource, sys, time
from pathlib import Path
import polars
from haiprof.trace_analysis.pool import LocalProcesses, Serial
from haiprof.trace_format.kineto.events import TABLES
def load(trace):
    return sum(getattr(trace, table).height for table in TABLES)
if __name__ == "__main__":
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pool = LocalProcesses(int(sys.argv[1])) if sys.argv[1] != "0" else Serial()
    start = time.perf_counter()
    rows = sum(pool.map(load, [Path(path) for path in sys.argv[2:]], {}))
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"s": seconds, "rows": rows, "peak_bytes": peak * 1024,
                      "grown_bytes": (peak - before) * 1024}))
"""
REPORT = """
import json, subprocess, sys, time
start = time.perf_counter()
subprocess.run([sys.executable, "-m", "haiprof", "trace-report", sys.argv[1]], check=True,
               capture_output=True)
print(json.dumps({"s": time.perf_counter() - start}))
"""
ANSWER = """
import json, sys, time
from haiprof.trace_analysis.report import standard_report
start = time.perf_counter()
standard_report(sys.argv[1])
print(json.dumps({"s": time.perf_counter() - start}))
"""
GUNZIP = """
import json, sys, time, zlib
data = open(sys.argv[1], "rb").read()
start = time.perf_counter()
zlib.decompress(data, wbits=31)
print(json.dumps({"s": time.perf_counter() - start}))
"""


def fresh(code: str, *arguments: object, cores: str = "", home: Path | None = None) -> dict:
    """What a fresh process says; links in an empty folder, so that no cache is found."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "measure.py"
        script.write_text(code)
        cache = home or Path(folder) / "cache"
        pinned = ["taskset", "-c", cores] if cores else []
        done = subprocess.run(
            [*pinned, sys.executable, str(script), *map(str, arguments)],
            env={**os.environ, "XDG_CACHE_HOME": str(cache)},
            capture_output=True,
            text=True,
            check=True,
        )
    found: dict = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=Path, help="folder of at least two ranks, plain JSON")
    parser.add_argument("--large", type=Path, help="one large trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    paths = sorted(options.ranks.glob("*.json"))
    options.ranks.chmod(0o500)  # so that caches go to a folder that is emptied
    with tempfile.TemporaryDirectory() as folder:
        packed = Path(folder) / "read-only" / f"{paths[0].name}.gz"
        packed.parent.mkdir()
        packed.write_bytes(gzip.compress(paths[0].read_bytes(), 6))
        packed.parent.chmod(0o500)
        home = Path(folder) / "warm"
        fresh(REPORT, options.ranks, home=home)
        ways = {
            "plain, one core": lambda: fresh(LOAD, 0, paths[0], cores="0"),
            "gzip, one core": lambda: fresh(LOAD, 0, packed, cores="0"),
            "gunzip alone": lambda: fresh(GUNZIP, packed, cores="0"),
            "warm cache, one core": lambda: fresh(LOAD, 0, paths[0], cores="0", home=home),
            "eight files, one process": lambda: fresh(LOAD, 1, *paths, cores="0,1"),
            "eight files, two processes": lambda: fresh(LOAD, 2, *paths),
            "command trace-report": lambda: fresh(REPORT, options.ranks),
            "report of all ranks, warm": lambda: fresh(ANSWER, options.ranks, home=home),
            "command trace-report, warm": lambda: fresh(REPORT, options.ranks, home=home),
        }
        results = interleaved(ways, options.rounds)
    if options.large:
        options.large.parent.chmod(0o500)
        results["large file"] = [fresh(LOAD, 0, options.large)]
    sizes = {name: paths[0].stat().st_size for name in results}
    for name in ("eight files, one process", "eight files, two processes", "command trace-report",
                 "report of all ranks, warm", "command trace-report, warm"):  # fmt: skip
        sizes[name] = sum(path.stat().st_size for path in paths)
    if options.large:
        sizes["large file"] = options.large.stat().st_size
    show(results, sizes)
    options.ranks.chmod(0o700)
    if options.json:
        save(
            options.json,
            {
                "load_average": os.getloadavg(),
                "rounds": options.rounds,
                "sizes": sizes,
                "results": results,
            },
        )


def show(results: dict[str, list[dict]], sizes: dict[str, int]) -> None:
    """A line per way."""
    print("| | MB of JSON | s | MB/s | peak MB | grown by, B/B |\n|" + "---|" * 6)
    for name, found in results.items():
        best = min(found, key=lambda each: each["s"])
        size = sizes[name]
        cells = [f"{size / 1e6:.0f}", f"{best['s']:.3f}", f"{size / 1e6 / best['s']:.0f}"]
        if best.get("grown_bytes"):  # of one process; the parent of several says nothing
            cells += [f"{best['peak_bytes'] / 1e6:.0f}", f"{best['grown_bytes'] / size:.2f}"]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
