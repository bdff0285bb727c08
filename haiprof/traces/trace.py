"""One rank's trace: its tables, its steps, and who recorded it."""

from __future__ import annotations

import re
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.errors import TraceFormatError
from haiprof.traces.cache import TraceColumns, open_columns
from haiprof.traces.find import SUMMARY_SUFFIX
from haiprof.traces.load import LoadReport
from haiprof.traces.ranks import rank_of
from haiprof.traces.tables import (
    ANNOTATIONS,
    GPU,
    LINKS,
    MEMORY,
    OPS,
    PYTHON,
    RUNTIME,
    SYNC,
)

STEP = re.compile(r"ProfilerStep#(\d+)\Z")


class Trace:
    """The events of one trace file as frames; a table is read at its first use.

    Args:
        path: The file.
        columns: Its columns; None reads them, from the cache where there is one.
    """

    def __init__(self, path: str | Path, columns: TraceColumns | None = None) -> None:
        self.path = Path(path)
        self._given = columns

    @cached_property
    def columns(self) -> TraceColumns:
        """The file's columns.

        Raises:
            TraceFormatError: It is not a trace, or cannot be read.
        """
        if self.path.name.endswith(SUMMARY_SUFFIX):
            raise TraceFormatError(
                f"{self.path}: it is the summary of a trace", hint="trace-report can read it"
            )
        return self._given or open_columns(self.path)

    @property
    def metadata(self) -> dict[str, Any]:
        """Everything in the file beside its events."""
        return self.columns.metadata

    @property
    def report(self) -> LoadReport:
        """What was read, and what not."""
        return self.columns.report

    @cached_property
    def gpu(self) -> pl.DataFrame:
        """Kernels, copies and sets, by start; columns in `tables.TABLES["gpu"]`."""
        return self._table(GPU)

    @cached_property
    def runtime(self) -> pl.DataFrame:
        """Calls of the CUDA or HIP runtime and driver, by start."""
        return self._table(RUNTIME)

    @cached_property
    def ops(self) -> pl.DataFrame:
        """Operators on the CPU, by start; a parent before its children."""
        return self._table(OPS)

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """record_function ranges, on the CPU and as they show on the GPU (`category`)."""
        return self._table(ANNOTATIONS)

    @cached_property
    def python(self) -> pl.DataFrame:
        """Python functions, by start; a parent before its children."""
        return self._table(PYTHON)

    @cached_property
    def memory(self) -> pl.DataFrame:
        """Allocations and frees, by time."""
        return self._table(MEMORY)

    @cached_property
    def sync(self) -> pl.DataFrame:
        """Synchronisations (`enable_cuda_sync_events`), by start."""
        return self._table(SYNC)

    @cached_property
    def links(self) -> pl.DataFrame:
        """Arrows from forward to backward operators."""
        return self._table(LINKS)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Profiler steps by their number.

        Returns:
            `step`, `start_ns`, `end_ns`, `tid`; empty where the profiler's `step()` was not called.
        """
        marks = self.annotations.filter(pl.col("category") != "gpu_user_annotation")
        if self.annotations.is_empty():  # before 2022 they were operators like any other
            marks = self.ops.select(marks.columns)
            steps = [name for name in marks["name"].unique().cast(pl.String) if STEP.match(name)]
            marks = marks.filter(pl.col("name").is_in(steps))
        named = marks.with_columns(
            step=pl.col("name").cast(pl.String).str.extract(STEP.pattern.replace("\\Z", "$"))
        )
        numbered = named.with_columns(pl.col("step").cast(pl.Int64, strict=False))
        return (
            numbered.drop_nulls("step")
            .select(
                "step",
                start_ns="ts_ns",
                end_ns=pl.col("ts_ns") + pl.col("dur_ns"),
                tid="tid",
            )
            .sort("start_ns")
        )

    @property
    def rank(self) -> int | None:
        """From distributedInfo, the file's name or the run's manifest; null where none says."""
        return rank_of(self.path, self.metadata)

    @property
    def world_size(self) -> int | None:
        """From distributedInfo."""
        said = self.metadata.get("distributedInfo")
        size = said.get("world_size") if isinstance(said, dict) else None
        return size if type(size) is int and 0 < size < 1 << 31 else None

    def _table(self, name: str) -> pl.DataFrame:
        return self.columns.table(name)
