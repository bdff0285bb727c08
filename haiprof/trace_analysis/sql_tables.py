"""The tables that SQL can ask: those of traces and of runs, with units and meanings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import polars as pl

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.run_analysis.counters import COUNTER_COLUMNS
from haiprof.run_analysis.ranks import RANK_COLUMNS
from haiprof.run_analysis.reactions import REACTION_COLUMNS
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_analysis.step_frame import PHASE_COLUMNS, STEP_COLUMNS
from haiprof.run_analysis.windows import WINDOW_COLUMNS
from haiprof.run_format.layout import RunPaths
from haiprof.trace_analysis.arrivals import LATENESS_COLUMNS
from haiprof.trace_analysis.device_time import gpu_events, with_kind
from haiprof.trace_analysis.function_patterns import FUNCTION_COLUMNS, TOTAL_COLUMNS
from haiprof.trace_analysis.pool import Pool
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_format.find import is_reduced_to_functions, trace_files, window_files
from haiprof.trace_format.frame_columns import Columns, types_of
from haiprof.trace_format.kineto.events import GPU, TABLES
from haiprof.trace_format.kineto.rank_trace import Trace

_RANK: Columns = {"rank": (pl.Int64, "of the trace")}
_FUNCTION_TABLES: dict[str, tuple[str, Columns]] = {
    "functions": (
        "what bounds each rank, function by function (haiprof trace functions)",
        {
            **_RANK, **FUNCTION_COLUMNS,
            "wait_ns": (pl.Int64, "of a communication: for the last rank"),
            "transfer_ns": (pl.Int64, "of a communication: after the last rank came"),
            "missing": (pl.String, "why a communication has no bandwidth"),
        },
    ),
    "rank_totals": (
        "what each kind of function takes of a rank's window (haiprof trace functions)",
        {**_RANK, **TOTAL_COLUMNS},
    ),
    "lateness": ("who begins its collectives later than the others of its group", LATENESS_COLUMNS),
}  # fmt: skip
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
_RUN_TABLES: dict[str, tuple[str, Columns]] = {
    "steps": ("training steps of a run", STEP_COLUMNS),
    "phases": ("spans of phases of a run", PHASE_COLUMNS),
    "counters": ("samples of a run's counters, as rates where they count", COUNTER_COLUMNS),
    "ranks": ("rank processes of a run", RANK_COLUMNS),
    "windows": ("trace windows of a run", WINDOW_COLUMNS),
    "reactions": ("what haiprof did by itself in a run", REACTION_COLUMNS),
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

    And what `haiprof trace functions` says, alone of traces that were reduced to their functions.
    """
    patterns = cache(analysis.patterns)
    frames: dict[str, Callable[[], pl.DataFrame]] = {
        "functions": lambda: patterns().functions,
        "rank_totals": lambda: patterns().totals,
        "lateness": lambda: patterns().lateness,
    }
    functions = [
        _make_table(name, meaning, columns, frames[name])
        for name, (meaning, columns) in _FUNCTION_TABLES.items()
    ]
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
    return [
        _make_table(name, meaning, columns, getattr(analyzer, name))
        for name, (meaning, columns) in _RUN_TABLES.items()
    ]


def _make_table(
    name: str, meaning: str, columns: Columns, frame: Callable[[], pl.DataFrame]
) -> SqlTable:
    return _table(name, meaning, _columns(columns), lambda: frame().lazy())


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
    meaning, columns = _RUN_TABLES[name]
    return meaning, tuple(_columns(columns))


def _columns(columns: Columns) -> list[SqlColumn]:
    types = pl.Schema(types_of(columns))
    return [_column(name, str(types[name]), meaning) for name, (_, meaning) in columns.items()]


def _column(name: str, type_: str, meaning: str) -> SqlColumn:
    unit = next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
    return SqlColumn(name=name, type=type_, unit=unit, meaning=meaning)


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
