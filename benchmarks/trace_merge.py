"""Merging traces beside `zcat | gzip -1` of the same files: rate, and peak memory.

    python benchmarks/inflate.py TRACE /tmp/big 2 COPIES      # such as two of 300 MB
    gzip -1 /tmp/big/*.json
    python benchmarks/trace_merge.py /tmp/big/*.json.gz

Each measurement is a process of its own, on all cores that it may use, in turns; of the rounds the
fastest counts, for each its own: other work on the machine only ever adds. `cpu_s`, which other
work hardly changes, is the processor time of all processes of the measurement. `merge` takes wall
clocks as they are (one pass); `merge_clocks` compares them by collectives first, with no cache of
the traces to begin with. Megabytes are of unpacked text. Peak memory is of the whole process, and
of the largest that it started.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

from compare import save

MERGE = """
import json, resource, sys
from pathlib import Path
from haiprof.trace_analysis.merge import MergeOptions, merge_traces
options = MergeOptions(by_collectives=sys.argv[2] == "collectives", force=True)
report = merge_traces([Path(p) for p in sys.argv[3:]], Path(sys.argv[1]), options)
who = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
print(json.dumps({"events": report.merged.event_count,
                  "peak_bytes": resource.getrusage(who[0]).ru_maxrss * 1024,
                  "worker_peak_bytes": resource.getrusage(who[1]).ru_maxrss * 1024}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+", help="one per rank, gzip")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write the result as JSON")
    arguments = parser.parse_args()
    text_bytes = sum(map(unpacked_bytes, arguments.traces))
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for name, run in (("zcat_gzip", piped), ("merge", merged), ("merge_clocks", aligned)):
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                row = run(arguments.traces, Path(folder))
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                row["cpu_s"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
                if row["s"] < found.get(name, {"s": float("inf")})["s"]:
                    found[name] = row
    for row in found.values():
        row["mb_per_s"] = round(text_bytes / 1e6 / row["s"], 1)
    for name in ("merge", "merge_clocks"):
        for unit in ("s", "cpu_s"):
            found[name][f"{unit}_ratio"] = round(found[name][unit] / found["zcat_gzip"][unit], 2)
    result = {"text_bytes": text_bytes, "load": os.getloadavg()[0], **found}
    print(json.dumps(result, indent=1))
    if arguments.save:
        save(arguments.save, result)


def unpacked_bytes(path: Path) -> int:
    """Of one file, counted in pieces."""
    unpacker, count = zlib.decompressobj(wbits=31), 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += len(unpacker.decompress(block))
    return count


def piped(traces: list[Path], folder: Path) -> dict[str, float]:
    """What must be done at least: unpack and pack."""
    start_s = time.perf_counter()
    with open(folder / "plain.gz", "wb") as target:
        unpack = subprocess.Popen(["zcat", *map(str, traces)], stdout=subprocess.PIPE)
        subprocess.run(["gzip", "-1"], stdin=unpack.stdout, stdout=target, check=True)
        unpack.wait()
    return {"s": time.perf_counter() - start_s}


def merged(traces: list[Path], folder: Path) -> dict[str, float]:
    """One pass."""
    return measured(traces, folder, "wall")


def aligned(traces: list[Path], folder: Path) -> dict[str, float]:
    """With a reading of the collectives before it, and no cache."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return measured(traces, folder, "collectives")


def measured(traces: list[Path], folder: Path, clocks: str) -> dict[str, float]:
    """A fresh process that merges; its start and imports count."""
    command = [sys.executable, "-c", MERGE, str(folder / "merged.json.gz"), clocks]
    root = str(Path(__file__).parents[1])
    start_s = time.perf_counter()
    done = subprocess.run(
        [*command, *map(str, traces)],
        env={**os.environ, "PYTHONPATH": root, "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    return {"s": time.perf_counter() - start_s, **json.loads(done.stdout)}


if __name__ == "__main__":
    main()
