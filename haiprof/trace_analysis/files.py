"""Trace files: rank, steps, what was read and what not, and what is odd about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.run_format.raw_traces import parse_stem
from haiprof.trace_analysis.device_time import device_name
from haiprof.trace_format.find import one_window, rank_of, trace_files, trace_name
from haiprof.trace_format.kineto.events import TABLES
from haiprof.trace_format.kineto.load import LoadReport
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.text import TraceText
from haiprof.trace_format.launch_checks import Finding, count_text, milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One rank's trace of one window."""

    path: Path
    rank: int  # as the file says; else the lowest number that no file of the window says
    host: str | None
    world_size: int | None
    is_packed: bool  # whether the file is gzip, by its content


def files_by_window(source: str | Path) -> list[list[Worker]]:
    """The traces of a file, a folder or a run, by window."""
    files = trace_files(source)
    found: list[list[Worker]] = []
    error = TraceFormatError(f"{source}: no trace in it")
    for number in itertools.count():
        try:
            members = one_window(files, number)
        except MissingDataError:
            break
        heads = [_worker(path) for path in members]
        workers = [head for head in heads if isinstance(head, Worker)]
        error = next((head for head in heads if isinstance(head, TraceFormatError)), error)
        known = {worker.rank for worker in workers}
        free = (number for number in itertools.count() if number not in known)
        ranked = [replace(each, rank=next(free)) if each.rank < 0 else each for each in workers]
        if ranked:
            found.append(sorted(ranked, key=lambda one: (one.rank, one.path.name)))
    if not found:
        raise error
    return found


def _worker(path: Path) -> Worker | TraceFormatError:
    """By what stands before its events, with rank -1 where that is not said; or why it is none."""
    text = TraceText(path)
    try:
        next(text.pieces(), None)
        rank = rank_of(path, text.metadata)
    except TraceFormatError as error:
        return error
    stem = parse_stem(path.name)
    sizes = [
        said["world_size"] for key in ("haiprof", "distributedInfo")
        if isinstance(said := text.metadata.get(key), dict)
        and type(said.get("world_size")) is int and said["world_size"] > 0
    ]  # fmt: skip
    known = stem.rank if stem else rank
    with path.open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return Worker(
        path=path, rank=-1 if known is None else known, host=stem.host if stem else None,
        world_size=next(iter(sizes), None), is_packed=is_packed,
    )  # fmt: skip


LOAD_SCHEMA = {
    "file": pl.String, "world_size": pl.Int64, "first_step": pl.Int64, "last_step": pl.Int64,
    "text_bytes": pl.Int64, "event_count": pl.Int64,
    **{f"{table}_count": pl.Int64 for table in TABLES},
    "redundant_count": pl.Int64, "not_used_count": pl.Int64, "bad_time_count": pl.Int64,
    "lost_count": pl.Int64, "repaired_count": pl.Int64, "truncated_bytes": pl.Int64,
    "fault_count": pl.Int64, "faults": pl.String,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """One rank's file."""

    path: Path
    rank: int | None  # as the file states; None where it does not
    world_size: int | None
    first_step: int | None  # number of its first profiler step
    last_step: int | None
    report: LoadReport
    start_ns: int | None = None  # first start of a call or a GPU event
    end_ns: int | None = None  # last end of one
    findings: tuple[Finding, ...] = ()
    host: str | None = None  # where the rank ran, which only haiprof records
    device_name: str | None = None  # of its GPU; None where the trace does not say it


def trace_file(trace: Trace) -> TraceFile:
    """Describes one file; a question for a pool."""
    steps = trace.steps["step"].to_list()
    start_ns, end_ns = trace.checked.window or (None, None)
    return TraceFile(
        path=trace.path, rank=trace.rank, world_size=trace.world_size,
        first_step=min(steps, default=None), last_step=max(steps, default=None),
        report=trace.report, start_ns=start_ns, end_ns=end_ns, findings=trace.checked.findings,
        host=host_name(trace), device_name=device_name(trace),
    )  # fmt: skip


def host_name(trace: Trace) -> str | None:
    """The host, which only haiprof records; None in other traces."""
    said = trace.metadata.get("haiprof")
    host = said.get("host") if isinstance(said, dict) else None
    return host if isinstance(host, str) else None


def load_frame(files: Mapping[int, TraceFile]) -> pl.DataFrame:
    """What was read of each rank's file, and what not."""
    rows = []
    for rank, file in files.items():
        faults = [finding for finding in file.findings if finding.is_fault]
        rows.append({
            "rank": rank,
            **{name: getattr(file.report, name, getattr(file, name, None)) for name in LOAD_SCHEMA},
            **{f"{table}_count": count for table, count in file.report.kept.items()},
            "file": trace_name(file.path),
            "fault_count": sum(finding.count for finding in faults),
            "faults": ", ".join(f"{each.count} {each.check}" for each in faults) or None,
            "redundant_count": sum(file.report.redundant.values()),
            "not_used_count": sum(file.report.not_used.values()),
        })  # fmt: skip
    return pl.DataFrame(rows, schema={"rank": pl.Int64, **LOAD_SCHEMA}, orient="row")


def load_notes(files: Mapping[int, TraceFile]) -> list[str]:
    """Notes on what was read, for people."""
    return [note for file in files.values() for note in file.report.notes]


CHECK_SCHEMA = {
    "rank": pl.Int64, "file": pl.String, "check": pl.String, "is_fault": pl.Boolean,
    "count": pl.Int64, "text": pl.String, "effect": pl.String, "answers": pl.String,
}  # fmt: skip


def check_frame(
    files: Mapping[int, TraceFile], offsets: pl.DataFrame | None = None
) -> pl.DataFrame:
    """What was found in each trace, and of all of them together."""
    of_all = [*_of_all_ranks(files), *(() if offsets is None else _corrected_clocks(offsets))]
    by_file = [(rank, trace_name(file.path), file.findings) for rank, file in files.items()]
    rows = [
        (rank, name, each.check, each.is_fault, each.count, each.text, each.effect,
         ", ".join(each.answers))
        for rank, name, findings in ((None, None, of_all), *by_file) for each in findings
    ]  # fmt: skip
    found = pl.DataFrame(rows, schema=CHECK_SCHEMA, orient="row")
    return found.sort(pl.col("is_fault").not_(), maintain_order=True)


def fault_lines(
    checks: pl.DataFrame, answers: Iterable[str], *, effect: str | None = None
) -> list[str]:
    """What must be said above an answer, a line per kind of fault."""
    lines = []
    for key, rows in _faults(checks, answers).group_by("check", maintain_order=True):
        ranks = rows["rank"].drop_nulls().to_list()
        of = f" (rank {', '.join(map(str, ranks[:4]))}{', ...' if len(ranks) > 4 else ''})"
        more = f"; and {len(rows) - 1} more" if len(rows) > 1 else ""
        line = f"{rows['text'][0]}: {effect or rows['effect'][0]}{more}"
        lines.append(f"{str(key[0]).replace('_', ' ')}{of if ranks else ''}: {line}")
    return lines


def fault_names(checks: pl.DataFrame, answers: Iterable[str]) -> str:
    """The kinds of fault that an answer rests on, for one line; empty where there is none."""
    faults = _faults(checks, answers)
    return ", ".join(name.replace("_", " ") for name in faults["check"].unique(maintain_order=True))


def _faults(checks: pl.DataFrame, answers: Iterable[str]) -> pl.DataFrame:
    concerned = pl.col("answers").str.split(", ")
    rests = pl.any_horizontal(concerned.list.contains(answer) for answer in answers)
    return checks.filter(pl.col("is_fault") & rests)


def _of_all_ranks(files: Mapping[int, TraceFile]) -> Iterator[Finding]:
    """Ranks without a trace, with other steps, or with no moment in common on their own clocks."""
    sizes = {file.world_size for file in files.values() if file.world_size}
    size = sizes.pop() if len(sizes) == 1 else 0
    count = size - len([rank for rank in files if rank < size])
    if count > 0:
        alone = len(files) == 1
        yield Finding(
            "missing_ranks", count,
            text=f"{count_text(count, 'rank')} of {size:,} without a trace",
            effect="who waited for whom cannot be said of one rank" if alone else
            "the last to arrive at a collective may be one of them: waits are lower bounds",
            is_fault=not alone,
        )  # fmt: skip
    steps = {rank: (file.first_step, file.last_step) for rank, file in files.items()}
    known = [each for each in steps.values() if each[0] is not None]
    if len(set(known)) > 1:
        usual = max(set(known), key=known.count)
        others = [rank for rank, each in steps.items() if each != usual]
        yield Finding(
            "different_steps", len(others),
            text=f"{count_text(len(others), 'rank')} with other profiler steps than {usual[0]} to "
            f"{usual[1]}: {', '.join(map(str, others[:8]))}",
            effect="ranks are compared over different steps; --steps takes those they have in "
            "common",
        )  # fmt: skip
    starts = [file.start_ns for file in files.values() if file.start_ns is not None]
    ends = [file.end_ns for file in files.values() if file.end_ns is not None]
    between_ns = max(starts, default=0) - min(ends, default=0)
    if len(starts) > 1 and between_ns > 0:
        yield Finding(
            "two_clocks", len(starts),
            text=f"the ranks' windows have no moment in common, {milliseconds(between_ns)} "
            "apart: recorded at different times, or on clocks that differ",
            effect="ranks are compared only by collectives that they have in common; without any, "
            "nothing is said of who waited",
        )  # fmt: skip


def _corrected_clocks(offsets: pl.DataFrame) -> Iterator[Finding]:
    """Ranks whose clocks stand apart by more than ends of collectives do; from `clock_offsets`."""
    apart = offsets.filter("corrected").sort(pl.col("offset_ns").abs(), descending=True)
    if apart.is_empty():
        return
    rank, offset = apart["rank"][0], int(apart["offset_ns"][0])
    more = f", the most of {len(apart)} that stand apart" if len(apart) > 1 else ""
    yield Finding(
        "two_clocks", len(apart),
        text=f"rank {rank}'s clock is {milliseconds(abs(offset))} "
        f"{'ahead of' if offset > 0 else 'behind'} the middle of all{more}, as the ends of "
        "collectives tell",
        effect="corrected: their times are moved by as much before ranks are compared or merged",
        is_fault=False,
    )  # fmt: skip
