"""A run made of small frames with the contract's columns, and a run.json in a folder."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl

from haiprof.base.ledger import POSITIONS
from haiprof.base.units import BYTES_PER_GIB, NS_PER_MS, NS_PER_S
from haiprof.run_analysis.counter_summaries import (
    CounterDigest,
    MetricOwner,
    MetricStat,
    host_windows,
    training_spans,
)
from haiprof.run_analysis.counters import COUNTER_SCHEMA, SeriesReader
from haiprof.run_analysis.ranks import RANK_SCHEMA
from haiprof.run_analysis.run_frames import Cells, RunFrames
from haiprof.run_analysis.step_frame import PHASE_SCHEMA, STEP_SCHEMA
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from haiprof.show.figures.panel_table import frame_reader
from haiprof.show.summary import select_judged_samples

START_NS = 1_790_000_000 * NS_PER_S
PHASES = ("dataloader", "forward", "backward", "optimizer", "other")
_POSITIONS = ("input", "forward", "backward", "optimizer", "after_step")


class FakeRun(RunFrames):
    """A run whose frames are made of rows; of all else its folder has nothing."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.step_rows: list[dict[str, object]] = []
        self.span_rows: list[dict[str, object]] = []
        self.counter_rows: list[dict[str, object]] = []
        self.rank_rows: list[dict[str, object]] = []

    def steps(self) -> pl.DataFrame:
        return pl.DataFrame(self.step_rows, schema=STEP_SCHEMA)

    def position_times(
        self, rank: int, attempt: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        steps = self.steps().filter(pl.col("rank") == rank, pl.col("attempt") == attempt)
        times = np.zeros((len(POSITIONS), max(steps["step"].to_list()) + 1), dtype=np.int64)
        for phase, position in zip(PHASES, _POSITIONS, strict=True):
            ns = steps[f"{phase}_host_ns"].fill_null(0).to_numpy()
            times[POSITIONS.index(position), steps["step"].to_numpy()] = ns
        return times, np.zeros_like(times)

    def cells(self, rank: int, attempt: int | None = None) -> Cells:
        step = np.arange(self.position_times(rank, attempt)[0].shape[1])
        return Cells(step=step, count=np.ones_like(step), column=step)

    def phases(self, ranks: object = None) -> pl.DataFrame:
        return pl.DataFrame(self.span_rows, schema=PHASE_SCHEMA)

    def counters(self) -> pl.DataFrame:
        return pl.DataFrame(self.counter_rows, schema=COUNTER_SCHEMA)

    def host_counters(self, hosts: Collection[str] | None) -> pl.DataFrame:
        frame = self.counters()
        return frame if hosts is None else frame.filter(pl.col("host").is_in(list(hosts)))

    def counter_digest(self, judged: pl.DataFrame) -> CounterDigest:
        counters, ranks = self.counters(), self.ranks()
        spans = training_spans(judged.partition_by("rank", "attempt", maintain_order=True))
        rows = host_windows(spans, ranks).iter_rows()
        windows = {host: (begin, end) for host, begin, end in rows}
        digest = frame_digest(select_judged_samples(counters, judged, ranks), counters)
        return replace(digest, windows=windows or None)

    def read_series(self, metrics: Collection[tuple[str, str]]) -> SeriesReader:
        return frame_reader(self.counters())

    def ranks(self) -> pl.DataFrame:
        return pl.DataFrame(self.rank_rows, schema=RANK_SCHEMA)

    def add_rank(self, rank: int, *, gpu: bool = False) -> None:
        self.rank_rows.append({
            "rank": rank, "attempt": 0, "host": "node-1", "pid": 4000 + rank, "world_size": 2,
            "python": "3.11.2", "torch": "2.13.0", "device": "cuda" if gpu else "cpu",
            "notes": [],
        })  # fmt: skip

    def add_step(self, rank: int, step: int, start_ns: int, phases_ms: tuple[float, ...]) -> int:
        """Appends a step with the five phases' host times in ms; returns its end."""
        times = {
            f"{phase}_host_ns": int(ms * NS_PER_MS)
            for phase, ms in zip(PHASES, phases_ms, strict=True)
        }
        step_ns = sum(times.values())
        self.step_rows.append({
            "rank": rank,
            "attempt": 0,
            "step": step,
            "start_ns": start_ns,
            "step_ns": step_ns,
            **times,
            "micro_step_count": 1,
            "optimizer_step_count": 1,
            "skipped": False,
            "boundary": "dataloader",
            "confidence": 1.0,
        })  # fmt: skip
        return start_ns + step_ns

    def add_sample(
        self,
        time_ns: int,
        metric: str,
        value: float,
        *,
        source: str = "host",
        rank: int | None = None,
        gpu: int | None = None,
    ) -> None:
        self.counter_rows.append({
            "time_ns": time_ns, "host": "node-1", "source": source, "rank": rank, "gpu": gpu,
            "metric": metric, "unit": "", "value": value,
        })  # fmt: skip


def frame_digest(judged: pl.DataFrame, counters: pl.DataFrame) -> CounterDigest:
    """The digest of all counters, worked out on frames; its series are not cut."""
    value, stats = pl.col("value"), dict[MetricOwner, dict[str, MetricStat]]()
    rows = judged.filter(value.is_finite()).group_by("source", "host", "rank", "gpu", "metric").agg(
        mean=value.mean(), min=value.min(), max=value.max()
    )  # fmt: skip
    for source, host, rank, gpu, metric, mean, low, high in rows.iter_rows():
        stat = MetricStat(mean=mean, min=low, max=high)
        stats.setdefault((source, host, rank, gpu), {})[metric] = stat
    times = counters["time_ns"].sort()
    return CounterDigest(
        span=(times[0], times[-1]) if len(times) else None,
        present=set(counters.select("source", "metric").rows()), stats=stats, windows=None,
    )  # fmt: skip


def empty_run(folder: Path, **manifest: object) -> FakeRun:
    """A run directory with a manifest and nothing else; it ended well unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    values: dict[str, object] = {
        "haiprof_version": "0.1.0", "name": "train",
        "command": ["python", "train.py", "--lr", "0.1"], "host": socket.gethostname(),
        "launcher_pid": os.getpid(), "start_wall_ns": START_NS - 3 * NS_PER_S,
        "end_wall_ns": START_NS + 60 * NS_PER_S, "exit_status": 0,
    }  # fmt: skip
    run = RunPaths(folder)
    write_manifest(run, Manifest(**{**values, **manifest}))  # type: ignore[arg-type]
    return FakeRun(folder)


def two_rank_run(folder: Path, *, gpu: bool = False, steps: int = 200) -> FakeRun:
    """Two ranks; rank 1 is slower in forward; step 50 of rank 0 waits for data."""
    data = empty_run(folder)
    for rank in (0, 1):
        data.add_rank(rank, gpu=gpu)
        end_ns = START_NS
        for step in range(steps):
            wait_ms = 300.0 if (rank, step) == (0, 50) else 4.0
            end_ns = data.add_step(rank, step, end_ns, (wait_ms, 60.0 + 20 * rank, 80.0, 10.0, 6.0))
    for second in range(40):
        _add_samples(data, START_NS + second * NS_PER_S, second, gpu=gpu)
    data.span_rows.append(_span(0, "gc", START_NS + NS_PER_S, 12 * NS_PER_MS))
    data.span_rows.append(_span(0, "save", START_NS + 2 * NS_PER_S, 900 * NS_PER_MS))
    return data


def _add_samples(data: FakeRun, time_ns: int, second: int, *, gpu: bool) -> None:
    data.add_sample(time_ns, "cpu_utilization_ratio", 0.62 + 0.01 * (second % 5))
    data.add_sample(time_ns, "cpu_count", 2.0)
    data.add_sample(time_ns, "memory_total_bytes", 16 * BYTES_PER_GIB)
    data.add_sample(time_ns, "memory_available_bytes", 10 * BYTES_PER_GIB)
    data.add_sample(time_ns, "network_receive_bytes_per_s", 1e6 * (1 + second % 3))
    for rank in (0, 1):
        mine = {"source": "process", "rank": rank}
        data.add_sample(time_ns, "cpu_cores", 0.9 + 0.1 * rank, **mine)  # type: ignore[arg-type]
        data.add_sample(time_ns, "memory_rss_bytes", 1.5 * BYTES_PER_GIB, **mine)  # type: ignore[arg-type]
        data.add_sample(time_ns, "read_bytes_per_s", 2e6, **mine)  # type: ignore[arg-type]
        if gpu:
            card = {"source": "gpu", "rank": rank, "gpu": rank}
            data.add_sample(time_ns, "utilization_ratio", 0.3, **card)  # type: ignore[arg-type]
            data.add_sample(time_ns, "memory_used_bytes", 8 * BYTES_PER_GIB, **card)  # type: ignore[arg-type]
            data.add_sample(time_ns, "memory_total_bytes", 80 * BYTES_PER_GIB, **card)  # type: ignore[arg-type]
            data.add_sample(time_ns, "power_watts", 212.0, **card)  # type: ignore[arg-type]


def _span(rank: int, phase: str, start_ns: int, duration_ns: int) -> dict[str, object]:
    return {
        "rank": rank, "attempt": 0, "step": None, "phase": phase, "name": None,
        "start_ns": start_ns, "duration_ns": duration_ns, "self_ns": duration_ns,
    }  # fmt: skip
