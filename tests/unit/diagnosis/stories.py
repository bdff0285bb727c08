"""Runs with a known story: so many ms in each phase of each step, on each rank."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from haiprof import Analyzer
from haiprof.base.ledger import Ledger
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Finding, Verdict
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import GPU, HOST, PROCESS
from haiprof.run_format.writer import LineWriter, append_line
from tests.unit.analysis.recorded import row_of, spans_from, write_rank, write_records, write_run
from tests.unit.analysis.sampled import Stack, write_stacks

KINDS = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
START_NS = 10 * NS_PER_S
GAP_MS = 0.2
PhaseTimes = Callable[[int, int], tuple[float, float, float, float]]
"""(rank, step) to ms in dataloader, forward, backward, optimizer."""
BALANCED = (0.2, 5.0, 10.0, 2.0)


def write_story(
    root: Path,
    times: PhaseTimes,
    *,
    steps: int = 60,
    ranks: int = 1,
    gpu: float | Callable[[int], float] | None = None,
    cores: float | None = None,
    noise: float = 0.02,
    gap_ms: float | Callable[[int], float] = GAP_MS,
    after_ms: float = 0.0,
) -> Path:
    """A run with these phase times, each shaken by a few percent.

    `gap_ms` follows each phase and may be of the step, `after_ms` the last one; `gpu` (its
    utilization) may be of the sample.
    """
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
            now += int(after_ms * NS_PER_MS)
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
            row_of(GPU, time_ns=t, gpu=r, utilization_ratio=gpu(n) if callable(gpu) else gpu,
                   memory_used_bytes=1 << 30, memory_total_bytes=1 << 34, power_watts=90.0)
            for n, t in enumerate(samples)
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


def judged(root: Path) -> Verdict:
    """The verdict on a run that is written."""
    return diagnose(Analyzer(root))


def find(verdict: Verdict, rule: str) -> Finding:
    """The one finding of a rule."""
    (finding,) = [each for each in verdict.findings if each.rule == rule]
    return finding


def ledger_of(verdict: Verdict) -> Ledger:
    """The ledger of a run that has steps."""
    assert verdict.ledger is not None
    return verdict.ledger


def saved_ns(finding: Finding) -> float:
    """What the mean step is shorter by without it."""
    assert finding.gain is not None
    return finding.gain.step_ns - finding.gain.left_ns


def note(root: Path, rank: int, /, **line: object) -> None:
    """A line in the events of a rank."""
    append_line(RunPaths(root).rank(rank).events, line)


def report(root: Path, rank: int, **facts: object) -> None:
    """Other facts in the report of a rank."""
    path = RunPaths(root).rank(rank).report
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def counters(
    root: Path,
    of: Callable[[float, int], Mapping[str, float]],
    *,
    seconds: Sequence[float] = np.arange(-1, 40, 0.5).tolist(),
    ranks: int = 1,
    host: Callable[[float], Mapping[str, float]] | None = None,
) -> None:
    """Counters of each rank's process, as functions of time and rank, and of the host."""
    rows = [
        row_of(PROCESS, time_ns=START_NS + int(t * NS_PER_S), pid=100 + r, start_ticks=7,
               process_count=1, **{name: int(value) for name, value in of(t, r).items()})
        for t in seconds
        for r in range(ranks)
    ]  # fmt: skip
    node = RunPaths(root).node("node0")
    write_records(node.records("process"), PROCESS, rows)
    if host is not None:
        rows = [row_of(HOST, time_ns=START_NS + int(t * NS_PER_S), **host(t)) for t in seconds]
        write_records(node.records("host"), HOST, rows)


def placed(root: Path, rank: int = 0, cpus: str = "0-1", **more: object) -> None:
    """Where a rank may run."""
    line = {
        "type": "placement", "pid": 100 + rank, "start_ticks": 7, "allowed_cpus": cpus,
        "thread_count": 4, "cpu_nodes": [0], "memory_nodes": {"0": 500}, "gpu_node": None,
        "nics": [], **more,
    }  # fmt: skip
    append_line(RunPaths(root).node("node0").events, line)


def write_line(
    root: Path, rows: list[tuple[int, int, int, int]], lines: Sequence[dict[str, Any]] = ()
) -> None:
    """A run of one rank with these spans."""
    write_rank(write_run(root), spans_from(rows), lines=lines)


def plain_steps(
    count: int = 100,
    extra: Callable[[int, int], list[tuple[int, int]]] | None = None,
    kind: int = schema.GC,
) -> list[tuple[int, int, int, int]]:
    """Steps of 18 ms; `extra(step, now)` gives spans (start, length) of a kind after the step."""
    rows, now = [], START_NS
    for step in range(count):
        for phase, ms in zip(KINDS, BALANCED, strict=True):
            rows.append((phase, 0, now, now + int(ms * NS_PER_MS)))
            now += int((ms + 0.1) * NS_PER_MS)
        for start, length in extra(step, now) if extra else []:
            rows.append((kind, 2 if kind == schema.GC else 0, start, start + length))
            now = start + length + 1000
    return rows


def sample(
    run: RunFrames, at: Callable[[str, int], Stack], *, rank: int = 0
) -> list[tuple[int, Stack]]:
    """Samples of each span of a rank and of what lies between, one in 5 ms, by phase and step."""
    clock = run.files.ranks[0].report["clock"]
    wall = clock["wall_ns"] - clock["mono_ns"]
    found, last = [], 0
    for row in run.phases().filter(run.phases()["rank"] == rank).iter_rows(named=True):
        start, phase, step = row["start_ns"] - wall, row["phase"], row["step"]
        parts = [(start, start + row["duration_ns"], phase)]
        for begin, end, name in [(last, start, "other")] * bool(last) + parts:
            count = max(round((end - begin) / (5 * NS_PER_MS)), 1)
            for place in range(count):
                time = begin + (end - begin) * (2 * place + 1) // (2 * count)
                found.append((time // 1000 * 1000, at(name, step)))
        last = start + row["duration_ns"]
    return found


def write_samples(
    root: Path, at: Callable[[str, int], Stack], *, rank: int = 0, lock: str = ""
) -> None:
    """The stacks of a rank, from `sample`, and how it stood to the lock at each, in turn."""
    taken = sample(RunFrames(root), at, rank=rank)
    letters = (lock * len(taken))[: len(taken)]
    write_stacks(RunPaths(root).rank(rank).stacks, taken, lock=letters)


def write_collectives(
    root: Path, late_ms: Sequence[float], *, after: str = "backward", every: int = 1
) -> None:
    """One all-reduce in every Nth phase of a name, which each rank begins so late in it."""
    phases = RunFrames(root).phases()
    for rank, late in enumerate(late_ms):
        begins = phases.filter((phases["rank"] == rank) & (phases["phase"] == after))
        entries = [
            {
                "collective_seq_id": n + 1, "process_group": ["0", "default_pg"],
                "profiling_name": "gloo:all_reduce", "input_sizes": [[64]],
                "input_dtypes": ["Float"], "time_created_ns": begin + int(late * NS_PER_MS),
                "state": "completed",
            }
            for n, begin in enumerate(begins["start_ns"].to_list()[every - 1 :: every])
        ]  # fmt: skip
        wall_ns = int(str(phases["start_ns"].max()))
        dump = {"wall_ns": wall_ns, "groups": {}, "traces": [{"entries": entries}]}
        path = RunPaths(root).rank(rank).collectives(wall_ns)
        path.write_bytes(gzip.compress(json.dumps(dump).encode()))
