"""NCCL's own files as a witness of collectives: where they lie, what they say of each rank."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.base.units import rate_text, ratio_text, visible
from haiprof.run_analysis.collectives import FlightVerdict, judge_dumps
from haiprof.run_analysis.run_files import RunFiles, integer, mapping, note_damage, text
from haiprof.run_format.entities import plain_uuid
from haiprof.trace_format import nccl_files

_ALL_BYTES = 64 << 20  # of all files together, where they are many
_LEAST_BYTES = 64 << 10
_FILE_LIMIT = 100_000
_INSPECTOR = re.compile(r".+-pid\d+\.log|nccl_inspector_metrics_.+\.prom")
_SAID = 3
_GROUP = ["source", "communicator", "kind"]
_WRITERS = {
    "inspector": "NCCL's Inspector", "prometheus": "NCCL's Inspector",
    "profiler": "NCCL's profiler plugin",
}  # fmt: skip
_WAIT_WORDS = {
    "gpu_ns": "for the own GPU", "peer_ns": "for room at the peer", "send_ns": "for sends to end",
    "receive_ns": "for data (network, or a late peer)", "flush_ns": "for data to be visible",
}  # fmt: skip
RANK_SCHEMA = {
    "rank": pl.Int64,  # of the job; null where its process is none of the run's
    **nccl_files.COLLECTIVE_SCHEMA,
    "bus_ratio": pl.Float64,  # to the median of the others with the same kind and message
    "since_ns": pl.Int64,  # from the last one until the run's end, or until it was read
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclRank:
    """A rank that NCCL itself names in one communicator."""

    rank: int | None  # in the communicator; None where a process alone is named
    size: int | None  # ranks of the communicator
    pid: int | None
    why: str  # for people
    host: str | None = None  # of its process, where that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclReport:
    """What NCCL's files say of the ranks."""

    collectives: pl.DataFrame
    """Columns of RANK_SCHEMA: per rank, communicator and kind one row, whose times and rates are of
    the message with most records."""
    waits: pl.DataFrame  # `rank`, and columns of WAIT_SCHEMA
    cut_count: int  # files whose end alone was read: `record_count` is of that part
    interval_ns: int  # how often the Inspector writes; 0 where that is not known
    notes: tuple[str, ...]  # what could not be read

    @property
    def known(self) -> NcclReport | None:
        """Itself; None where it says nothing."""
        return self if self.collectives.height or self.waits.height else None

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"collectives": self.collectives.to_dicts(), "waits": self.waits.to_dicts()}

    def lines(self) -> Iterator[str]:
        """The most telling in sentences."""
        groups = self.collectives.partition_by(_GROUP, maintain_order=True)
        for part in sorted(groups, key=lambda p: -int(p["record_count"].sum()))[:_SAID]:
            yield _group_text(part, self.interval_ns)
        total = {name: float(self.waits[name].sum()) for name in nccl_files.WAITS}
        if whole := sum(total.values()):
            parts = [f"{ratio_text(ns / whole)} {_WAIT_WORDS[name]}" for name, ns in total.items()]
            yield f"steps of NCCL's network proxy waited {', '.join(parts)}"
        if self.cut_count:
            yield f"only the ends of {self.cut_count} large files of NCCL's were read"


def _group_text(part: pl.DataFrame, interval_ns: int) -> str:
    """`AllReduce of 8 ranks, 25.0 MiB: 170 GiB/s of bus bandwidth, from ... (NCCL's Inspector)`."""
    rate = part["bus_bytes_per_s"].median()
    whole = max(part["size"][0] or 0, part.height)
    count = f"{whole} ranks" if part.height == whole else f"{part.height} of {whole} ranks"
    said = f"{visible(part['kind'][0])} of {count}"
    said += f", {visible(part['message'][0])}" if part["message"][0] else ""
    said += f": {rate_text(rate)} of bus bandwidth" if isinstance(rate, float) else ""
    slow = part.drop_nulls("bus_ratio").sort("bus_ratio")
    rates = [rate_text(each) for each in slow["bus_bytes_per_s"]]
    if rates and rates[0] != rates[-1]:
        ratio = ratio_text(slow["bus_ratio"][0])
        said += f", from {rates[0]} ({_name(slow)}, {ratio} of the others' median) "
        said += f"to {rates[-1]} ({_name(slow.tail(1))})"
    if (late := _behind(part, interval_ns)).height:
        said += f"; the last one is {late['sequence'][0]} on {_name(late)}"
        said += f", {late['most'][0]} at most"
    return f"{said} ({_WRITERS[part['source'][0]]})"


def _name(row: pl.DataFrame) -> str:
    """The rank of a first row, of the job where that is known."""
    rank, member, uuid = row.select("rank", "member", "gpu_uuid").row(0)
    if rank is None and member is None:
        return f"GPU {uuid}"
    return f"rank {rank}" if rank is not None else f"rank {member} of the communicator"


def nccl_report(files: RunFiles, *, limit_bytes: int = nccl_files.LIMIT_BYTES) -> NcclReport:
    """What the processes of a run wrote, each rank's last attempt."""
    paths, notes = files_of_run(files)
    until_ns = files.about.end_wall_ns or time.time_ns()
    report = _report(paths, _known_processes(files), until_ns, limit_bytes)
    collectives = report.collectives.drop_nulls("rank")
    if collectives.is_empty() and report.collectives.height:
        why = "whose NCCL's files there are is not known: no rank is told"
        notes.append(f"{paths[0].parent}: {why}")
    return replace(
        report, collectives=_against_others(collectives), waits=report.waits.drop_nulls("rank"),
        interval_ns=_interval_ns(files), notes=(*report.notes, *notes),
    )  # fmt: skip


def nccl_folder_report(paths: Sequence[Path]) -> NcclReport:
    """What files, or folders of them, say without a run: ranks are those of the communicators."""
    inside = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    report = _report(inside, lambda _: None, time.time_ns(), nccl_files.LIMIT_BYTES)
    if report.known is None:
        nothing = f"{next(iter(paths), Path())}: nothing is in it"
        raise MissingDataError(next(iter(report.notes), nothing))
    return replace(report, collectives=_against_others(report.collectives))


def ranks_behind(report: NcclReport) -> list[NcclRank]:
    """Ranks whose last collective of a kind is an earlier one than that of others.

    The profiler plugin writes what has begun, the Inspector what has ended: of the latter such a
    rank may wait, too.
    """
    found = []
    for part in report.collectives.partition_by(_GROUP, maintain_order=True):
        verb = "begun" if part["source"][0] == "profiler" else "ended"
        for row in _behind(part, report.interval_ns).iter_rows(named=True):
            why = f"its last {visible(row['kind'])[:40]} that has {verb} is number "
            why += f"{row['sequence']}, others' {row['most']}, as {_WRITERS[row['source']]} wrote"
            found.append(NcclRank(rank=row["member"], size=row["size"], pid=row["pid"],
                                  host=row["host"], why=why))  # fmt: skip
    return found


def begun_later(files: RunFiles, attempts: Mapping[int, int]) -> dict[int, tuple[str, int]]:
    """By rank: the collective that others have begun and it has not; by the profiler plugin."""
    report = nccl_report(files)
    last = {number: rank.attempt for number, rank in files.last_attempts().items()}
    found: dict[int, tuple[str, int]] = {}
    begun = report.collectives.filter(source="profiler").drop_nulls("sequence")
    for part in begun.partition_by(_GROUP, maintain_order=True):
        for rank, kind, most in _behind(part, 0).select("rank", "kind", "most").rows():
            if attempts.get(rank) == last.get(rank):
                found.setdefault(rank, (visible(kind), most))
    return found


def _behind(part: pl.DataFrame, interval_ns: int) -> pl.DataFrame:
    """Rows of one kind with an earlier last number than the `most` of others, the earliest first.

    Not of what is written at another moment by each rank while the job moves.
    """
    known = part.filter(pl.col("source") != "prometheus").drop_nulls("sequence")
    known = known.with_columns(pl.col("sequence").max().alias("most"))
    if (known["since_ns"] < 2 * interval_ns).any():
        return known.clear()
    return known.filter(pl.col("sequence") < pl.col("most")).sort("sequence", "member")


def files_of_run(files: RunFiles) -> tuple[list[Path], list[str]]:
    """Files where the variables of the ranks say, and notes on folders that are not here."""
    cwd, job = Path(files.about.cwd), files.about.environment.get("slurm_job")
    wanted: dict[Path, set[re.Pattern[str]]] = {}
    for rank in files.ranks:
        variables = mapping(rank.last("environment").get("variables"))
        if text(variables.get("NCCL_INSPECTOR_ENABLE")) not in (None, "", "0"):
            named = text(variables.get("NCCL_INSPECTOR_DUMP_DIR"))
            folder = cwd / (named or f"nccl-inspector-{job or 'unknown-jobid'}")
            wanted.setdefault(folder, set()).add(_INSPECTOR)
        if prefix := text(variables.get("NCCL_PROFILE_DUMP_FILE")):
            path = cwd / prefix
            pattern = re.escape(path.name) + r"(_\d+_\d+\.json|-.+-\d+\.txt)"
            wanted.setdefault(path.parent, set()).add(re.compile(pattern))
    found, notes = [], []
    for folder, patterns in wanted.items():
        inside = _inside(folder, since_ns=files.about.start_wall_ns)
        own = [path for path in inside if any(each.fullmatch(path.name) for each in patterns)]
        if folder.is_absolute():  # else of a run whose own folder is not known
            found += own
            notes += [] if own else [f"{folder}: the job was told to write NCCL's files there; "
                                     "none of this run is here"]  # fmt: skip
    return list(dict.fromkeys(found)), notes


def _interval_ns(files: RunFiles) -> int:
    """How often the ranks' Inspectors write, at the most."""
    name = "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
    variables = (mapping(rank.last("environment").get("variables")) for rank in files.ranks)
    texts = (text(each.get(name)) or "" for each in variables)
    known = (int(each) for each in texts if each.isdecimal() and len(each) < 15)
    return 1000 * max(known, default=0)


def _inside(folder: Path, *, since_ns: int = 0) -> list[Path]:
    """Files of a folder that were changed since then; earlier runs may have written there, too."""
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        return sorted(Path(e.path) for e in islice(entries, _FILE_LIMIT)
                      if e.stat(follow_symlinks=False).st_mtime_ns >= since_ns)  # fmt: skip
    return []


_RankOf = Callable[[Mapping[str, Any]], "int | None"]


def _known_processes(files: RunFiles) -> _RankOf:
    """Finds a rank by its process, or by its GPU; two nodes may have the same process id."""
    known: dict[object, set[int]] = {}
    for number, rank in files.last_attempts().items():
        pid, uuid = integer(rank.report.get("pid")), plain_uuid(rank.report.get("gpu_uuid"))
        for key in (pid, (text(rank.report.get("host")), pid), *([uuid] if uuid else [])):
            known.setdefault(key, set()).add(number)

    def find(row: Mapping[str, Any]) -> int | None:
        pid, host = row["pid"], row["host"]
        process = pid if host is None else (host, pid)
        own = known.get(plain_uuid(row["gpu_uuid"]) if pid is None else process, set())
        return next(iter(own)) if len(own) == 1 else None

    return find


def _report(paths: Sequence[Path], rank_of: _RankOf, until_ns: int, limit_bytes: int) -> NcclReport:
    """The readable files together."""
    limit = max(min(limit_bytes, _ALL_BYTES // max(len(paths), 1)), _LEAST_BYTES)
    read, problems = list[nccl_files.NcclFile](), list[str]()
    for path in paths:
        with note_damage(problems):
            read.append(nccl_files.read_nccl_file(path, limit_bytes=limit))
    collectives = _with_rank(nccl_files.COLLECTIVE_SCHEMA, (r.collectives for r in read), rank_of)
    return NcclReport(
        collectives=collectives.with_columns(
            since_ns=(pl.lit(until_ns) - pl.col("last_ns")).clip(0)  # clocks of nodes differ
        ),
        waits=_with_rank(nccl_files.WAIT_SCHEMA, (r.waits for r in read), rank_of),
        cut_count=sum(each.is_cut for each in read),
        interval_ns=0,
        notes=(*problems, *(note for each in read for note in each.notes)),
    )


def _with_rank(
    schema: Mapping[str, Any], frames: Iterable[pl.DataFrame], rank_of: _RankOf
) -> pl.DataFrame:
    rows = pl.concat([pl.DataFrame(schema=schema), *frames])
    ranks = [rank_of(row) for row in rows.select("pid", "host", "gpu_uuid").iter_rows(named=True)]
    return rows.select(pl.Series("rank", ranks, pl.Int64), *rows.columns)


def _against_others(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per process, communicator and kind: that of the message with most records."""
    group = ["source", "communicator", "size", "kind"]
    process = [*group, "rank", "member", "host", "pid", "gpu_uuid"]
    rows = rows.with_columns(
        pl.col("record_count").sum().over(*group, "message").alias("popular"),
        pl.when(pl.col("record_count").count().over(process) > 0).then(
            pl.col("record_count").sum().over(process)).alias("record_count"),
        pl.col("sequence", "last_ns").max().over(process), pl.col("since_ns").min().over(process),
    )  # fmt: skip
    rows = rows.sort("popular", "message", descending=True, nulls_last=True, maintain_order=True)
    chosen = rows.unique(process, keep="first", maintain_order=True)
    ratios = {}
    known = chosen.with_row_index("at").filter(pl.col("bus_bytes_per_s").is_finite())
    for part in known.partition_by([*group, "message"]) if known.height else ():
        rates = part["bus_bytes_per_s"].to_numpy()
        if len(rates) > 1:
            for place, at in enumerate(part["at"]):
                ratios[at] = float(rates[place] / np.median(np.delete(rates, place)))
    ratio = pl.Series("bus_ratio", [ratios.get(at) for at in range(chosen.height)], pl.Float64)
    found = chosen.with_columns(ratio).select(*RANK_SCHEMA)
    return found.sort("rank", "communicator", "member", "kind", nulls_last=True)


def judge_files(paths: Sequence[Path]) -> FlightVerdict | NcclReport:
    """What dumps of the Flight Recorder say; where there is none, files of NCCL's own."""
    try:
        return judge_dumps(paths)
    except (MissingDataError, TraceFormatError) as error:
        try:
            return nccl_folder_report(paths)
        except MissingDataError:
            raise error from None
