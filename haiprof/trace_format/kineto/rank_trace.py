"""One rank's trace: its tables, its steps, who recorded it, and values read where needed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import polars as pl

from haiprof.base.errors import TraceFormatError
from haiprof.base.intervals import Ints
from haiprof.run_format.phase_ranges import NAMES
from haiprof.trace_format.checks import (
    WRITTEN,
    CheckedDevice,
    CheckedTable,
    all_findings,
    before_cut,
    check_device,
    check_table,
    find_cut,
)
from haiprof.trace_format.find import FUNCTIONS_SUFFIX, SUMMARY_SUFFIX, rank_of
from haiprof.trace_format.kineto.cache import (
    KeptFindings,
    TraceColumns,
    keep_findings,
    open_columns,
    recall_findings,
)
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.events import (
    ANNOTATIONS,
    GPU,
    GPU_COUNTERS,
    GPU_RANGES,
    GRAPH_NODES,
    LINKS,
    MEMORY,
    OPS,
    OS_CALLS,
    PYTHON,
    RUNTIME,
    SYNC,
    TEXTS,
)
from haiprof.trace_format.kineto.load import LoadReport
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.launch_checks import Finding, LinkedLaunches, link_launches
from haiprof.trace_format.nsight import is_nsight_export

STEP_NAME = r"^ProfilerStep#(\d+)$"
# torch numbers its own ranges (External id); what haiprof adds to a finished trace has no number.
_IS_PHASE = (
    pl.col("external_id").is_null()
    & (pl.col("category") == "user_annotation")
    & pl.col("name").cast(pl.String).is_in(NAMES)
)


class _CheckedTables(dict[str, CheckedTable]):
    """Tables that are checked at their first use."""

    def __init__(self, read: Callable[[str], pl.DataFrame]) -> None:
        self._read = read

    def __missing__(self, name: str) -> CheckedTable:
        self[name] = check_table(name, self._read(name))
        return self[name]


class Trace:
    """The events of one trace file as frames; a table is read at its first use."""

    def __init__(self, path: str | Path, columns: TraceColumns | None = None) -> None:
        self.path = Path(path)
        self._given = columns

    @cached_property
    def columns(self) -> TraceColumns:
        """The file's columns."""
        if self.path.name.endswith(SUMMARY_SUFFIX):
            raise TraceFormatError(
                f"{self.path}: it is the summary of a trace", hint="haiprof trace report reads it"
            )
        if self.path.name.endswith(FUNCTIONS_SUFFIX):
            raise TraceFormatError(
                f"{self.path}: it holds the functions of a trace alone",
                hint="haiprof trace functions can read it",
            )
        return self._given or open_columns(self.path)

    @property
    def metadata(self) -> dict[str, Any]:
        """Everything in the file other than its events."""
        return self.columns.metadata

    @cached_property
    def report(self) -> LoadReport:
        """What was read and what was not."""
        read = self.columns.report
        if read.truncated_bytes is None:
            return read
        tables = {name: self.columns.table(name) for name in WRITTEN}
        has_gpu = bool(self.metadata.get("deviceProperties"))
        marks = _step_marks(tables[ANNOTATIONS], tables[OPS])
        return replace(read, cut=find_cut(tables, marks, has_gpu=has_gpu))

    @cached_property
    def gpu(self) -> pl.DataFrame:
        """Kernels, copies and sets, by start; columns in `tables.TABLES["gpu"]`.

        What cannot be true is corrected: see `findings`.
        """
        return self._device.gpu if self._is_corrected(GPU) else self._table(GPU)

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What is odd about the trace, and what was corrected."""
        return self.checked.findings

    @cached_property
    def checked(self) -> KeptFindings:
        """What was found when the trace was first read."""
        if self._stored_findings is not None:
            return self._stored_findings
        tables = (self._checked[GPU], self._checked[RUNTIME], self._checked[OPS])
        found = (*all_findings(tables, self._device, self.report), *self._linked.findings)
        corrected = {table.name for table in tables if table.far_count or table.duplicate_count}
        if self._device.gpu is not self._checked[GPU].events:
            corrected.add(GPU)
        if self._linked.runtime is not self._checked[RUNTIME].events:
            corrected.add(RUNTIME)
        kept = KeptFindings(findings=found, corrected=frozenset(corrected), window=self._window())
        keep_findings(self.columns.key, kept)
        return kept

    def _window(self) -> tuple[int, int] | None:
        """First start and last end of operators, calls and GPU events."""
        tables = [table for table in (self.runtime, self.gpu, self.ops) if len(table)]
        if not tables:
            return None
        ends = [table.select((pl.col("ts_ns") + pl.col("dur_ns")).max()).item() for table in tables]
        return min(int(table["ts_ns"][0]) for table in tables), int(max(ends))

    @cached_property
    def runtime(self) -> pl.DataFrame:
        """Calls of the CUDA or HIP runtime and driver, by start."""
        return self._linked.runtime if self._is_corrected(RUNTIME) else self._table(RUNTIME)

    @cached_property
    def ops(self) -> pl.DataFrame:
        """Operators on the CPU, by start; a parent before its children."""
        return self._checked[OPS].events if self._is_corrected(OPS) else self._table(OPS)

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """record_function ranges, on the CPU and as they show on the GPU (`category`).

        Without `phase_ranges`, which are not the job's.
        """
        ranges = _within_last_step(self._table(ANNOTATIONS))
        return ranges.filter(~_IS_PHASE) if "haiprof" in self.metadata else ranges

    @cached_property
    def phase_ranges(self) -> pl.DataFrame:
        """Forward and backward passes that haiprof added to its own trace; columns as above."""
        ranges = self._table(ANNOTATIONS)
        return ranges.filter(_IS_PHASE) if "haiprof" in self.metadata else ranges.clear()

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
    def gpu_counters(self) -> pl.DataFrame:
        """Samples of the GPU's counters, by time."""
        return self._table(GPU_COUNTERS)

    @cached_property
    def graph_nodes(self) -> pl.DataFrame:
        """Nodes of CUDA graphs that are no work of the GPU: events, calls on the host."""
        return self._table(GRAPH_NODES)

    @cached_property
    def os_calls(self) -> pl.DataFrame:
        """Calls of the operating system that Nsight Systems recorded, by start."""
        return self._table(OS_CALLS)

    @property
    def host_ranges(self) -> pl.DataFrame:
        """`annotations` without those that show a range as it is on the GPU."""
        return self.annotations.filter(pl.col("category") != GPU_RANGES)

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Profiler steps by their number.

        `step`, `start_ns`, `end_ns`, `tid`; empty where the profiler's `step()` was not called.
        Of a file that is cut off, those that are whole.
        """
        marks, cut = _step_marks(self.annotations, self.ops), self.report.cut
        if cut is None or cut.whole_ns is None:
            return marks
        return marks.filter(pl.col("end_ns") <= cut.whole_ns)

    @property
    def rank(self) -> int | None:
        """From distributedInfo, the file's name or the run's manifest; None where none says."""
        return rank_of(self.path, self.metadata)

    @property
    def world_size(self) -> int | None:
        """From distributedInfo."""
        said = self.metadata.get("distributedInfo")
        size = said.get("world_size") if isinstance(said, dict) else None
        return size if type(size) is int and 0 < size < 1 << 31 else None

    @cached_property
    def _stored_findings(self) -> KeptFindings | None:
        """What was found when the trace was first read; notes name the file where it lies now."""
        return recall_findings(self.columns.key)

    def _is_corrected(self, table: str) -> bool:
        """Whether a table has to be checked; a sound one is taken as it is."""
        return (
            self._stored_findings is None
            or table in self._stored_findings.corrected
            or (table == GPU and bool({RUNTIME, OPS} & self._stored_findings.corrected))
        )

    @cached_property
    def _linked(self) -> LinkedLaunches:
        return link_launches(self._checked[GPU].events, self._checked[RUNTIME].events, self.path)

    @cached_property
    def _device(self) -> CheckedDevice:
        return check_device(self._linked.gpu, self.runtime)

    @cached_property
    def _checked(self) -> _CheckedTables:
        return _CheckedTables(self._table)

    def _table(self, name: str) -> pl.DataFrame:
        events, cut = self.columns.table(name), self.report.cut
        if cut is None or cut.end_ns is None:
            return events
        return before_cut(name, events, lambda: self.columns.table(RUNTIME), cut.end_ns)


def _step_marks(annotations: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Profiler steps by their number, whole or not."""
    marks = annotations.filter(pl.col("category") != GPU_RANGES)
    if annotations.is_empty():  # before 2022 they were operators like any other
        marks = ops.select(marks.columns)
        names = marks["name"].unique()
        steps = names.filter(names.cast(pl.String).str.contains(STEP_NAME))
        marks = marks.filter(pl.col("name").is_in(steps.implode()))
    number = pl.col("name").cast(pl.String).str.extract(STEP_NAME)
    return (
        marks.with_columns(step=number.cast(pl.Int64, strict=False))
        .drop_nulls("step")
        .select("step", start_ns="ts_ns", end_ns=pl.col("ts_ns") + pl.col("dur_ns"), tid="tid")
        .sort("start_ns")
    )


def _within_last_step(ranges: pl.DataFrame) -> pl.DataFrame:
    """What begins in the last step ends with it: after it the profiler stops, in its thread."""
    marks = _step_marks(ranges, ranges.clear())
    if marks.is_empty():
        return ranges
    _, begin_ns, end_ns, tid = marks.row(-1)
    is_in_it = pl.col("ts_ns").is_between(begin_ns, end_ns, closed="left")
    is_in_it &= pl.col("tid").eq_missing(tid)
    on_host = pl.col("category") != GPU_RANGES
    cut_ns = pl.min_horizontal("dur_ns", end_ns - pl.col("ts_ns"))
    return ranges.with_columns(dur_ns=pl.when(is_in_it & on_host).then(cut_ns).otherwise("dur_ns"))


class _Args(msgspec.Struct):
    values: msgspec.Raw = msgspec.field(name="Concrete Inputs", default=msgspec.Raw(b"[]"))


class _Event(msgspec.Struct):
    name: str = ""
    args: _Args = msgspec.field(default_factory=_Args)


_EVENT = msgspec.json.Decoder(_Event)


def concrete_values(path: Path, operators: pl.DataFrame) -> pl.DataFrame:
    """`Concrete Inputs` of some operators: no table has them, since few questions need them.

    `event` and `values`, a JSON text; no row for an operator without them, as before torch
    2.1 and in damaged parts of a file.
    """
    wanted = operators.sort("event")
    events: Ints = wanted["event"].to_numpy()
    names = wanted["name"].cast(pl.String).to_list()
    found: list[tuple[int, str]] = []
    first = 0
    is_text = len(events) and not is_nsight_export(path)
    for piece in event_texts(TraceText(path)) if is_text else ():
        texts = TEXTS.decode(b"[" + piece + b"]")
        low, high = np.searchsorted(events, [first, first + len(texts)]).tolist()
        for place, name in zip((events[low:high] - first).tolist(), names[low:high], strict=True):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                event = _EVENT.decode(texts[place])
                if event.name == name:
                    values = bytes(event.args.values).decode("utf-8", "replace")
                    found.append((first + place, values))
        first += len(texts)
        if high == len(events):
            break
    schema = {"event": pl.Int64, "values": pl.String}
    return pl.DataFrame(found, schema=schema, orient="row")
