"""The tables that SQL can ask: those of traces and of runs, with units and meanings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.run_analysis.counters import COUNTER_SCHEMA
from haiprof.run_analysis.ranks import RANK_SCHEMA
from haiprof.run_analysis.reactions import REACTION_SCHEMA
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import PHASE_SCHEMA, STEP_SCHEMA
from haiprof.run_analysis.windows import WINDOW_SCHEMA
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.arrivals import LATENESS_SCHEMA
from haiprof.trace_analysis.device_time import gpu_events, with_kind
from haiprof.trace_analysis.function_patterns import FUNCTIONS_SCHEMA, TOTALS_SCHEMA
from haiprof.trace_analysis.pool import Pool
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_format.find import is_reduced_to_functions, trace_files, window_files
from haiprof.trace_format.kineto.events import GPU, TABLES
from haiprof.trace_format.kineto.rank_trace import Trace

if TYPE_CHECKING:
    from haiprof.trace_analysis.pattern_gathering import Patterns

Schema = Mapping[str, "type[pl.DataType]"]

_KIND_RATIO = "of the window in which {} ran and nothing above it did"
FUNCTION_TABLES: dict[str, tuple[str, Schema, dict[str, str]]] = {
    "functions": (
        "what bounds each rank, function by function (haiprof trace functions)",
        {
            "rank": pl.Int64, **FUNCTIONS_SCHEMA,
            "wait_ns": pl.Int64, "transfer_ns": pl.Int64, "missing": pl.String,
        },
        {
            "rank": "of the trace",
            "kind": "gpu-compute, communication, memory, runtime or python",
            "type": "of a communication, such as ring all_reduce",
            "name": "of the kernel, copy or call; of Python root|...|leaf",
            "count": "of calls that reach into the window",
            "total_ns": "of those calls",
            "median_ns": "of those calls",
            "covered_ns": "in which it ran; of a call stack its own",
            "bottleneck_ns": "in which it ran and nothing of a kind above it did",
            "share_ratio": "covered_ns of the window",
            "bottleneck_ratio": "bottleneck_ns of the window",
            "occupancy_ratio": "estimated occupancy, a mean over its time",
            "occupancy_std": "its deviation",
            "bandwidth_bytes_per_s": "of a copy; of a communication the bus bandwidth",
            "bandwidth_std_bytes_per_s": "its deviation",
            "median_block_count": "blocks of a kernel's launches; null where grids are missing",
            "wait_ns": "of a communication: for the last rank",
            "transfer_ns": "of a communication: after the last rank came",
            "missing": "why a communication has no bandwidth",
        },
    ),
    "rank_totals": (
        "what each kind of function takes of a rank's window (haiprof trace functions)",
        {"rank": pl.Int64, **TOTALS_SCHEMA},
        {
            "rank": "of the trace",
            "window_ns": "what was judged",
            "gpu_compute_ratio": _KIND_RATIO.format("a computing kernel"),
            "communication_ratio": _KIND_RATIO.format("communication"),
            "memory_ratio": _KIND_RATIO.format("a copy or set"),
            "runtime_ratio": _KIND_RATIO.format("a call of the CUDA runtime"),
            "python_ratio": _KIND_RATIO.format("a Python function or operator"),
            "utilization_ratio": "of the window in which a computing kernel ran",
            "sm_efficiency_ratio": "estimated, from blocks per SM",
            "occupancy_ratio": "estimated, over the time of kernels",
            "overlap_ratio": "of communication that computing hides",
            "gpu_name": "of the first GPU",
            "host": "node; only haiprof records it",
            "has_gpu": "GPU events were recorded",
            "has_python": "Python stacks were recorded",
        },
    ),
    "lateness": (
        "who begins its collectives later than the others of its group",
        LATENESS_SCHEMA,
        {
            "rank": "of the trace",
            "process_group": "the group in which it is latest",
            "part": "of the job that the group serves",
            "late_ns": "per step, negative: earlier",
            "low_ns": "of its 95 % interval; null: too few steps",
            "high_ns": "of its 95 % interval",
            "clock_ns": "of it that may be the clocks'",
            "step_count": "steps",
            "collective_count": "collectives",
            "is_late": "beyond chance",
            "said": "the answer in words",
        },
    ),
}  # fmt: skip


def function_frames(patterns: Callable[[], Patterns]) -> dict[str, Callable[[], pl.DataFrame]]:
    """The rows of each table; patterns are computed when the first is asked for."""
    found = cache(patterns)
    return {
        "functions": lambda: found().functions,
        "rank_totals": lambda: found().totals,
        "lateness": lambda: found().lateness,
    }


STEPS = "profiler_steps"

_TYPES = {"i64": pl.Int64(), "f64": pl.Float64(), "str": pl.String()}
_UNITS = (
    ("_bytes_per_s", "bytes/s"),
    ("_ns_per_step", "ns"),
    ("_ns", "ns"),
    ("bytes", "bytes"),
    ("_ratio", "ratio"),
    ("_count", "count"),
)
_TRACE_TABLES = {
    "gpu": "kernels, copies and sets on the GPU",
    "runtime": "calls of the CUDA or HIP runtime and driver",
    "ops": "operators on the CPU",
    "annotations": "record_function ranges, on the CPU and as they show on the GPU",
    "python": "Python functions (with_stack)",
    "memory": "allocations and frees (profile_memory)",
    "sync": "synchronisations (enable_cuda_sync_events)",
    "links": "both ends of the arrows from forward to backward operators",
    "gpu_counters": "samples of a GPU's counters (PyTorch's CUPTI collector, Nsight Systems)",
    "graph_nodes": "nodes of CUDA graphs that are no work of the GPU: events, calls on the host",
    "os_calls": "calls of the operating system (Nsight Systems)",
}
_PHASES = ("dataloader", "forward", "backward", "optimizer", "other")
_Schema = Mapping[str, "pl.DataType | type[pl.DataType]"]
_RUN_TABLES: dict[str, tuple[str, _Schema, dict[str, str]]] = {
    "steps": (
        "training steps of a run",
        STEP_SCHEMA,
        {
            "rank": "of the process",
            "attempt": "restart of the rank, from 0",
            "step": "from 0 in that attempt",
            "start_ns": "Unix time",
            "step_ns": "duration, evaluation taken out",
            **{f"{phase}_host_ns": f"{phase} on the host, exclusive" for phase in _PHASES},
            **{f"{phase}_device_ns": f"{phase} on the device" for phase in _PHASES},
            "idle_device_ns": "for how long at most the device had nothing to do, in all phases",
            "micro_step_count": "backward passes in it",
            "optimizer_step_count": "optimizer steps in it",
            "skipped": "the gradient scaler let no optimizer step",
            "boundary": "what the step begins with: dataloader, optimizer or backward",
            "confidence": "that these are the steps, from 0 to 1",
            "traced": "a trace window was in it: it took longer",
        },
    ),
    "phases": (
        "spans of phases of a run",
        PHASE_SCHEMA,
        {
            "rank": "of the process",
            "attempt": "restart of the rank, from 0",
            "step": "null outside training steps",
            "phase": "dataloader, forward, backward, optimizer, nograd_forward, eval, gc, save",
            "name": "module or optimizer",
            "start_ns": "Unix time",
            "duration_ns": "of the span",
            "self_ns": "without the spans inside",
        },
    ),
    "counters": (
        "samples of a run's counters, as rates where they count",
        COUNTER_SCHEMA,
        {
            "time_ns": "Unix time of the sample",
            "host": "node",
            "source": "host, process, gpu, ...",
            "entity": "of the source, such as a port; null for the node",
            "rank": "of a process, or of the GPU that one rank uses",
            "gpu": "NVML index",
            "metric": "with its unit as suffix",
            "unit": "of value",
            "value": "null where it was set back or has stopped",
            "flag": "wrap, reset or saturated",
        },
    ),
    "ranks": (
        "rank processes of a run",
        RANK_SCHEMA,
        {
            "rank": "of the process",
            "attempt": "restart of the rank, from 0",
            "host": "node",
            "pid": "process",
            "local_rank": "on its node",
            "world_size": "ranks of the job",
            "python": "version",
            "torch": "version",
            "device": "its name",
            "gpu_uuid": "of the device",
            "step_count": "training steps",
            "eval_ns": "in evaluations",
            "nograd_ns": "calls of models without gradients in training steps",
            "compile_ns": "torch.compile at work",
            "eval_compile_ns": "of that, in evaluations",
            "unfinished_micro_step_count": "after the last step",
            "record_start_ns": "Unix time",
            "record_end_ns": "Unix time",
            "recording_ended": "time or exit; null: killed, or still running",
            "cost_ns_per_step": "haiprof's own time in the training thread",
            "cost_ratio": "of the job's time",
            "beside_cpu_ratio": "share of one CPU that haiprof's threads in the job use",
            "notes": "what was cut, damaged or missing",
        },
    ),
    "windows": (
        "trace windows of a run",
        WINDOW_SCHEMA,
        {
            "rank": "of the process",
            "attempt": "restart of the rank, from 0",
            "window": "of that attempt, from 0",
            "state": "recorded, cut, refused, failed, dropped or not reached",
            "trigger": "option, slow or request",
            "reason": "why it is not just recorded",
            "first_step": "in it",
            "end_step": "the one after its last",
            "start_ns": "Unix time",
            "end_ns": "Unix time",
            "stall_ns": "how long the training thread was stopped",
            "path": "of the trace; null: there is none",
            "bytes": "of that file",
            "raw_bytes": "before compression",
            "et_path": "of the execution trace",
            "et_bytes": "of that file",
            "event_count": "in the trace",
            "stem": "of the file's name",
        },
    ),
    "reactions": (
        "what haiprof did by itself in a run",
        REACTION_SCHEMA,
        {
            "trigger": "hang or slow",
            "noticed_ns": "Unix time",
            "since_ns": "Unix time of the last sign of life, or of the first slower step",
            "host": "whose launcher noticed it",
            "rank": "whose steps",
            "step": "the first slower one; with hang the last that ended",
            "reason": "what was compared",
            "before_step_ns": "median step before; null with hang",
            "after_step_ns": "slower step; null with hang",
            "silent_ns": "without a step; null with slow",
            "action": "snapshot, trace-now or none",
            "state": "done, failed, begun or none",
            "failure": "why it failed",
            "suspect_rank": "the first rank that the snapshot named",
            "suspect_reason": "why it was named",
            "suspect_doing": "what it did",
            "suspect_certain": "it follows from what was seen",
            "suspect_count": "ranks that were named",
            "collectives_moved": "during the snapshot",
            "saving_rank": "the first that saved a checkpoint then",
            "window": "number of the trace window",
            "first_step": "traced",
            "end_step": "the one after the last traced",
            "path": "of the snapshot",
            "outcome": "for people",
        },
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlColumn:
    """One column that SQL can ask for."""

    name: str
    type: str
    """As polars calls it."""
    unit: str
    """Empty where it has none."""
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlTable:
    """One table that SQL can ask."""

    name: str
    meaning: str
    columns: tuple[SqlColumn, ...]
    dtypes: Mapping[str, pl.DataType]
    """Of the columns."""
    frame: Callable[[], pl.LazyFrame]
    """Its rows, read when it is called."""


def sql_tables(
    path: str | Path,
    *,
    window: int | None = None,
    pool: Pool | None = None,
    analysis: TraceQuestions | None = None,
) -> dict[str, SqlTable]:
    """The tables of traces, of a run, or of a run with traces."""
    path = Path(path)
    if not path.exists():
        raise TraceFormatError(f"{path}: no such file or folder")
    is_run = path.is_dir() and RunPaths(path).manifest.exists()
    has_traces = _has_traces(path)
    tables = []
    if is_run or not has_traces:
        tables += run_tables(RunFrames(path))
    if has_traces:
        tables += trace_tables(analysis or TraceQuestions(path, pool=pool, window=window))
    return {table.name: table for table in tables}


def _has_traces(path: Path) -> bool:
    try:
        return bool(trace_files(path))
    except TraceFormatError:
        return False


def trace_tables(analysis: TraceQuestions) -> list[SqlTable]:
    """The tables of traces: `trace_format.kineto.tables` with the rank, and texts as strings.

    With `function_tables`; of traces that were reduced to their functions these alone.
    """
    functions = function_tables(analysis)
    if is_reduced_to_functions(window_files(analysis.path)):
        return functions
    found = []
    for name, meaning in _TRACE_TABLES.items():
        columns = [_column("rank", "Int64", "of the trace")]
        columns += [_column(c.name, str(_TYPES[c.type]), c.meaning) for c in TABLES[name]]
        if name == GPU:
            columns.append(_column("kind", "String", "computation, communication or memory"))
        found.append(_table(name, meaning, columns, _rows_of(analysis, name)))
    steps = [
        _column("rank", "Int64", "of the trace"),
        _column("step", "Int64", "number that the profiler gave it"),
        _column("start_ns", "Int64", "on the trace's clock"),
        _column("end_ns", "Int64", "on the trace's clock"),
        _column("dur_ns", "Int64", "end less start"),
        _column("tid", "Int64", "thread"),
    ]
    marks = _table(STEPS, "profiler steps of the traces", steps, _rows_of(analysis, STEPS))
    return [*found, marks, *functions]


def is_of_run(name: str) -> bool:
    """Whether a table holds what haiprof recorded of a run, and nothing of its traces."""
    return name in _RUN_TABLES


def run_tables(analyzer: RunFrames) -> list[SqlTable]:
    """The frames of a run."""
    _ = analyzer.files  # whether there is a run
    frames = {
        "steps": analyzer.steps,
        "phases": analyzer.phases,
        "counters": analyzer.counters,
        "ranks": analyzer.ranks,
        "windows": analyzer.windows,
        "reactions": analyzer.reactions,
    }
    return _make_tables(_RUN_TABLES, frames)


def function_tables(analysis: TraceQuestions) -> list[SqlTable]:
    """What `haiprof trace functions` says of traces, or of what they were reduced to."""
    return _make_tables(FUNCTION_TABLES, function_frames(analysis.patterns))


def _make_tables(
    tables: Mapping[str, tuple[str, _Schema, dict[str, str]]],
    frames: Mapping[str, Callable[[], pl.DataFrame]],
) -> list[SqlTable]:
    found = []
    for name, (meaning, schema, meanings) in tables.items():
        columns = [
            _column(column, str(pl.Schema({column: dtype})[column]), meanings[column])
            for column, dtype in schema.items()
        ]
        found.append(_table(name, meaning, columns, _lazily(frames[name])))
    return found


def _table(
    name: str, meaning: str, columns: list[SqlColumn], frame: Callable[[], pl.LazyFrame]
) -> SqlTable:
    types: dict[str, pl.DataType] = {"Boolean": pl.Boolean(), "List(String)": pl.List(pl.String)}
    types |= {str(dtype): dtype for dtype in _TYPES.values()}
    dtypes = {column.name: types[column.type] for column in columns}
    return SqlTable(name=name, meaning=meaning, columns=tuple(columns), dtypes=dtypes, frame=frame)


def describe_run_table(name: str) -> tuple[str, tuple[SqlColumn, ...]]:
    """What a frame of a run holds, and each of its columns."""
    if name not in _RUN_TABLES:
        raise UsageError(f"{name}: no frame of a run", hint=f"there are {', '.join(_RUN_TABLES)}")
    meaning, schema, meanings = _RUN_TABLES[name]
    types = pl.Schema(schema)
    return meaning, tuple(_column(c, str(types[c]), meanings[c]) for c in schema)


def _column(name: str, type_: str, meaning: str) -> SqlColumn:
    unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
    return SqlColumn(name=name, type=type_, unit=unit, meaning=meaning)


def _lazily(frame: Callable[[], pl.DataFrame]) -> Callable[[], pl.LazyFrame]:
    return lambda: frame().lazy()


def _rows_of(analysis: TraceQuestions, name: str) -> Callable[[], pl.LazyFrame]:
    """One table of all ranks; texts become strings only where the query uses them."""
    return lambda: pl.concat(
        [_of_rank(trace, name, rank) for rank, trace in analysis.traces.items()]
    )


def _of_rank(trace: Trace, name: str, rank: int) -> pl.LazyFrame:
    if name == STEPS:
        duration = pl.col("end_ns") - pl.col("start_ns")
        steps = trace.steps.with_columns(dur_ns=duration)
        frame = steps.select("step", "start_ns", "end_ns", "dur_ns", "tid")
    elif name == GPU:
        frame = with_kind(gpu_events(trace, None)).select(*(c.name for c in TABLES[GPU]), "kind")
    else:
        frame = getattr(trace, name)
    texts = [_text(column) for column, dtype in frame.schema.items() if dtype == pl.Enum]
    own = pl.lit(rank, dtype=pl.Int64).alias("rank")
    return frame.lazy().select(own, pl.all()).with_columns(texts)


def _text(column: str) -> pl.Expr:
    """A text as a string; one that was not recorded is null."""
    text = pl.col(column).cast(pl.String)
    return text if column == "name" else pl.when(text != "").then(text).alias(column)
