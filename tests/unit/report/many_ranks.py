"""A run directory of very many ranks, written fast: one rank slow, one that drifts, one spike."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from haiprof.base.units import NS_PER_S
from haiprof.run_analysis.nesting import Spans
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import GPU, HOST, PROCESS
from haiprof.run_format.writer import RecordWriter
from tests.unit.analysis.recorded import CLOCK, write_rank, write_run

KINDS = (schema.DATA, schema.FORWARD, schema.BACKWARD, schema.OPTIMIZER)
USUAL_MS = (4.0, 30.0, 60.0, 6.0)
START_NS = 10 * NS_PER_S
GAP_NS = 200_000
SLOW_RANK, DRIFTING_RANK, SPIKE_STEP = 5, 2, 0.6
_SAMPLES = 40
_SEED = 11


def write_many(
    root: Path,
    *,
    ranks: int,
    steps: int,
    per_host: int = 8,
    samples: int = _SAMPLES,
    host: str = "node",
    longer: float = 1.0,
) -> Path:
    """A run whose rank 5 is slow in forward, and whose rank 2 waits for data more and more.

    Its steps take 0.1 s, or `longer` times as much.
    """
    run = write_run(root, name="many")
    random = np.random.default_rng(_SEED)
    end_ns = START_NS
    for rank in range(ranks):
        spans = _spans(rank, steps, random, longer)
        end_ns = max(end_ns, int(spans.end_ns[-1]))
        name = f"{host}{rank // per_host:04d}"
        facts: dict[str, Any] = {
            "host": name, "local_rank": rank % per_host, "world_size": ranks, "device": "cuda",
            "gpu_uuid": f"GPU-{rank}",
        }  # fmt: skip
        cost = {"type": "cost", "event_count": 4 * steps, "event_ns": 1000, "elapsed_ns": end_ns}
        write_rank(run, spans, rank=rank, lines=[cost], **facts)
    times = np.linspace(START_NS, end_ns, samples).astype(np.int64)
    for first in range(0, ranks, per_host):
        here = range(first, min(first + per_host, ranks))
        _write_node(run, f"{host}{first // per_host:04d}", here, times, random)
    return root


def _spans(rank: int, steps: int, random: np.random.Generator, longer: float) -> Spans:
    ms = np.array(USUAL_MS) * (1 + 0.02 * random.standard_normal((steps, 4)))
    if rank == SLOW_RANK:
        ms[:, 1] *= 2
    if rank == DRIFTING_RANK:
        ms[:, 0] += np.linspace(0, 60, steps)
    ms[int(SPIKE_STEP * steps)] *= 5
    length = np.maximum(ms * longer * 1e6, 1).astype(np.int64).ravel()
    ends = START_NS + np.cumsum(length + GAP_NS)
    kinds = np.tile(np.array(KINDS, dtype=np.int8), steps)
    return Spans(
        kind=kinds, tag=np.zeros(len(kinds), dtype=np.int8), start_ns=ends - length, end_ns=ends
    )


def _write_node(
    run: RunPaths,
    host: str,
    ranks: range,
    times: npt.NDArray[np.int64],
    random: np.random.Generator,
) -> None:
    node = run.node(host)
    node.root.mkdir(parents=True)
    passed = times - times[0]
    cpu = {name: (passed * share).astype(np.int64) for name, share in
           (("cpu_user_ns", 4.0), ("cpu_idle_ns", 12.0), ("cpu_system_ns", 0.3))}  # fmt: skip
    known = {column.name for column in HOST.columns}
    host_rows = _table(HOST, times, {k: v for k, v in cpu.items() if k in known} | {
        "memory_total_bytes": 1 << 40, "memory_available_bytes": 1 << 39,
    })  # fmt: skip
    _write(node.records("host"), HOST, [host_rows])
    processes, gpus = [], []
    for rank in ranks:
        processes.append(_table(PROCESS, times, {
            "pid": 100 + rank, "start_ticks": 7, "process_count": 1, "cpu_ns": passed,
            "cpu_main_ns": passed, "memory_rss_bytes": (20 << 30) + passed // 1000,
            "read_bytes": passed // 100, "write_bytes": 0, "thread_count": 9,
            "run_queue_wait_ns": passed // 50,
        }))  # fmt: skip
        gpus.append(_table(GPU, times, {
            "gpu": rank % len(ranks), "memory_used_bytes": 60 << 30,
            "utilization_ratio": 0.9 + 0.02 * random.standard_normal(len(times)),
            "memory_total_bytes": 80 << 30, "sm_clock_hz": 1_755_000_000,
            "power_watts": 500 + 20 * random.standard_normal(len(times)),
        }))  # fmt: skip
    _write(node.records("process"), PROCESS, processes)
    entities = [{"key": [r % len(ranks)], "name": f"gpu {r % len(ranks)}", "uuid": f"GPU-{r}"}
                for r in ranks]  # fmt: skip
    _write(node.records("gpu"), GPU, gpus, entities=entities)
    node.events.write_text(
        json.dumps({"type": "cost", "time_ns": int(times[-1]), "cpu_ns": 5, "elapsed_ns": 1000})
        + "\n",
        encoding="utf-8",
    )


def _dtype(table: schema.Table) -> np.dtype[Any]:
    codes = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
    return np.dtype([(column.name, codes[column.type]) for column in table.columns])


def _table(
    table: schema.Table, times: npt.NDArray[np.int64], values: dict[str, Any]
) -> npt.NDArray[Any]:
    rows = np.empty(len(times), dtype=_dtype(table))
    for column in table.columns:
        missing = np.nan if column.type[0] == "f" else schema.NULL_I64
        rows[column.name] = values.get(column.name, missing)
    rows["time_ns"], rows["read_ns"] = times, 5
    return rows


def _write(
    path: Path, table: schema.Table, blocks: list[npt.NDArray[Any]], **extra: object
) -> None:
    writer = RecordWriter(path, table, clock=CLOCK, extra=extra)
    whole = np.concatenate(blocks)
    writer.append(whole[np.argsort(whole["time_ns"], kind="stable")].tobytes())
    writer.close()


def write_flight(run: Path, *, ranks: int, late_rank: int, late_ns: int) -> None:
    """What the ranks' Flight Recorders held: one all-reduce per step, at which one rank is late."""
    wall_ns = CLOCK.wall_ns + 30 * NS_PER_S
    for rank in range(ranks):
        late = late_ns if rank == late_rank else 0
        begin = CLOCK.wall_ns + START_NS + late
        entries = [
            {
                "collective_seq_id": n + 1, "process_group": ["0", "default_pg"],
                "profiling_name": "nccl:all_reduce", "input_sizes": [[1024]],
                "input_dtypes": ["Float"], "time_created_ns": begin + n * 100_000_000,
                "state": "completed",
            }
            for n in range(40)
        ]  # fmt: skip
        dump = {"wall_ns": wall_ns, "groups": {}, "traces": [{"entries": entries}]}
        path = RunPaths(run).rank(rank).collectives(wall_ns)
        path.write_bytes(gzip.compress(json.dumps(dump).encode()))
