"""Flight Recorder dumps of any job: the collective that does not match, and the ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from haiprof.base.collector import pause_collector
from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.units import ranks_text
from haiprof.run_analysis.lateness import find_mismatches
from haiprof.trace_format.flight_recorder import FLIGHT_SCHEMA, read_torch_dump

_RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)|(\d{1,7})(?=\.[a-z]+$|$)", re.IGNORECASE)
"""`nccl_trace_rank_3`, `dump_3.pickle`."""
_NOT_DUMPS = (".txt", ".log", ".md", ".py", ".csv")
_RUNNING = ("scheduled", "started")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightVerdict:
    """What the dumps of a job say together."""

    findings: tuple[str, ...]
    """Sentences, the most telling first; empty where the ranks agree and nothing is unfinished."""
    ranks: tuple[int, ...]
    """Whom the first finding names."""
    last: pl.DataFrame
    """Per group and rank the last collective: `group_name`, `rank`, `kind`, `sequence`, `state`
    (null where the backend does not tell), `element_count`, `dtype`, `created_ns`, `line`
    (of the job's code; null without stacks)."""
    notes: tuple[str, ...]
    """What could not be read, and what cannot be told."""


def judge_dumps(paths: Sequence[Path]) -> FlightVerdict:
    """Reads one dump per rank: files, or folders of them.

    Raises:
        MissingDataError: There is no dump.
        TraceFormatError: Two files are of one rank, or a name does not say its rank.
    """
    frames, notes = [], list[str]()
    members: dict[str, Sequence[int]] = {}
    with pause_collector():
        for rank, path in _by_rank(paths).items():
            try:
                flight = read_torch_dump(path)
            except TraceFormatError as error:
                notes.append(str(error))
                continue
            members |= flight.groups
            line = pl.Series("line", flight.lines, pl.String)
            own = flight.entries.with_columns(line, rank=pl.lit(rank, pl.Int64))
            frames.append(own.unique([*FLIGHT_SCHEMA, "rank"], maintain_order=True))
    if not frames:
        raise MissingDataError(notes[0] if notes else f"{paths[0]}: no dump in it")
    rows = pl.concat(frames)
    return _judge(rows, members, sorted(set(rows["rank"])), notes)


def _by_rank(paths: Sequence[Path]) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in paths:
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        for file in inside:
            is_named = not path.is_dir()
            named = _RANK.search(file.name)
            if not is_named and (file.suffix in _NOT_DUMPS or not file.is_file() or not named):
                continue
            if not named:
                raise TraceFormatError(
                    f"{file}: its name does not say its rank", hint="name it rank_0, rank_1, ..."
                )
            rank = int(named[1] or named[2])
            if rank in found:
                raise TraceFormatError(
                    f"two dumps of rank {rank}: {found[rank]} and {file}",
                    hint="name the files of one dump, one per rank",
                )
            found[rank] = file
    return dict(sorted(found.items()))


def _judge(
    rows: pl.DataFrame, members: dict[str, Sequence[int]], ranks: list[int], notes: list[str]
) -> FlightVerdict:
    names = dict(rows.select("group", "group_name").unique().rows())
    found: list[tuple[str, tuple[int, ...]]] = []
    contradictions = find_mismatches(rows)
    for each in contradictions:
        at = rows.filter((pl.col("group") == each.group) & (pl.col("sequence") == each.sequence))
        said = ", ".join(f"{ranks_text(r)} {value}" for value, r in each.values.items())
        what = at["kind"].mode().sort()[0]
        label = "collective" if each.what == "kind" else what
        text = (
            f"{label} {each.sequence} of group {names[each.group]} does not match: {said} "
            f"({each.what.replace('_', ' ')} differs{_lines(at.filter(~pl.col('p2p')))})"
        )
        found.append((text, each.odd))
    own = rows.filter(~pl.col("p2p"))
    last = own.sort("sequence", maintain_order=True).unique(
        ["group", "rank"], keep="last", maintain_order=True
    )
    for (group,), part in last.sort("group").group_by("group", maintain_order=True):
        in_group = members.get(str(group)) or part["rank"].to_list()
        if group not in {each.group for each in contradictions}:
            found += _judge_last(part, sorted({*in_group} & {*ranks}), names[str(group)])
        absent = sorted({*in_group} - {*ranks})
        if absent:
            notes.append(f"no dump of {ranks_text(absent)} of group {names[str(group)]}")
    waiting = rows.filter(pl.col("p2p") & pl.col("state").is_in(_RUNNING)) if _tells(rows) else None
    for rank, kind, name in () if waiting is None else waiting.select(
        "rank", "kind", "group_name"
    ).unique(maintain_order=True).rows():  # fmt: skip
        notes.append(f"rank {rank} has not completed {kind} of group {name}")
    if not _tells(rows):
        last = last.with_columns(state=pl.lit(None, pl.String))
        notes.append("which collectives have ended is not known: the backend does not tell (gloo)")
    columns = ["group_name", "rank", "kind", "sequence", "state", "element_count", "dtype",
               "created_ns", "line"]  # fmt: skip
    return FlightVerdict(
        findings=tuple(text for text, _ in found),
        ranks=found[0][1] if found else (),
        last=last.sort("group", "rank").select(columns),
        notes=tuple(notes),
    )


def _judge_last(
    part: pl.DataFrame, ranks: Sequence[int], name: str
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A group's last collective where a rank has not come to it, or where it does not end."""
    top = int(part["sequence"].max())  # type: ignore[arg-type]
    there = part.filter(pl.col("sequence") == top)
    if not there["state"].is_in(_RUNNING).any():
        return
    what = f"{there['kind'][0]} {top} of group {name}"
    away = tuple(rank for rank in ranks if rank not in there["rank"])
    if away:
        before = {
            rank: f"{kind} {number}" + (f" at {line}" if line else "")
            for rank, kind, number, line in part.select("rank", "kind", "sequence", "line").rows()
        }
        is_one = len(away) == 1
        said = before.get(away[0], "none")
        yield (
            f"{ranks_text(away)} {'has' if is_one else 'have'} not come to {what}, in which "
            f"{ranks_text(there['rank'].to_list())} "
            f"{'waits' if len(there) == 1 else 'wait'}{_lines(there)}; "
            f"the last one of {'it' if is_one else f'rank {away[0]}'} there is {said}",
            away,
        )
        return
    if not _tells(part):
        return
    not_begun = tuple(sorted(there.filter(pl.col("state") == "scheduled")["rank"]))
    running = tuple(sorted(there.filter(pl.col("state") == "started")["rank"]))
    if not_begun and running:
        yield (
            f"{what} has begun on {ranks_text(running)} and waits on {ranks_text(not_begun)}: its "
            "GPU is busy with what was enqueued before it",
            not_begun,
        )
    elif running:
        yield (
            f"{what} has begun on all of its ranks and not ended on {ranks_text(running)}: a link "
            "or a GPU that fails, or data that is still under way",
            running,
        )


def _tells(rows: pl.DataFrame) -> bool:
    """Whether states are known: some backends (gloo) leave each as it was enqueued."""
    return bool(rows["started_ns"].count() or rows["completed_ns"].count())


def _lines(there: pl.DataFrame) -> str:
    """`, at train.py:3 in step`: where the job's code enqueued it."""
    lines = there["line"].drop_nulls().unique(maintain_order=True).to_list()
    return f", at {' and '.join(lines[:2])}" if lines else ""
