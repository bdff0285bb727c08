"""The tables that SQL can ask: those of traces and of runs, with units and meanings."""

from __future__ import annotations

from collections.abc import Callable
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
from haiprof.trace_analysis.collectives import text_or_null
from haiprof.trace_analysis.device_time import gpu_events, with_kind
from haiprof.trace_analysis.function_patterns import FUNCTION_COLUMNS, TOTAL_COLUMNS
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

_STEP_COLUMNS: Columns = {
    **_RANK, "step": (pl.Int64, "number that the profiler gave it"),
    "start_ns": (pl.Int64, "on the trace's clock"), "end_ns": (pl.Int64, "on the trace's clock"),
    "dur_ns": (pl.Int64, "end less start"), "tid": (pl.Int64, "thread"),
}  # fmt: skip
_TYPES = {"i64": pl.Int64, "f64": pl.Float64, "str": pl.String}
_UNITS = (
    ("_bytes_per_s", "bytes/s"), ("_ns_per_step", "ns"), ("_ns", "ns"), ("bytes", "bytes"),
    ("_ratio", "ratio"), ("_count", "count"),
)  # fmt: skip
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
class SqlTable:
    """One table that SQL can ask."""

    name: str
    meaning: str
    columns: Columns
    frame: Callable[[], pl.LazyFrame]
    """Its rows, read when it is called."""

    @property
    def dtypes(self) -> dict[str, pl.DataType]:
        """Of the columns."""
        return dict(pl.Schema(types_of(self.columns)))

    def describe(self) -> list[dict[str, str]]:
        """Its columns as `describe_columns` has them."""
        return describe_columns(self.columns)


def describe_columns(columns: Columns) -> list[dict[str, str]]:
    """`name`, `type` (as polars calls it), `unit` (empty for none) and `meaning` of each column."""
    return [
        {
            "name": name, "type": str(pl.Schema(types_of(columns))[name]),
            "unit": next((unit for suffix, unit in _UNITS if name.endswith(suffix)), ""),
            "meaning": meaning,
        }
        for name, (_, meaning) in columns.items()
    ]  # fmt: skip


def sql_tables(path: str | Path, analysis: TraceQuestions | None = None) -> dict[str, SqlTable]:
    """The tables of traces, of a run, or of a run with traces."""
    path = Path(path)
    if not path.exists():
        raise TraceFormatError(f"{path}: no such file or folder")
    is_run = path.is_dir() and RunPaths(path).manifest.exists()
    try:
        has_traces = bool(trace_files(path))
    except TraceFormatError:
        has_traces = False
    tables = []
    if is_run or not has_traces:
        tables += run_tables(RunFrames(path))
    if has_traces:
        tables += trace_tables(analysis or TraceQuestions(path))
    return {table.name: table for table in tables}


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
    functions = [_table(name, *known, frames[name]) for name, known in _FUNCTION_TABLES.items()]
    if is_reduced_to_functions(window_files(analysis.path)):
        return functions

    def of_all_ranks(name: str) -> Callable[[], pl.LazyFrame]:
        return lambda: pl.concat(
            _of_rank(trace, name, rank) for rank, trace in analysis.traces.items()
        )

    found = []
    for name, meaning in _TRACE_TABLES.items():
        columns = {**_RANK, **{c.name: (_TYPES[c.type], c.meaning) for c in TABLES[name]}}
        if name == GPU:
            columns["kind"] = (pl.String, "computation, communication or memory")
        found.append(_table(name, meaning, columns, of_all_ranks(name)))
    marks = _table(STEPS, "profiler steps of the traces", _STEP_COLUMNS, of_all_ranks(STEPS))
    return [*found, marks, *functions]


def is_of_run(name: str) -> bool:
    """Whether a table holds what haiprof recorded of a run, and nothing of its traces."""
    return name in _RUN_TABLES


def run_tables(analyzer: RunFrames) -> list[SqlTable]:
    """The frames of a run."""
    _ = analyzer.files  # whether there is a run
    return [_table(name, *known, getattr(analyzer, name)) for name, known in _RUN_TABLES.items()]


def describe_run_table(name: str) -> list[dict[str, str]]:
    """Each column of a frame of a run."""
    if name not in _RUN_TABLES:
        raise UsageError(f"{name}: no frame of a run", hint=f"there are {', '.join(_RUN_TABLES)}")
    return describe_columns(_RUN_TABLES[name][1])


def _table(
    name: str, meaning: str, columns: Columns, frame: Callable[[], pl.DataFrame | pl.LazyFrame]
) -> SqlTable:
    return SqlTable(name=name, meaning=meaning, columns=columns, frame=lambda: frame().lazy())


def _of_rank(trace: Trace, name: str, rank: int) -> pl.LazyFrame:
    """One table of a rank; texts become strings only where the query uses them."""
    if name == STEPS:
        steps = trace.steps.with_columns(dur_ns=pl.col("end_ns") - pl.col("start_ns"))
        frame = steps.select(list(_STEP_COLUMNS)[1:])
    elif name == GPU:
        frame = with_kind(gpu_events(trace, None)).select(*(c.name for c in TABLES[GPU]), "kind")
    else:
        frame = getattr(trace, name)
    coded = [column for column, dtype in frame.schema.items() if dtype == pl.Enum]
    texts = [pl.col(c).cast(pl.String) if c == "name" else text_or_null(c) for c in coded]
    own = pl.lit(rank, dtype=pl.Int64).alias("rank")
    return frame.lazy().select(own, pl.all()).with_columns(texts)
