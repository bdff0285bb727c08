"""Training as people do it, with haiprof and without: the same losses; NCCL's own record."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.device import Gpu, open_gpu
from benchmarks.gpu.recording import Job, run_job

WAYS = ("plain_net", "data_parallel", "sharded", "recomputed", "mixed")


def parity(bench: Bench) -> None:
    """DDP, FSDP2, checkpointing and mixed precision in one job: bare, recorded, and traced."""
    words = ("--steps", bench.scale("40", "10"), "--size", bench.scale("1024", "32"))
    bare = run_job(bench, "training", *words, options=None)
    job = run_job(bench, "training", *words, options=("--steps", "14:17"))
    bench.tell("exit_statuses_equal", bare.returncode == job.returncode == 0)
    if not bare.facts or not job.facts:
        bench.skip("differing_losses", f"no losses: {bare.stderr[-300:]} {job.stderr[-300:]}")
        return
    failed = {**bare.facts["failed"], **job.facts["failed"]}
    bench.note("ways that failed", failed)
    bench.tell("ways_that_ran", len(WAYS) - len(failed))
    pairs = [(bare.facts["losses"].get(way), job.facts["losses"].get(way)) for way in WAYS]
    bench.tell("differing_losses", sum(a != b for a, b in pairs))
    check_steps(bench, job)
    bench.tell("fresh_process_ratio", job.facts["step_us"] / bare.facts["step_us"])
    bench.keep(job.paths.root, "run-training")


def check_steps(bench: Bench, job: Job) -> None:
    """A recomputed forward is none, and a step that the scaler skipped is no step."""
    from haiprof import Analyzer

    analyzer, told = Analyzer(job.paths.root), job.facts
    spans = dict(analyzer.phases().group_by("phase").len().rows())
    steps, scaled = sum(told["steps"].values()), told["scaled"]
    bench.tell("forwards_invented", spans.get("forward", 0) - told["forwards"])
    bench.tell("optimizer_spans_invented", spans.get("optimizer", 0) - steps - scaled)
    bench.tell("steps_beyond_those_taken", analyzer.steps().height - steps)
    bench.note("steps", {"by way": told["steps"], "recorded": analyzer.steps().height})
    bench.note("headline", job.verdict()["headline"])
    bench.tell("traces", len(list(job.paths.traces.glob("rank*.pt.trace.json*"))))


def flight_recorder(bench: Bench) -> None:
    """Whether NCCL's Flight Recorder is on by default, what its status and its dump cost."""
    default = os.environ.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", None)
    bench.note("TORCH_NCCL_TRACE_BUFFER_SIZE of the session", default)
    gpu = open_gpu()
    distributed = gpu.torch.distributed
    store = distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    distributed.init_process_group(gpu.backend, store=store, rank=0, world_size=1)
    x = gpu.torch.ones(1024, device=gpu.device)
    count = bench.scale(2_200, 300)
    for _ in range(count):
        distributed.all_reduce(x)
    gpu.torch.cuda.synchronize()
    measure_dumps(bench, gpu)
    distributed.destroy_process_group()


def measure_dumps(bench: Bench, gpu: Gpu) -> None:
    """Through haiprof's own reader."""
    from torch._C import _distributed_c10d as c10d

    from haiprof.in_job.collectives import _DUMPS

    dumps = [getattr(c10d, name) for name in _DUMPS if hasattr(c10d, name)]
    bench.note("functions of this torch", [dump.__name__ for dump in dumps])
    contents = [json.loads(dump(includeCollectives=True, onlyActive=False)) for dump in dumps]
    entries = max((len(content.get("entries", [])) for content in contents), default=0)
    bench.tell("entries_by_default", entries)
    if not dumps:
        bench.skip("dump_ms", "this torch has no Flight Recorder")
        return
    whole = per_call_ms(lambda: [d(includeCollectives=True, onlyActive=False) for d in dumps], 5)
    status = per_call_ms(lambda: [d(includeCollectives=False) for d in dumps], 20)
    bench.tell("dump_ms", whole)
    bench.tell("status_us", status * 1e3)
    bench.keep_json("flight-recorder.json", contents)


def per_call_ms(call: Any, count: int) -> float:
    """Median."""
    took = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took)


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
