"""SQL over the frames of traces and runs: tables with units and meanings, one query, one result."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import msgspec
import polars as pl

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.base.version import PACKAGE
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
    frame: Callable[[], pl.LazyFrame]  # its rows, read when it is called

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
        analysis = analysis or TraceQuestions(path)
        if path.is_file():
            _ = analysis.files  # whether it is a trace: SQL that names no table would read nothing
        tables += trace_tables(analysis)
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

    def of_all_ranks(name: str) -> pl.LazyFrame:
        return pl.concat(_of_rank(trace, name, rank) for rank, trace in analysis.traces.items())

    found = []
    for name, meaning in _TRACE_TABLES.items():
        columns = {**_RANK, **{c.name: (_TYPES[c.type], c.meaning) for c in TABLES[name]}}
        if name == GPU:
            columns["kind"] = (pl.String, "computation, communication or memory")
        found.append(_table(name, meaning, columns, partial(of_all_ranks, name)))
    of_steps = partial(of_all_ranks, STEPS)
    marks = _table(STEPS, "profiler steps of the traces", _STEP_COLUMNS, of_steps)
    return [*found, marks, *functions]


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
    else:
        frame = with_kind(gpu_events(trace, None)) if name == GPU else getattr(trace, name)
    coded = [column for column, dtype in frame.schema.items() if dtype == pl.Enum]
    texts = [pl.col(c).cast(pl.String) if c == "name" else text_or_null(c) for c in coded]
    own = pl.lit(rank, dtype=pl.Int64).alias("rank")
    return frame.lazy().select(own, pl.all()).with_columns(texts)


_FIRST = ("select", "with", "from", "values", "explain", "show")
# `grammar`: words that stand before a parenthesis, types included. `functions`: polars' SQL's
# (crates/polars-sql/src/functions.rs) and the forms of its expressions; `unnest` is the one table
# function that reads nothing but its argument.
_WORDS = msgspec.json.decode(
    (PACKAGE / "trace_analysis" / "sql_words.json").read_bytes(), type=dict[str, frozenset[str]]
)

_TOKEN = re.compile(
    r"""(?P<blank>\s+)
    |(?P<line>--[^\n]*)
    |(?P<comment>/\*)
    |(?P<text>'(?:[^']|'')*')
    |(?P<name>"[^"\\]+"|`[^`\\]+`)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)
    |(?P<sign>[()\[\],.;+*/%<>=!|&^~:-])""",
    re.VERBOSE,
)
_SCHEMA_HINT = "haiprof trace query ... --schema"
_SIGNS_BEFORE_CALLS = frozenset("(,;+*/%<>=!|&^~:-[.")
_COMMENT_END = re.compile(r"\*/|/\*")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str

    @property
    def word(self) -> str:
        """In lower case; empty for all that is no bare word."""
        return self.text.lower() if self.kind == "word" else ""


def check_sql(sql: str) -> str:
    """Checks a query and rewrites it for polars."""
    tokens = list(_tokens(sql))
    bare = [token for token in tokens if token.kind != "blank"]
    words = [token.word for token in bare if token.text != "("]
    first = words[0] if words else ""
    if first not in _FIRST:
        raise UsageError(
            f"SQL begins with {first or sql[:10].strip()!r}: it can ask, and change nothing",
            hint="select ... from ...",
        )
    if first == "show" and words != ["show", "tables"]:
        raise UsageError("SQL: of show there is only show tables", hint=_SCHEMA_HINT)
    # Whether each name before a parenthesis is one that reads no file.
    for before, token, following in zip([_Token("", ""), *bare], bare, bare[1:], strict=False):
        if following.text != "(" or token.kind == "number" or token.text in _SIGNS_BEFORE_CALLS:
            continue
        is_alias = before.word in ("as", "with", "recursive")  # its columns follow
        if token.word.startswith(("read_", "scan_")) or (not token.word and not is_alias):
            raise no_files()
        if not is_alias and not any(token.word in known for known in _WORDS.values()):
            raise UsageError(f"SQL: no function {token.text!r} here", hint=_SCHEMA_HINT)
    return "".join(_texts(tokens))


def no_files() -> UsageError:
    """The error of a query that would leave the tables."""
    return UsageError("SQL reads the tables of the traces or the run, no files", hint=_SCHEMA_HINT)


def _tokens(sql: str) -> Iterator[_Token]:
    at = 0
    while at < len(sql):
        found = _TOKEN.match(sql, at)
        if found is None:
            raise UsageError(
                f"SQL: cannot read {sql[at : at + 20]!r}",
                hint="texts stand in '...', odd names in \"...\"",
            )
        kind, at = str(found.lastgroup), found.end()
        if kind == "comment":
            at = _after_comment(sql, at)
        # A backslash before a quote ends a text in one dialect and goes on with it in another.
        if kind == "text" and re.search(r"\\'", found[0]):
            raise UsageError("SQL: a backslash before a quote", hint="a quote in a text is ''")
        is_blank = kind in ("blank", "line", "comment")
        yield _Token("blank", " ") if is_blank else _Token(kind, found[0])


def _after_comment(sql: str, at: int) -> int:
    """Comments hold comments."""
    depth = 1
    for end in _COMMENT_END.finditer(sql, at):
        depth += 1 if end[0] == "/*" else -1
        if depth == 0:
            return end.end()
    raise UsageError("SQL: a comment does not end", hint="/* ... */")


def _texts(tokens: Sequence[_Token]) -> Iterator[str]:
    """Joins the tokens; a letter before a quote would change the kind of text."""
    before = ""
    for token in tokens:
        if token.kind in ("text", "name") and before in ("word", "number", "text", "name"):
            yield " "
        yield token.text
        before = token.kind


_FILE_SCAN = re.compile(r"\bSCAN \[", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_TEXT = re.compile("'[^']*'")
_SOURCES = re.compile(
    r"\b(?:from|join)\b(.*?)(?=\b(?:where|group|order|having|limit|on|using|join|union|intersect|"
    r"except|select)\b|[()]|$)",
    re.IGNORECASE | re.DOTALL,
)
_QUOTED_NAME = re.compile(r"""["'`]([^"'`]+)["'`]""")
_MANY = 40


def ask(tables: Mapping[str, SqlTable], sql: str) -> pl.DataFrame:
    """The answer to one question; only the tables that it names are read."""
    sql = check_sql(sql)
    words = {word.lower() for word in _WORD.findall(sql)}
    context = pl.SQLContext({
        name: table.frame() if name in words else pl.LazyFrame(schema=table.dtypes)
        for name, table in tables.items()
    })  # fmt: skip
    try:
        plan = context.execute(sql, eager=False)
        if _FILE_SCAN.search(plan.explain(optimized=False)):
            raise no_files()
        found = plan.collect()
        unnamed = "len" in found.columns and "len" not in words  # polars' name of count(*)
        return found.rename({"len": "count"}) if unnamed else found
    except (pl.exceptions.PolarsError, OSError) as error:
        raise _explain(error, tables, words) from None
    except pl.exceptions.PanicException as error:
        raise UsageError(f"polars cannot answer this: {_first_line(error)}") from None


def names_traces(tables: Mapping[str, SqlTable], sql: str) -> bool:
    """Whether a question names a table that is made of traces."""
    # The names after FROM and JOIN: a column may be called as a table is.
    lists = _SOURCES.findall(_TEXT.sub("''", sql))
    names = {name.lower() for found in lists for name in _WORD.findall(found)}
    return any(name not in _RUN_TABLES for name in names & tables.keys())


def _explain(error: Exception, tables: Mapping[str, SqlTable], words: Iterable[str]) -> UsageError:
    """The error of a query, with the names that exist."""
    text = _first_line(error)
    name = _QUOTED_NAME.search(text)
    if name and text.startswith("relation "):
        return UsageError(f"no table {name[1]!r}", hint=f"tables: {', '.join(tables)}")
    missing = isinstance(error, pl.exceptions.ColumnNotFoundError) or "no column named" in text
    if name and missing:
        texts = [f"{table}: {', '.join(list(known.columns)[:_MANY])}"
                 for table, known in tables.items() if table in set(words)]  # fmt: skip
        hint = "; ".join(texts) or f"tables: {', '.join(tables)}"
        return UsageError(f"no column {name[1]!r}", hint=hint)
    return UsageError(f"SQL: {text}", hint=f"{_SCHEMA_HINT} lists tables and columns")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
