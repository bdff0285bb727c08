"""The allocator's history: what recording it costs, what a snapshot costs; a job out of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
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
        # As in_job/gpu_memory.py records it.
        memory._record_memory_history("all", context="alloc", stacks="python", max_entries=entries)
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
            bench.tell("read_without_executing", _reads_the_same(path, snapshot))
        memory._record_memory_history(None)
    bench.tell("entries_kept", entries_kept > 0)


def _reads_the_same(path: Path, snapshot: Mapping[str, Any]) -> bool:
    """Whether haiprof's reader sees as many segments, blocks and events as torch wrote."""
    from haiprof.trace_format.memory_snapshot import read_memory_snapshot

    found = read_memory_snapshot(path)
    segments = snapshot["segments"]
    events = sum(map(len, snapshot["device_traces"]))
    return (
        found.segments["size_bytes"].sum() == sum(s["total_size"] for s in segments)
        and found.blocks.height == sum(len(s["blocks"]) for s in segments)
        and found.events.height - events in (0, 1)  # the second snapshot notes the first
    )


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
    options = ("--memory-history", "on")
    job = run_job(
        bench, "out_of_memory", *words, "--size", bench.scale("1024", "32"), options=options
    )
    bench.tell("exit_status", job.returncode)
    bench.tell("traceback_is_torchs_own", "CUDA out of memory" in job.stderr)
    verdict = job.verdict()
    bench.tell("steps_recorded", (verdict["step_count"] or 0) > 0)
    bench.note("headline", verdict["headline"])
    bench.tell("explained", "out of GPU memory" in verdict["headline"])
    found = [memory["failed"] for memory in verdict["gpu_memory_at_end"]]
    bench.note("what it held", found)
    counts = ("requested_bytes", "limit_bytes", "allocated_bytes", "reserved_bytes",
              "largest_free_bytes")  # fmt: skip
    bench.tell("counted", bool(found) and all(found[0][name] is not None for name in counts))
    lines = [line for memory in verdict["gpu_memory_at_end"] for line, _ in memory["by_line"]]
    bench.tell("named_by_line", any(line is not None for line in lines))
    bench.keep(job.paths.root, "run-out-of-memory")
