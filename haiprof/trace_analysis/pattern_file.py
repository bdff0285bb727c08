"""Patterns as files: a rank's functions in at most 30 KB, so that its trace may be discarded."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError, UsageError
from haiprof.base.safe_files import make_named_folder, write_file
from haiprof.base.units import ratio_text
from haiprof.run_format.unpack import read_text
from haiprof.trace_analysis.collectives import KERNELS_SCHEMA
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.files import TraceFile, trace_file
from haiprof.trace_analysis.function_patterns import (
    FUNCTIONS_SCHEMA,
    TOTALS_SCHEMA,
    RankFunctions,
    with_ratios,
    worker_pattern,
)
from haiprof.trace_analysis.pattern_gathering import Patterns, gather_patterns
from haiprof.trace_analysis.pool import Pool, Progress, default_pool
from haiprof.trace_analysis.report_cache import (
    UNFIT,
    Answer,
    common_steps,
    pack_answers,
    unpack_answers,
)
from haiprof.trace_format.find import FUNCTIONS_SUFFIX, by_rank, window_files
from haiprof.trace_format.kineto.rank_trace import Trace

VERSION = 2
"""2: functions have `median_block_count`.
1: gzip of a line of JSON (`haiprof_functions`, the version; `steps`; `geometry`; `left_out`,
what is not in the file, in words), then four answers as `report_cache` packs them, their frames as
plain Arrow: `file`; `functions`, without the two ratios that follow from it; `totals`;
`collectives`, whose `event` and `start_ns` are differences to the row above, and `end_ns` to
`start_ns`."""
SIZE_LIMIT_BYTES = 30_000
"""Source: EROICA (arXiv 2506.08528), some 30 KB per worker of 3 GB."""
_TEXT_LIMIT_BYTES = 64 << 20
_LEVEL = 6
_SHRINK = 0.97
"""Of the rows that may fit: bytes do not shrink quite as rows do. Own choice."""
_DERIVED = ("share_ratio", "bottleneck_ratio")
_STORED = {name: kind for name, kind in FUNCTIONS_SCHEMA.items() if name not in _DERIVED}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternFile:
    """The content of a file."""

    path: Path
    steps: Steps
    """First profiler step and the one after the last; None: all that was recorded."""
    geometry: bool
    """Whether kernels are told apart by grid and block."""
    file: TraceFile
    """The trace that it was made of."""
    pattern: RankFunctions
    left_out: tuple[str, ...]
    """What its size left no room for, in words."""

    @property
    def rank(self) -> int | None:
        """As the trace stated it; None where it did not."""
        return self.file.rank


def reduce_patterns(
    path: str | Path,
    folder: Path,
    *,
    steps: Steps = None,
    geometry: bool = False,
    window: int | None = None,
    pool: Pool | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Writes the pattern of each trace, from which `RankQuestions.patterns` answers the same."""
    traces = window_files(path, window)
    pool = pool or default_pool(traces)
    options = {"steps": steps, "geometry": geometry}
    found = pool.map(file_and_pattern, traces, options, progress)
    return [
        write_pattern(trace, folder, pack_pattern(steps, file, pattern, geometry=geometry))
        for trace, (file, pattern) in zip(traces, found, strict=True)
    ]


def file_and_pattern(
    trace: Trace, *, steps: Steps = None, geometry: bool = False
) -> tuple[TraceFile, RankFunctions]:
    """What a file is, and its pattern; a question for a pool."""
    return trace_file(trace), worker_pattern(trace, steps=steps, geometry=geometry)


def write_pattern(trace: Path, folder: Path, data: bytes) -> Path:
    """Writes a trace's pattern under its name, replacing an existing file."""
    target = folder / f"{trace.name}{FUNCTIONS_SUFFIX}"
    try:
        make_named_folder(folder)
        write_file(target, data, below=folder)
    except OSError as error:
        raise UsageError(f"--reduce {folder}: {error.strerror}") from None
    return target


def read_pattern(path: Path) -> PatternFile:
    """The content of a file."""
    try:
        data = read_text(path, limit_bytes=_TEXT_LIMIT_BYTES)
        at = data.index(b"\n") + 1
        head = json.loads(data[:at])
        if head["haiprof_functions"] != VERSION:
            raise ValueError(f"version {head['haiprof_functions']}")
        steps = None if head["steps"] is None else (int(head["steps"][0]), int(head["steps"][1]))
        answers = unpack_answers(data[at:], path)
        file = answers["file"]
        if not isinstance(file, TraceFile):
            raise TypeError("no trace file")
        return PatternFile(
            path=path, steps=steps, geometry=bool(head["geometry"]), file=file,
            pattern=_pattern(answers), left_out=tuple(map(str, head["left_out"])),
        )  # fmt: skip
    except UNFIT as error:
        raise TraceFormatError(
            f"{path}: no functions that this haiprof can read: {error}",
            hint="haiprof trace functions TRACES --reduce DIR writes them again",
        ) from None


def patterns_of_files(paths: Sequence[Path], asked: Steps, *, geometry: bool = False) -> Patterns:
    """The patterns of all ranks, as from their traces but for what each file has left out."""
    read = [read_pattern(path) for path in paths]
    common_steps(read, asked, command="functions")
    known = [each.geometry for each in read]
    if not all(known) and (geometry or any(known)):
        raise MissingDataError(
            f"{paths[known.index(False)]}: kernels by name alone, without grid and block",
            hint="haiprof trace functions TRACES --geometry --reduce DIR",
        )
    ranks = by_rank(read)
    found = gather_patterns({rank: each.pattern for rank, each in ranks.items()})
    lacks = [f"rank {rank}: {text}" for rank, each in ranks.items() for text in each.left_out]
    return replace(found, left_out=tuple(lacks))


def pack_pattern(
    steps: Steps, file: TraceFile, pattern: RankFunctions, *, geometry: bool = False
) -> bytes:
    """The bytes of a file; where they are too many, without what weighs least.

    Functions are left out by the time in which they ran, the least first; of collectives the
    last, so that those that are left are the same on every rank.
    """
    functions, collectives = pattern.functions, pattern.collectives
    while True:
        content = replace(pattern, functions=functions, collectives=collectives)
        head = {"haiprof_functions": VERSION, "steps": steps, "geometry": geometry,
                "left_out": _left_out(pattern, content)}  # fmt: skip
        # Times as small numbers, of which gzip makes more.
        first = (pl.col(name).diff().fill_null(pl.col(name)) for name in ("event", "start_ns"))
        answers: dict[str, Answer] = {
            "file": file,
            "functions": content.functions.select(list(_STORED)),
            "totals": content.totals,
            "collectives": content.collectives.with_columns(
                *first, end_ns=pl.col("end_ns") - pl.col("start_ns")
            ),
        }
        text = json.dumps(head).encode() + b"\n" + pack_answers(answers, plain=True)
        data = gzip.compress(text, _LEVEL, mtime=0)
        if len(data) <= SIZE_LIMIT_BYTES or not (len(functions) or len(collectives)):
            return data
        excess = len(data) - SIZE_LIMIT_BYTES
        of_functions, of_collectives = _size(functions), _size(collectives)
        if of_functions > of_collectives:
            count = _fewer(functions, excess / of_functions)
            place = pl.col("covered_ns").rank("ordinal", descending=True)
            functions = functions.filter(place <= count)
        else:
            collectives = collectives.head(_fewer(collectives, excess / of_collectives))


def _left_out(whole: RankFunctions, kept: RankFunctions) -> list[str]:
    lacks = []
    count = len(whole.functions) - len(kept.functions)
    if count:
        gone = whole.functions.join(kept.functions, on=["kind", "type", "name"], how="anti")
        share = gone["share_ratio"].max()
        most = ratio_text(share if isinstance(share, float) else None)
        lacks.append(f"{count} functions that ran for at most {most} of the time are left out")
    if len(kept.collectives) < len(whole.collectives):
        lacks.append(
            f"only the first {len(kept.collectives)} of {len(whole.collectives)} collectives: "
            "bandwidth, waiting and who is late rest on them"
        )
    return lacks


def _fewer(frame: pl.DataFrame, excess_ratio: float) -> int:
    """How many rows are kept where such a part of their bytes is too much: at least a third."""
    return int(len(frame) * min(_SHRINK, max(1 - excess_ratio, 1 / 3)))


def _size(frame: pl.DataFrame) -> int:
    return len(gzip.compress(pack_answers({"": frame}, plain=True), _LEVEL))


def _pattern(answers: dict[str, Answer]) -> RankFunctions:
    totals = _frame(answers["totals"], TOTALS_SCHEMA)
    functions = _frame(answers["functions"], _STORED)
    collectives = _frame(answers["collectives"], KERNELS_SCHEMA)
    window_ns = int(totals["window_ns"].item())
    times = (pl.col("event").cum_sum(), pl.col("start_ns").cum_sum())
    return RankFunctions(
        functions=with_ratios(functions, window_ns).select(list(FUNCTIONS_SCHEMA)),
        totals=totals,
        collectives=collectives.with_columns(*times).with_columns(
            end_ns=pl.col("start_ns") + pl.col("end_ns")
        ),
    )


def _frame(answer: Answer, schema: dict[str, type[pl.DataType]]) -> pl.DataFrame:
    if not isinstance(answer, pl.DataFrame):
        raise TypeError("no frame")
    return answer.select(pl.col(name).cast(kind) for name, kind in schema.items())
