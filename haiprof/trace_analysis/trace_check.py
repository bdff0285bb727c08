"""Trace check: what is odd about the traces of a job, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import polars as pl

from haiprof.trace_analysis.files import TraceFile
from haiprof.trace_format.checks.finding import ALL_RANKS, Finding, count_text, milliseconds
from haiprof.trace_format.find import trace_name

CHECK_SCHEMA = {
    "rank": pl.Int64,
    "file": pl.String,
    "check": pl.String,
    "is_fault": pl.Boolean,
    "count": pl.Int64,
    "text": pl.String,
    "effect": pl.String,
    "answers": pl.String,
}


def check_frame(
    files: Mapping[int, TraceFile], offsets: pl.DataFrame | None = None
) -> pl.DataFrame:
    """What was found in each trace, and of all of them together."""
    of_all = [*rank_findings(files), *([] if offsets is None else _corrected_clocks(offsets))]
    rows = [_row(None, None, finding) for finding in of_all]
    rows += [
        _row(rank, trace_name(file.path), finding)
        for rank, file in files.items()
        for finding in file.findings
    ]
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


def _row(rank: int | None, file: str | None, finding: Finding) -> dict[str, object]:
    names = ("check", "is_fault", "count", "text", "effect")
    row = {name: getattr(finding, name) for name in names}
    return {"rank": rank, "file": file, **row, "answers": ", ".join(finding.answers)}


def rank_findings(files: Mapping[int, TraceFile]) -> list[Finding]:
    """What is odd about the traces of several ranks together."""
    return [*_missing_ranks(files), *_different_steps(files), *_different_times(files)]


def _missing_ranks(files: Mapping[int, TraceFile]) -> Iterator[Finding]:
    sizes = {file.world_size for file in files.values() if file.world_size}
    if len(sizes) != 1:
        return
    size = sizes.pop()
    count = size - len([rank for rank in files if rank < size])
    if count <= 0:
        return
    alone = len(files) == 1
    yield Finding(
        check="missing_ranks",
        count=count,
        text=f"{count_text(count, 'rank')} of {size:,} without a trace",
        effect="who waited for whom cannot be said of one rank" if alone else
        "the last to arrive at a collective may be one of them: waits are lower bounds",
        answers=ALL_RANKS,
        is_fault=not alone,
    )  # fmt: skip


def _different_steps(files: Mapping[int, TraceFile]) -> Iterator[Finding]:
    steps = {rank: (file.first_step, file.last_step) for rank, file in files.items()}
    known = [each for each in steps.values() if each[0] is not None]
    if len(set(known)) < 2:
        return
    usual = max(set(known), key=known.count)
    others = [rank for rank, each in steps.items() if each != usual]
    yield Finding(
        check="different_steps",
        count=len(others),
        text=f"{count_text(len(others), 'rank')} with other profiler steps than {usual[0]} to "
        f"{usual[1]}: {', '.join(map(str, others[:8]))}",
        effect="ranks are compared over different steps; --steps takes those they have in common",
        answers=(*ALL_RANKS, "temporal", "steps", "kernels"),
    )


def _different_times(files: Mapping[int, TraceFile]) -> Iterator[Finding]:
    """Windows that have no moment in common, on the clocks that the files themselves have."""
    windows = [
        (file.start_ns, file.end_ns)
        for file in files.values()
        if file.start_ns is not None and file.end_ns is not None
    ]
    if len(windows) < 2:
        return
    latest, earliest = max(start for start, _ in windows), min(end for _, end in windows)
    if latest <= earliest:
        return
    yield Finding(
        check="two_clocks",
        count=len(windows),
        text=f"the ranks' windows have no moment in common, {milliseconds(latest - earliest)} "
        "apart: recorded at different times, or on clocks that differ",
        effect="ranks are compared only by collectives that they have in common; without any, "
        "nothing is said of who waited",
        answers=ALL_RANKS,
    )


def _corrected_clocks(offsets: pl.DataFrame) -> Iterator[Finding]:
    """Ranks whose clocks stand apart by more than ends of collectives do; from `clock_offsets`."""
    apart = offsets.filter("corrected").sort(pl.col("offset_ns").abs(), descending=True)
    if apart.is_empty():
        return
    rank, offset = apart["rank"][0], int(apart["offset_ns"][0])
    more = f", the most of {len(apart)} that stand apart" if len(apart) > 1 else ""
    yield Finding(
        check="two_clocks",
        count=len(apart),
        text=f"rank {rank}'s clock is {milliseconds(abs(offset))} "
        f"{'ahead of' if offset > 0 else 'behind'} the middle of all{more}, as the ends of "
        "collectives tell",
        effect="corrected: their times are moved by as much before ranks are compared or merged",
        answers=ALL_RANKS,
        is_fault=False,
    )
