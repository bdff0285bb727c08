"""Runs with a known story: so many ms in each phase of each step, on each rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from haiprof import Analyzer
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import GPU, PROCESS
from haiprof.run_format.writer import LineWriter
from tests.unit.analysis.recorded import row_of, spans_from, write_rank, write_records, write_run

KINDS = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
START_NS = 10 * NS_PER_S
GAP_MS = 0.2
PhaseTimes = Callable[[int, int], tuple[float, float, float, float]]
"""(rank, step) to ms in dataloader, forward, backward, optimizer."""


def write_story(
    root: Path,
    times: PhaseTimes,
    *,
    steps: int = 60,
    ranks: int = 1,
    gpu: float | None = None,
    cores: float | None = None,
    noise: float = 0.02,
    gap_ms: float | Callable[[int], float] = GAP_MS,
) -> Path:
    """A run with these phase times, each shaken by a few percent; `gap_ms` may be of the step."""
    run = write_run(root)
    random = np.random.default_rng(7)
    end_ns = START_NS
    for rank in range(ranks):
        rows, now = [], START_NS
        for step in range(steps):
            gap_ns = int((gap_ms(step) if callable(gap_ms) else gap_ms) * NS_PER_MS)
            for kind, ms in zip(KINDS, times(rank, step), strict=True):
                length = int(ms * NS_PER_MS * (1 + noise * random.standard_normal()))
                if length > 0:
                    rows.append((kind, 0, now, now + length))
                    now += length + gap_ns
        uuid = f"GPU-{rank}" if gpu is not None else None
        device = "cpu" if gpu is None else "cuda"
        cost = {"type": "cost", "event_count": 240, "event_ns": 1_000, "elapsed_ns": now - START_NS}
        facts: dict[str, Any] = {"gpu_uuid": uuid, "device": device, "world_size": ranks}
        write_rank(run, spans_from(rows), rank=rank, lines=[cost], **facts)
        end_ns = max(end_ns, now)
    node = run.node("node0")
    samples = np.linspace(START_NS, end_ns, 40).astype(int).tolist()
    if gpu is not None:
        rows_gpu = [
            row_of(GPU, time_ns=t, gpu=r, utilization_ratio=gpu, memory_used_bytes=1 << 30,
                   memory_total_bytes=1 << 34, power_watts=90.0)
            for t in samples
            for r in range(ranks)
        ]  # fmt: skip
        gpus = [{"key": [r], "name": f"gpu {r}", "uuid": f"GPU-{r}"} for r in range(ranks)]
        write_records(node.records("gpu"), GPU, rows_gpu, entities=gpus)
    if cores is not None:
        rows_cpu = [
            row_of(PROCESS, time_ns=t, pid=100 + r, start_ticks=7, process_count=1,
                   cpu_ns=int(cores * t), cpu_main_ns=int(cores * t), memory_rss_bytes=1 << 30,
                   read_bytes=0, write_bytes=0, thread_count=5)
            for t in samples
            for r in range(ranks)
        ]  # fmt: skip
        write_records(node.records("process"), PROCESS, rows_cpu)
    node.root.mkdir(parents=True, exist_ok=True)
    events = LineWriter(node.events)
    events.append({"type": "cost", "time_ns": end_ns, "cpu_ns": 5, "elapsed_ns": 1_000})
    if gpu is None:
        events.append({"type": "counter_missing", "source": "gpu", "reason": "no NVML"})
    events.close()
    return root


def write_beside(root: Path, ms: float, *, steps: int, kind: int = schema.SAVE) -> None:
    """A job that began before that of a story, in the same run and without a rank either.

    What is in the story's place of rank 0 becomes its second attempt. The first one forwards for so
    many ms, and every tenth step has a pause of that kind, ten times as long.
    """
    run, rows, now = RunPaths(root), [], START_NS
    run.rank(0).root.rename(run.rank(0, 1).root)
    report = json.loads(run.rank(0, 1).report.read_text())
    run.rank(0, 1).report.write_text(json.dumps({**report, "attempt": 1, "pid": 900}))
    for step in range(steps):
        spans = [(schema.FORWARD, ms), (schema.BACKWARD, 2.0), (schema.OPTIMIZER, 1.0)]
        for each, length in spans if step % 10 else [(kind, 10 * ms), *spans]:
            rows.append((each, 0, now, now + int(length * NS_PER_MS)))
            now += int((length + GAP_MS) * NS_PER_MS)
    write_rank(run, spans_from(rows))


def verdict_of(root: Path, times: PhaseTimes, **options: float | int | None) -> Verdict:
    """The verdict on such a run."""
    return diagnose(Analyzer(write_story(root, times, **options)))  # type: ignore[arg-type]
