"""How long a diagnosis takes, and in how much memory: one hour on 8 ranks, and 1,024 ranks.

    python benchmarks/diagnose_scale.py
    python benchmarks/diagnose_scale.py --ranks 1024 --steps 3600 --step-ms 1000
    python benchmarks/diagnose_scale.py --deaths

With `--deaths` one rank raises and NCCL's watchdog ends the others: each rank leaves PyTorch's dump
of 2,000 collectives with stacks. Run directories are made up: four spans per step, one slow rank,
counters of ranks and nodes once a second, eight ranks per node. Each diagnosis is a process of its
own, timed from its start; the seconds after the imports stand beside that.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from haiprof.run_format import schema
from haiprof.run_format.clock import ClockAnchor
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest, write_manifest
from haiprof.run_format.tables import HOST, PROCESS
from haiprof.run_format.writer import LineWriter, RecordWriter, write_json

RESULTS = Path(__file__).parent / "results" / "diagnose_scale.json"
DEATH_RESULTS = RESULTS.with_name("death_scale.json")
CLOCK = ClockAnchor(1_700_000_000_000_000_000, 1_000)
START_NS = 10 * 10**9
PER_NODE = 8
KINDS = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
SHARES = (0.02, 0.28, 0.6, 0.06)  # the rest is between the phases
SLOW_RANK = 5
COLLECTIVES = 2_000
FRAMES = 12
CASES = ((8, 36_000, 100.0), (1024, 1_000, 1_000.0), (1024, 3_600, 1_000.0))
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


def write_rank(run: RunPaths, rank: int, steps: int, step_ns: float) -> None:
    """Spans of one rank; the slow one takes longer in forward, and the others wait in backward."""
    random = np.random.default_rng(rank)
    shares = np.array(SHARES)[None, :] * (1 + 0.01 * random.standard_normal((steps, 4)))
    if rank == SLOW_RANK:
        shares[:, 1] += 0.2
        shares[:, 2] -= 0.2
    length = (shares * step_ns).astype(np.int64)
    gap = int(step_ns * (1 - sum(SHARES)) / 4)
    ends = START_NS + np.cumsum((length + gap).reshape(-1)) - gap
    starts = ends - length.reshape(-1)
    words = np.empty((len(ends), 2), dtype="<i8")
    words[:, 0] = starts << schema.TAG_BITS | np.tile(np.array(KINDS), steps)
    words[:, 1] = ends << schema.TAG_BITS
    paths = run.rank(rank)
    paths.root.mkdir(parents=True)
    report = {
        "version": schema.SCHEMA_VERSION, "rank": rank, "attempt": 0, "world_size": 0,
        "local_rank": rank % PER_NODE, "pid": 1000 + rank % PER_NODE, "start_ticks": 7,
        "host": f"node{rank // PER_NODE:03d}", "torch": "2.13", "device": "cpu", "gpu_uuid": None,
        "clock": {"wall_ns": CLOCK.wall_ns, "mono_ns": CLOCK.mono_ns},
        "phases": dict.fromkeys(("dataloader", "forward", "backward", "optimizer"), "ok"),
    }  # fmt: skip
    paths.report.write_text(json.dumps(report), encoding="utf-8")
    writer = RecordWriter(paths.phases, schema.PHASES, clock=CLOCK, extra={"rank": rank})
    writer.append(words.tobytes())
    writer.close()
    events = LineWriter(paths.events)
    events.append({"type": "root", "tag": 0, "name": "GPT", "family": 0})
    events.append({"type": "optimizer", "tag": 0, "name": "AdamW"})
    events.close()


def records(table: schema.Table, rows: int, values: dict[str, np.ndarray]) -> bytes:
    """Records of a table, null where nothing is given."""
    kinds = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
    array = np.zeros(rows, dtype=[(c.name, kinds[c.type]) for c in table.columns])
    for column in table.columns:
        null = schema.NULL_I64 if column.type == "i64" else np.nan
        array[column.name] = values.get(column.name, null)
    return array.tobytes()


def write_node(run: RunPaths, node: int, ranks: int, seconds: int) -> None:
    """Counters of one node and its ranks, once a second."""
    paths = run.node(f"node{node:03d}")
    paths.root.mkdir(parents=True)
    LineWriter(paths.events).append({"type": "counter_missing", "source": "gpu", "reason": "none"})
    time_ns = START_NS + np.arange(seconds, dtype=np.int64) * 10**9
    host = {
        "time_ns": time_ns, "read_ns": np.full(seconds, 5), "cpu_count": np.full(seconds, 64),
        "cpu_user_ns": time_ns * 20, "cpu_idle_ns": time_ns * 44,
    }  # fmt: skip
    writer = RecordWriter(paths.records("host"), HOST, clock=CLOCK, extra={})
    writer.append(records(HOST, seconds, host))
    writer.close()
    each = np.repeat(time_ns, ranks)
    pid = np.tile(np.arange(1000, 1000 + ranks), seconds)
    process = {
        "time_ns": each, "read_ns": np.full(len(each), 5), "pid": pid,
        "start_ticks": np.full(len(each), 7), "process_count": np.full(len(each), 1),
        "cpu_ns": each * 2, "cpu_main_ns": each, "run_queue_wait_ns": each // 100,
        "memory_rss_bytes": np.full(len(each), 4 << 30), "read_bytes": each // 1000,
    }  # fmt: skip
    writer = RecordWriter(paths.records("process"), PROCESS, clock=CLOCK, extra={})
    writer.append(records(PROCESS, len(each), process))
    writer.close()


def write_run(root: Path, ranks: int, steps: int, step_ms: float) -> None:
    """A whole run directory."""
    root.mkdir(parents=True)
    run = RunPaths(root)
    manifest = Manifest(
        haiprof_version="0", name="made up", command=["train.py"], start_wall_ns=CLOCK.wall_ns
    )
    write_manifest(run, manifest)
    for rank in range(ranks):
        write_rank(run, rank, steps, step_ms * 1e6)
    for node in range((ranks + PER_NODE - 1) // PER_NODE):
        write_node(run, node, min(PER_NODE, ranks), int(steps * step_ms / 1e3))


def write_death(run: RunPaths, ranks: int, end_ns: int) -> None:
    """One rank raises, and the others are aborted by NCCL's watchdog, each with its dump."""
    run.flight.mkdir()
    frames = [
        {
            "name": f"forward_{n}",
            "filename": f"/opt/torch/nn/modules/module_{n}.py",
            "line": 100 + n,
        }
        for n in range(FRAMES)
    ]
    for rank in range(ranks):
        node = run.node(f"node{rank // PER_NODE:03d}")
        wall_ns = CLOCK.wall_ns + end_ns + (0 if rank == SLOW_RANK else 25 * 10**9)
        events = LineWriter(node.events)
        status = {"status": 1, "signal": None} if rank == SLOW_RANK else {"signal": 6}
        events.append({
            "type": "process_end", "pid": 1000 + rank % PER_NODE, "rank": rank, "parent": 1,
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
    host, pid = f"node{SLOW_RANK // PER_NODE:03d}", 1000 + SLOW_RANK % PER_NODE
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


def measure(ranks: int, steps: int, step_ms: float, *, death: bool = False) -> dict[str, object]:
    """One case, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "run"
        write_run(root, ranks, steps, step_ms)
        if death:
            write_death(RunPaths(root), ranks, START_NS + int(steps * step_ms * 1e6))
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        load = os.getloadavg()[0]
        began = time.perf_counter()
        line = [sys.executable, "-c", PROBE, str(root)]
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        whole = time.perf_counter() - began
    result = {
        "ranks": ranks, "steps": steps, "step_ms": step_ms, "run_bytes": size, "load": load,
        "process_s": whole, **json.loads(done.stdout),
    }  # fmt: skip
    print(
        f"{ranks} ranks, {steps} steps of {step_ms:g} ms ({size / 1e6:.0f} MB): diagnosis "
        f"{result['diagnose_s']:.2f} s ({result['diagnose_cpu_s']:.2f} s of CPU), process "
        f"{whole:.2f} s, peak "
        f"{float(str(result['peak_bytes'])) / 1e6:.0f} MB, load {load:.1f}: {result['headline']}",
        flush=True,
    )
    return result


def main() -> None:
    """Measures the usual cases, or the one named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=3_600)
    parser.add_argument("--step-ms", type=float, default=1_000.0)
    parser.add_argument("--deaths", action="store_true")
    options = parser.parse_args()
    if options.ranks:
        measure(options.ranks, options.steps, options.step_ms)
        return
    if options.deaths:
        results = [measure(ranks, 1_000, 100.0, death=True) for ranks in (8, 1024)]
        DEATH_RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        return
    results = [measure(*case) for case in CASES]
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
