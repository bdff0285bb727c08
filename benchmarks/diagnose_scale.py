"""How long a diagnosis takes, and in how much memory: one hour on 8 ranks, and 1,024 ranks.

    python benchmarks/diagnose_scale.py
    python benchmarks/diagnose_scale.py --ranks 1024 --steps 3600 --seconds 3600
    python benchmarks/diagnose_scale.py --deaths
    python benchmarks/diagnose_scale.py --ranks 1024 --steps 300 --seconds 300 --command "report ."
    python benchmarks/diagnose_scale.py --ranks 1024 --steps 1000 --seconds 1000 --command "ls .."
    python benchmarks/diagnose_scale.py --sweep --label after

With `--deaths` one rank raises and NCCL's watchdog ends the others: each rank leaves PyTorch's dump
of 2,000 collectives with stacks. Run directories are made up (tests/unit/report/many_ranks.py),
with counters once a second. Each diagnosis is a process of its own, timed from its start; the
seconds after the imports stand beside that. With `--command` that command of haiprof is timed in
place of the diagnosis, in the run's folder, with the processor time and peak memory of its process.
`--sweep` and what follows it is `scale_sweep.py`: 64 to 1,024 ranks, 1 to 24 hours.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.writer import LineWriter, write_json
from tests.unit.analysis.recorded import CLOCK
from tests.unit.report.many_ranks import SLOW_RANK, write_many

PER_NODE = 8
COLLECTIVES = 2_000
FRAMES = 12
CASES = ((8, 36_000, 3_600), (1024, 1_000, 1_000), (1024, 3_600, 3_600))
PROBE = """
import json, resource, sys, time
started = time.perf_counter()
from haiprof import Analyzer
from haiprof.diagnosis.engine import diagnose
imported = time.perf_counter()
before = time.process_time()
verdict = diagnose(Analyzer(sys.argv[1]))
ended = time.perf_counter()
print(json.dumps({"import_s": imported - started, "diagnose_s": ended - imported,
    "diagnose_cpu_s": time.process_time() - before,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "headline": verdict.headline, "findings": [f.rule for f in verdict.findings]}))
"""


def write_death(run: RunPaths, ranks: int, end_ns: int) -> None:
    """One rank raises, and the others are aborted by NCCL's watchdog, each with its dump."""
    run.flight.mkdir()
    frames: list[dict[str, object]] = [
        {
            "name": f"forward_{n}",
            "filename": f"/opt/torch/nn/modules/module_{n}.py",
            "line": 100 + n,
        }
        for n in range(FRAMES)
    ]
    for rank in range(ranks):
        node = run.node(f"node{rank // PER_NODE:04d}")
        wall_ns = CLOCK.wall_ns + end_ns + (0 if rank == SLOW_RANK else 25 * 10**9)
        events = LineWriter(node.events)
        status = {"status": 1, "signal": None} if rank == SLOW_RANK else {"signal": 6}
        events.append({
            "type": "process_end", "pid": 100 + rank, "rank": rank, "parent": 1,
            "wall_ns": wall_ns, **status,
        })  # fmt: skip
        events.close()
        count = COLLECTIVES - (rank == SLOW_RANK)
        entries = [_collective(number, frames) for number in range(1, count + 1)]
        dump = {"version": "2.10", "pg_config": {}, "entries": entries}
        (run.flight / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    run.uncaught.mkdir()
    error = {"type": "RuntimeError", "message": "bad sample 17", "frames": [], "source": ""}
    ended = {"how": "exception", "thread": None, "wall_ns": CLOCK.wall_ns + end_ns - 1,
             "errors": [error]}  # fmt: skip
    host, pid = f"node{SLOW_RANK // PER_NODE:04d}", 100 + SLOW_RANK
    write_json(
        run.uncaught_file(host, pid),
        {"host": host, "pid": pid, "rank": SLOW_RANK, "restart": 0, "ended": [ended]},
        below=run.root,
    )
    manifest = read_manifest(run)
    end_wall_ns = CLOCK.wall_ns + end_ns + 30 * 10**9
    write_manifest(run, replace(manifest, end_wall_ns=end_wall_ns, exit_status=1))


def _collective(number: int, frames: list[dict[str, object]]) -> dict[str, object]:
    """An entry as NCCL's Flight Recorder writes it; stacks that are the same are one object."""
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False,
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "frames": list(frames),
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4096, 4096]],
        "input_dtypes": ["BFloat16"], "output_sizes": [[4096, 4096]], "retired": True,
        "output_dtypes": ["BFloat16"], "state": "completed", "timeout_ms": 600_000,
        "time_created_ns": CLOCK.wall_ns + number * 10**6, "duration_ms": 1.0,
        "time_discovered_started_ns": CLOCK.wall_ns + number * 10**6 + 10,
        "time_discovered_completed_ns": CLOCK.wall_ns + number * 10**6 + 90,
    }  # fmt: skip


def measure_command(root: Path, command: str) -> None:
    """A command of haiprof, in a fresh process."""
    line = [sys.executable, "-m", "haiprof", *shlex.split(command)]
    began = time.perf_counter()
    subprocess.run(line, check=True, capture_output=True, cwd=root)
    whole = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"haiprof {command}: {whole:.2f} s, {used.ru_utime + used.ru_stime:.2f} s of CPU, peak"
        f" {used.ru_maxrss * 1024 / 1e6:.0f} MB, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def measure(
    ranks: int, steps: int, seconds: int, *, death: bool = False, command: str | None = None
) -> None:
    """One case, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        write_many(root, ranks=ranks, steps=steps, per_host=PER_NODE, samples=seconds)
        if death:
            write_death(RunPaths(root), ranks, seconds * 10**9)
        if command is not None:
            measure_command(root, command)
            return
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        load = os.getloadavg()[0]
        began = time.perf_counter()
        line = [sys.executable, "-c", PROBE, str(root)]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        whole = time.perf_counter() - began
    found = json.loads(done.stdout)
    print(
        f"{ranks} ranks, {steps} steps ({size / 1e6:.0f} MB): diagnosis {found['diagnose_s']:.2f} s"
        f" ({found['diagnose_cpu_s']:.2f} s of CPU), process {whole:.2f} s, peak"
        f" {found['peak_bytes'] / 1e6:.0f} MB, load {load:.1f}: {found['headline']}",
        flush=True,
    )


def main() -> None:
    """Measures the usual cases, or the one named."""
    if "--sweep" in sys.argv:
        from benchmarks.scale_sweep import main as sweep

        sweep([word for word in sys.argv[1:] if word != "--sweep"])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=3_600)
    parser.add_argument("--seconds", type=int, default=3_600, help="of counters, one each")
    parser.add_argument("--deaths", action="store_true")
    parser.add_argument("--command", help="of haiprof, such as `report .`; in place of a diagnosis")
    options = parser.parse_args()
    cases = [(options.ranks, options.steps, options.seconds)] if options.ranks else CASES
    if options.deaths:
        cases = [(ranks, 1_000, 100) for ranks in ([options.ranks] if options.ranks else (8, 1024))]
    for case in cases:
        measure(*case, death=options.deaths, command=options.command)


if __name__ == "__main__":
    main()
