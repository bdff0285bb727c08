"""Patterns of all ranks in one frame, cached or as small files; hardware samples joined to them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.intervals import Floats, Intervals, covered_lengths
from haiprof.base.units import ratio_text
from haiprof.run_format.unpack import read_text
from haiprof.trace_analysis.arrivals import (
    WAITS,
    arrival_lateness,
    arrivals,
    collectives,
    who_is_late,
)
from haiprof.trace_analysis.collectives import KERNELS_SCHEMA, clock_base_ns, match_collectives
from haiprof.trace_analysis.device_time import Steps, union_of, weighted_mean, with_rank
from haiprof.trace_analysis.files import TraceFile, trace_file
from haiprof.trace_analysis.function_patterns import (
    FUNCTIONS_SCHEMA,
    TOTALS_SCHEMA,
    RankFunctions,
    function_events,
    pattern_window,
    with_ratios,
    with_transfer_type,
    worker_pattern,
)
from haiprof.trace_analysis.kernel_names import COMMUNICATION
from haiprof.trace_analysis.pool import Pool, Progress, default_pool
from haiprof.trace_analysis.report_cache import (
    UNFIT,
    Answer,
    Reduced,
    cached_answers,
    common_steps,
    pack_answers,
    unpack_reduced,
    write_reduced,
)
from haiprof.trace_format.find import FUNCTIONS_SUFFIX, by_rank, window_files
from haiprof.trace_format.frame_columns import Type
from haiprof.trace_format.kineto.rank_trace import Trace

_RATE, _SPREAD = "bandwidth_bytes_per_s", "bandwidth_std_bytes_per_s"
_KEYS = ("rank", "type", "name")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """What every rank's functions did."""

    functions: pl.DataFrame
    """`rank`, `worker.FUNCTIONS_SCHEMA`, and of communication `wait_ns`, `transfer_ns` and
    `missing`, the reason why these and its bandwidth are null."""
    totals: pl.DataFrame
    """One row per rank: columns of `WorkerPattern.totals`."""
    lateness: pl.DataFrame
    """From `arrival_lateness`: who begins collectives later than the others."""
    who_is_late: str
    """The same in words, or why it is not known."""
    moved_clocks: tuple[int, ...]
    """Ranks whose clock was corrected although the trace names no host: a link that is slow in
    every collective would look the same."""

    left_out: tuple[str, ...] = ()
    """What files of the ranks' functions have left out, in words; empty from traces."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have a trace."""
        return tuple(self.totals["rank"].to_list())


def gather_patterns(workers: Mapping[int, RankFunctions]) -> Patterns:
    """Puts the patterns of all ranks together.

    The functions of all ranks. A communication function's `bandwidth_bytes_per_s` is its bus
    bandwidth as nccl-tests defines it, over the transfer alone: from the arrival of the last
    rank to the rank's own end. Where the same collective is not found on all ranks of its
    group the transfer is not known, and `missing` says why.

    Source: nccl-tests doc/PERFORMANCE.md; `haiprof.trace_analysis.arrivals` for the transfer.
    """
    kernels = match_collectives(with_rank((r, w.collectives) for r, w in workers.items()))
    totals = with_rank((r, w.totals) for r, w in workers.items())
    hosts = totals.select("rank", "host")
    waits, offsets = arrivals(kernels, hosts)
    lateness = arrival_lateness(waits, offsets)
    functions = with_rank((r, w.functions) for r, w in workers.items())
    moved = functions.join(_throughput(waits), on=list(_KEYS), how="left", maintain_order="left")
    talks = pl.col("kind") == COMMUNICATION
    alone = pl.lit("no other rank's trace has the same collective")
    lacks = talks & pl.col("own_rate").is_null()
    return Patterns(
        functions=moved.with_columns(
            pl.when(talks).then("own_rate").otherwise(_RATE).alias(_RATE),
            pl.when(talks).then("own_spread").otherwise(_SPREAD).alias(_SPREAD),
            missing=pl.when(lacks).then(pl.coalesce("missing", alone)),
        ).drop("own_rate", "own_spread"),
        totals=totals,
        moved_clocks=()
        if not hosts["host"].null_count()
        else tuple(offsets.filter("corrected")["rank"].to_list()),
        lateness=lateness,
        who_is_late=who_is_late(lateness, waits),
    )


def _throughput(waits: pl.DataFrame) -> pl.DataFrame:
    """Per rank and function: `wait_ns`, `transfer_ns`, bus bandwidth and its deviation."""
    bus, whole = pl.col("bus_bandwidth_bytes_per_s"), pl.col("transfer_ns")
    work = collectives(waits).select("collective", work=bus * whole)
    rows = with_transfer_type(waits.join(work, on="collective", how="left"))
    time = pl.col("transfer_ns")
    timed = time.is_not_null() & pl.col("work").is_not_null() & (time > 0)
    rate = pl.col("work") / time
    weighted = rows.with_columns(
        rate=pl.when(timed).then(rate),
        weight=pl.when(timed).then(time),
        missing=pl.coalesce(
            "missing", pl.when(pl.col("work").is_null()).then(pl.lit("sizes were not recorded"))
        ),
    )
    mean, spread = weighted_mean(pl.col("rate"), pl.col("weight"))
    known = pl.col("weight").sum() > 0
    return weighted.group_by(_KEYS).agg(
        *(pl.when(pl.col(name).count() > 0).then(pl.col(name).sum()) for name in WAITS),
        own_rate=pl.when(known).then(mean),
        own_spread=pl.when(known).then(spread),
        missing=pl.col("missing").drop_nulls().first(),
    )


_FRAMES = ("functions", "totals", "collectives")


def cached_patterns(
    paths: Sequence[Path],
    options: Mapping[str, Any],
    compute: Callable[[Sequence[Path]], Sequence[RankFunctions]],
) -> list[RankFunctions]:
    """The pattern of each trace, computed where it is not cached."""
    found = cached_answers(
        paths, "patterns", options, _FRAMES,
        lambda left: [{name: getattr(each, name) for name in _FRAMES} for each in compute(left)],
    )  # fmt: skip
    return [RankFunctions(**each) for each in found]  # type: ignore[arg-type] # all are frames


MAJORITY_RATIO = 0.5
"""A sample is a function's where it ran for at least this part of what the sample is of: below it
the sample says more about something else. Own choice."""

_SERIES = ("source", "entity")
COUNTERS_SCHEMA: dict[str, type[pl.DataType]] = {
    "kind": pl.String, "type": pl.String, "name": pl.String, "source": pl.String,
    "entity": pl.String, "metric": pl.String, "unit": pl.String, "mean": pl.Float64,
    "std": pl.Float64, "min": pl.Float64, "max": pl.Float64, "sample_count": pl.Int64,
    "interval_ns": pl.Int64,
}  # fmt: skip


def function_counters(
    trace: Trace, samples: pl.DataFrame, *, steps: Steps = None, geometry: bool = False
) -> pl.DataFrame:
    """What the counters of a rank's GPU and host were while its functions ran.

    Source: PerfTracker (seed 001), which joins samples of 100 us to functions.
    """
    window = pattern_window(trace, steps)
    base = clock_base_ns(trace)
    inside = pl.col("time_ns").is_between(window.start + base, window.end + base)
    known = samples.filter(inside).drop_nulls("value").with_columns(pl.col("time_ns") - base)
    rows: list[pl.DataFrame] = [pl.DataFrame(schema=COUNTERS_SCHEMA)]
    if not known.is_empty():
        events, _ = function_events(trace, window, geometry=geometry)
        for kind, frame in events.items():
            rows += _of_kind(kind, frame, known)
    return pl.concat(rows)


def _of_kind(kind: str, events: pl.DataFrame, samples: pl.DataFrame) -> Iterator[pl.DataFrame]:
    functions: list[tuple[str | None, str | None, Intervals]] = [(None, None, union_of(events))]
    texts = events.with_columns(pl.col("type", "name").cast(pl.String))
    for (type_, name), own in texts.group_by("type", "name", maintain_order=True):
        functions.append((str(type_), str(name), union_of(own)))
    for series in samples.partition_by(_SERIES):
        times = np.unique(series["time_ns"].to_numpy())
        if len(times) < 2 or events.is_empty():
            continue
        for type_, name, spans in functions:
            ran = covered_lengths(spans, times[:-1], times[1:])
            intervals = np.diff(times)
            weights: Floats = np.where(ran >= MAJORITY_RATIO * intervals, ran, 0).astype(np.float64)
            if not weights.any():
                continue
            known = pl.DataFrame({"time_ns": times[1:], "weight": weights})
            value, weight = pl.col("value"), pl.col("weight")
            mean, spread = weighted_mean(value, weight)
            rows = series.join(known.filter(weight > 0), on="time_ns")
            found = rows.group_by(*_SERIES, "metric", "unit", maintain_order=True).agg(
                mean=mean,
                std=spread,
                min=value.min(),
                max=value.max(),
                sample_count=pl.len().cast(pl.Int64),
                interval_ns=pl.lit(int(np.median(intervals)), pl.Int64),
            )
            yield found.select(
                pl.lit(kind).alias("kind"), pl.lit(type_, pl.String).alias("type"),
                pl.lit(name, pl.String).alias("name"), *list(COUNTERS_SCHEMA)[3:],
            )  # fmt: skip


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
    """Writes the pattern of each trace, from which `TraceQuestions.patterns` answers the same."""
    traces = window_files(path, window)
    pool = pool or default_pool(traces)
    options = {"steps": steps, "geometry": geometry}
    found = pool.map(file_and_pattern, traces, options, progress)
    return [
        write_reduced(folder / f"{trace.name}{FUNCTIONS_SUFFIX}",
                      pack_pattern(steps, file, pattern, geometry=geometry))
        for trace, (file, pattern) in zip(traces, found, strict=True)
    ]  # fmt: skip


def file_and_pattern(
    trace: Trace, *, steps: Steps = None, geometry: bool = False
) -> tuple[TraceFile, RankFunctions]:
    """What a file is, and its pattern; a question for a pool."""
    return trace_file(trace), worker_pattern(trace, steps=steps, geometry=geometry)


def read_pattern(path: Path) -> tuple[Reduced, TraceFile, RankFunctions]:
    """The content of a file, the trace that it was made of, and its pattern."""
    try:
        data = read_text(path, limit_bytes=_TEXT_LIMIT_BYTES)
        found = unpack_reduced(data, path, "haiprof_functions", VERSION)
        file, head = found.answers["file"], found.head
        if not isinstance(file, TraceFile):
            raise TypeError("no trace file")
        known = {"geometry": bool(head["geometry"]), "left_out": list(map(str, head["left_out"]))}
        return replace(found, head=known), file, _pattern(found.answers)
    except UNFIT as error:
        raise TraceFormatError(
            f"{path}: no functions that this haiprof can read: {error}",
            hint="haiprof trace functions TRACES --reduce DIR writes them again",
        ) from None


def patterns_of_files(paths: Sequence[Path], asked: Steps, *, geometry: bool = False) -> Patterns:
    """The patterns of all ranks, as from their traces but for what each file has left out."""
    every = [read_pattern(path) for path in paths]
    read = {file.path: (found, pattern) for found, file, pattern in every}
    common_steps([found for found, _ in read.values()], asked, command="trace functions")
    known = [found.head["geometry"] for found, _ in read.values()]
    if not all(known) and (geometry or any(known)):
        raise MissingDataError(
            f"{paths[known.index(False)]}: kernels by name alone, without grid and block",
            hint="haiprof trace functions TRACES --geometry --reduce DIR",
        )
    files = by_rank(file for _, file, _ in every)
    found = gather_patterns({rank: read[file.path][1] for rank, file in files.items()})
    lacks = [f"rank {rank}: {text}" for rank, file in files.items()
             for text in read[file.path][0].head["left_out"]]  # fmt: skip
    return replace(found, left_out=tuple(lacks))


def pack_pattern(
    steps: Steps, file: TraceFile, pattern: RankFunctions, *, geometry: bool = False
) -> bytes:
    """The bytes of a file; where too many, without what ran least, and of collectives the last."""
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


def _pattern(answers: Mapping[str, Answer]) -> RankFunctions:
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


def _frame(answer: Answer, schema: Mapping[str, Type]) -> pl.DataFrame:
    if not isinstance(answer, pl.DataFrame):
        raise TypeError("no frame")
    return answer.select(pl.col(name).cast(kind) for name, kind in schema.items())
