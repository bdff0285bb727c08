"""What ranks said of themselves in events.jsonl: loaders, compilations, the GPU's allocator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from haiprof.base.intervals import Intervals
from haiprof.run_analysis.gpu_memory import GpuMemorySeries, GpuOutOfMemory, gpu_memory_series
from haiprof.run_analysis.process_ends import caught_failures
from haiprof.run_analysis.ranks import compile_intervals
from haiprof.run_analysis.run_files import RankFiles, RunFiles, integer, text

COMPILE_SCHEMA = {"rank": pl.Int64, "time_ns": pl.Int64, "count": pl.Int64, "spent_ns": pl.Int64}


SIZE_SCHEMA = {
    "rank": pl.Int64, "root": pl.Int64, "time_ns": pl.Int64, "number_count": pl.Int64
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """How a rank's first DataLoader was made."""

    workers: int | None
    batch_size: int | None
    persistent: bool
    dataset: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAttempts:
    """Of each rank's last attempt."""

    loaders: Mapping[int, Loader]
    """The loader that each rank iterated first."""
    operator_threads: Mapping[int, int]
    """Threads that torch computes one operator with on the CPU."""
    compilations: pl.DataFrame
    """`rank`, `time_ns` (Unix time), `count`, `spent_ns`: cumulative, at most one row a second."""
    input_sizes: pl.DataFrame
    """`rank`, `root` (which module), `time_ns` (Unix time), `number_count`: numbers in what it was
    called with from then on, looked at once a second; only those that changed have a row."""
    compiling: Mapping[int, Intervals]
    """When torch.compile worked, in Unix ns; ranks that do not tell are left out."""
    allocator: Mapping[int, tuple[int, int, int]]
    """(retries of the GPU's allocator, its failures, ns in which they were counted)."""
    gpu_memory: Mapping[int, GpuMemorySeries]
    """What the GPU's allocator held where steps began."""
    caught: Mapping[int, GpuOutOfMemory]
    """The last allocation that failed, of ranks that did not die of one."""


def read_last_attempts(files: RunFiles, judged: Mapping[int, int]) -> LastAttempts:
    """Reads the lines of the attempts that are judged."""
    last = {
        rank.rank: rank
        for rank in sorted(files.ranks, key=lambda r: (r.rank, r.attempt))
        if judged.get(rank.rank, rank.attempt) == rank.attempt
    }
    loaders = {number: _loader(rank) for number, rank in last.items()}
    threads = {
        number: integer(rank.report.get("operator_threads")) for number, rank in last.items()
    }
    rows = [row for number, rank in last.items() for row in _compilations(number, rank)]
    sizes = [row for number, rank in last.items() for row in _input_sizes(number, rank)]
    compiling = {number: compile_intervals(rank) for number, rank in last.items()}
    counted = {number: _allocator(rank) for number, rank in last.items()}
    return LastAttempts(
        loaders={number: loader for number, loader in loaders.items() if loader is not None},
        operator_threads={n: count for n, count in threads.items() if count is not None},
        compilations=pl.DataFrame(rows, schema=COMPILE_SCHEMA, orient="row"),
        input_sizes=pl.DataFrame(sizes, schema=SIZE_SCHEMA, orient="row"),
        compiling={n: intervals for n, intervals in compiling.items() if intervals is not None},
        allocator={number: counts for number, counts in counted.items() if counts is not None},
        gpu_memory=gpu_memory_series(files),
        caught=caught_failures(files),
    )


def _loader(rank: RankFiles) -> Loader | None:
    lines = rank.of_type("dataloader")
    if not lines:
        return None
    return Loader(
        workers=integer(lines[0].get("workers")),
        batch_size=integer(lines[0].get("batch_size")),
        persistent=lines[0].get("persistent") is True,
        dataset=text(lines[0].get("dataset")),
    )


def _compilations(number: int, rank: RankFiles) -> list[tuple[int, int, int, int]]:
    rows = []
    for line in rank.of_type("compile"):
        time, count = _unix_ns(rank, line), integer(line.get("count"))
        spent = integer(line.get("spent_ns"))
        if time is not None and count is not None and spent is not None:
            rows.append((number, time, count, spent))
    return rows


def _input_sizes(number: int, rank: RankFiles) -> list[tuple[int, int, int, int]]:
    rows = []
    for line in rank.of_type("input_size"):
        time, root = _unix_ns(rank, line), integer(line.get("root"))
        count = integer(line.get("number_count"))
        if root is not None and time is not None and count is not None and count > 0:
            rows.append((number, root, time, count))
    return rows


def _unix_ns(rank: RankFiles, line: Mapping[str, Any]) -> int | None:
    """When a line was written; None where that is not known, or is no time."""
    offset, time = rank.clock_offset_ns, integer(line.get("time_ns"))
    return None if offset is None or time is None else integer(time + offset)


def _allocator(rank: RankFiles) -> tuple[int, int, int] | None:
    """Growth from the first line to the last: what came before them was warm-up."""
    lines = rank.of_type("allocator")
    if len(lines) < 2:
        return None
    names = ("retry_count", "oom_count", "time_ns")
    first, last = ([integer(line.get(name)) for name in names] for line in (lines[0], lines[-1]))
    grown = [b - a for a, b in zip(first, last, strict=True) if a is not None and b is not None]
    return (grown[0], grown[1], grown[2]) if len(grown) == len(names) else None
