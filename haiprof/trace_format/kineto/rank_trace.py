"""One rank's trace: its tables, its steps, who recorded it, and values read where needed."""

from __future__ import annotations

import contextlib
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
from haiprof.trace_format.checks import WRITTEN, before_cut, check_trace, find_cut
from haiprof.trace_format.find import FUNCTIONS_SUFFIX, SUMMARY_SUFFIX, rank_of
from haiprof.trace_format.kineto import cache
from haiprof.trace_format.kineto import events as schema
from haiprof.trace_format.kineto.columns import has_name
from haiprof.trace_format.kineto.decode import event_texts
from haiprof.trace_format.kineto.load import LoadReport
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.nsight import is_nsight_export

STEP_NAME = r"^ProfilerStep#(\d+)$"
# torch numbers its own ranges (External id); what haiprof adds to a finished trace has no number.
_IS_PHASE = (
    pl.col("external_id").is_null()
    & (pl.col("category") == "user_annotation")
    & pl.col("name").cast(pl.String).is_in(NAMES)
)


def _table_property(name: str, *, may_be_wrong: bool = False) -> cached_property[pl.DataFrame]:
    """A table of a trace, read at its first use."""
    if may_be_wrong:
        return cached_property(lambda trace: trace.sound_table(name))
    return cached_property(lambda trace: trace.read_table(name))


class Trace:
    """The events of one trace file as frames; a table is read at its first use."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @cached_property
    def columns(self) -> cache.TraceColumns:
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
        return cache.open_columns(self.path)

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
        marks = _step_marks(tables[schema.ANNOTATIONS], tables[schema.OPS])
        return replace(read, cut=find_cut(tables, marks, has_gpu=has_gpu))

    gpu = _table_property(schema.GPU, may_be_wrong=True)
    """Kernels, copies and sets, by start; columns in `tables.TABLES["gpu"]`.

    What cannot be true is corrected: see `checked`."""
    runtime = _table_property(schema.RUNTIME, may_be_wrong=True)
    """Calls of the CUDA or HIP runtime and driver, by start."""
    ops = _table_property(schema.OPS, may_be_wrong=True)
    """Operators on the CPU, by start; a parent before its children."""

    @cached_property
    def checked(self) -> cache.KeptFindings:
        """What was found odd about the trace, and corrected, when it was first read."""
        known = cache.recall_findings(self.columns.key)
        if known is None:
            _, known = self._sound
            cache.keep_findings(self.columns.key, known)
        return known

    @cached_property
    def annotations(self) -> pl.DataFrame:
        """record_function ranges, on the CPU and as they show on the GPU (`category`).

        Without `phase_ranges`, which are not the job's.
        """
        ranges = _within_last_step(self.read_table(schema.ANNOTATIONS))
        return ranges.filter(~_IS_PHASE) if "haiprof" in self.metadata else ranges

    @cached_property
    def phase_ranges(self) -> pl.DataFrame:
        """Forward and backward passes that haiprof added to its own trace; columns as above."""
        ranges = self.read_table(schema.ANNOTATIONS)
        return ranges.filter(_IS_PHASE) if "haiprof" in self.metadata else ranges.clear()

    python = _table_property(schema.PYTHON)
    """Python functions, by start; a parent before its children."""
    memory = _table_property(schema.MEMORY)  # allocations and frees, by time
    sync = _table_property(schema.SYNC)  # synchronisations (`enable_cuda_sync_events`), by start
    links = _table_property(schema.LINKS)  # arrows from forward to backward operators
    gpu_counters = _table_property(schema.GPU_COUNTERS)  # samples of the GPU's counters, by time
    graph_nodes = _table_property(schema.GRAPH_NODES)
    """Nodes of CUDA graphs that are no work of the GPU: events, calls on the host."""
    os_calls = _table_property(schema.OS_CALLS)
    """Calls of the operating system that Nsight Systems recorded, by start."""

    @property
    def host_ranges(self) -> pl.DataFrame:
        """`annotations` without those that show a range as it is on the GPU."""
        return self.annotations.filter(pl.col("category") != schema.GPU_RANGES)

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
    def _sound(self) -> tuple[dict[str, pl.DataFrame], cache.KeptFindings]:
        """Tables that were checked, and what was found: each of them tells of the others."""
        tables = {name: self.read_table(name) for name in (schema.GPU, schema.RUNTIME, schema.OPS)}
        return check_trace(tables, self.report, self.path)

    def sound_table(self, name: str) -> pl.DataFrame:
        """A table as it can be believed; one in which nothing is wrong is taken as it is."""
        wrong = self.checked.corrected
        is_wrong = name in wrong or (
            name == schema.GPU and not wrong.isdisjoint({schema.RUNTIME, schema.OPS})
        )
        is_read = "_sound" in vars(self)
        return self._sound[0][name] if is_wrong or is_read else self.read_table(name)

    def read_table(self, name: str) -> pl.DataFrame:
        """A table as it is in the file, up to where that is cut off."""
        events, cut = self.columns.table(name), self.report.cut
        if cut is None or cut.end_ns is None:
            return events
        return before_cut(name, events, lambda: self.columns.table(schema.RUNTIME), cut.end_ns)


def _step_marks(annotations: pl.DataFrame, ops: pl.DataFrame) -> pl.DataFrame:
    """Profiler steps by their number, whole or not."""
    marks = annotations.filter(pl.col("category") != schema.GPU_RANGES)
    if annotations.is_empty():  # before 2022 they were operators like any other
        marks = ops.select(marks.columns).filter(has_name(ops, STEP_NAME))
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
    on_host = pl.col("category") != schema.GPU_RANGES
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
    is_text = len(events) and not is_nsight_export(path)
    for first, texts in event_texts(TraceText(path)) if is_text else ():
        low, high = np.searchsorted(events, [first, first + len(texts)]).tolist()
        for place, name in zip((events[low:high] - first).tolist(), names[low:high], strict=True):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                event = _EVENT.decode(texts[place])
                if event.name == name:
                    values = bytes(event.args.values).decode("utf-8", "replace")
                    found.append((first + place, values))
        if high == len(events):
            break
    columns = {"event": pl.Int64, "values": pl.String}
    return pl.DataFrame(found, schema=columns, orient="row")
