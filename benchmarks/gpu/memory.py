"""The allocator's history: what recording it costs, what a snapshot costs; a job out of memory."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device import Gpu, open_gpu
from benchmarks.gpu.recording import run_job


def history(bench: Bench) -> None:
    """Us per allocation with and without history; ms of a snapshot at 1,000 and 100,000 entries."""
    gpu = open_gpu()
    memory = gpu.torch.cuda.memory
    count = bench.scale(5_000, 200)
    bare = allocation_us(gpu, count)
    for entries, figure in ((1_000, "1k"), (bench.scale(100_000, 5_000), "100k")):
        memory._record_memory_history("all", stacks="python", max_entries=entries)
        recorded = allocation_us(gpu, count)
        allocation_us(gpu, entries)
        began = time.perf_counter()
        snapshot = memory._snapshot()
        bench.tell(f"snapshot_{figure}_ms", (time.perf_counter() - began) * 1e3)
        entries_kept = len(snapshot["device_traces"][0]) if snapshot["device_traces"] else 0
        bench.note(f"entries of the snapshot, {figure}", entries_kept)
        bench.tell(f"added_us_{figure}", recorded - bare)
        if figure == "1k":
            path = bench.scratch / "memory-snapshot.pickle"
            memory._dump_snapshot(str(path))
            bench.keep(path)
        memory._record_memory_history(None)
    bench.tell("entries_kept", entries_kept > 0)


def allocation_us(gpu: Gpu, count: int) -> float:
    """Microseconds of one allocation with its release, from the caching allocator."""
    took = []
    for _ in range(5):
        began = time.perf_counter_ns()
        for _ in range(max(count // 5, 1)):
            block: Any = gpu.block(4096)
            del block
        took.append((time.perf_counter_ns() - began) / 1e3 / max(count // 5, 1))
    return statistics.median(took)


def out_of_memory(bench: Bench) -> None:
    """A job that runs out of memory: its own end as without haiprof, and what haiprof says."""
    words = ("--steps", bench.scale("40", "12"), "--share", bench.scale("0.05", "0.001"))
    job = run_job(bench, "out_of_memory", *words, "--size", bench.scale("1024", "32"))
    bench.tell("exit_status", job.returncode)
    bench.tell("traceback_is_torchs_own", "CUDA out of memory" in job.stderr)
    verdict = job.verdict()
    bench.tell("steps_recorded", (verdict["step_count"] or 0) > 0)
    said = str(verdict).lower() + str(job.stderr.split("Traceback")[0]).lower()
    bench.tell("explained", "out of memory" in said)
    bench.note("headline", verdict["headline"])
    bench.keep(job.paths.root, "run-out-of-memory")
