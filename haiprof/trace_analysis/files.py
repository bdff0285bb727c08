"""Trace files: rank, steps, and a report of what was read and what was not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from haiprof.trace_format.checks.finding import Finding
from haiprof.trace_format.find import trace_name
from haiprof.trace_format.kineto.load import LoadReport
from haiprof.trace_format.kineto.rank_trace import Trace
from haiprof.trace_format.kineto.tables import TABLES

LOAD_SCHEMA = {
    "file": pl.String,
    "world_size": pl.Int64,
    "first_step": pl.Int64,
    "last_step": pl.Int64,
    "text_bytes": pl.Int64,
    "event_count": pl.Int64,
    **{f"{table}_count": pl.Int64 for table in TABLES},
    "redundant_count": pl.Int64,
    "not_used_count": pl.Int64,
    "bad_time_count": pl.Int64,
    "lost_count": pl.Int64,
    "repaired_count": pl.Int64,
    "truncated_bytes": pl.Int64,
    "fault_count": pl.Int64,
    "faults": pl.String,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """One rank's file."""

    path: Path
    rank: int | None
    """As the file states; None where it does not."""
    world_size: int | None
    first_step: int | None
    """Number of its first profiler step."""
    last_step: int | None
    report: LoadReport
    start_ns: int | None = None
    """First start of a call or a GPU event."""
    end_ns: int | None = None
    """Last end of one."""
    findings: tuple[Finding, ...] = ()
    host: str | None = None
    """Where the rank ran, which only haiprof records."""


def trace_file(trace: Trace) -> TraceFile:
    """Describes one file; a question for a pool."""
    steps = trace.steps["step"].to_list()
    checked = trace.checked
    start_ns, end_ns = checked.window or (None, None)
    return TraceFile(
        path=trace.path,
        rank=trace.rank,
        world_size=trace.world_size,
        first_step=min(steps, default=None),
        last_step=max(steps, default=None),
        report=trace.report,
        start_ns=start_ns,
        end_ns=end_ns,
        findings=checked.findings,
        host=host_name(trace),
    )


def host_name(trace: Trace) -> str | None:
    """The host, which only haiprof records; None in other traces."""
    said = trace.metadata.get("haiprof")
    host = said.get("host") if isinstance(said, dict) else None
    return host if isinstance(host, str) else None


def load_frame(files: Mapping[int, TraceFile]) -> pl.DataFrame:
    """What was read of each rank's file, and what not."""
    rows = [{"rank": rank, **_row(file)} for rank, file in files.items()]
    return pl.DataFrame(rows, schema={"rank": pl.Int64, **LOAD_SCHEMA}, orient="row")


def load_notes(files: Mapping[int, TraceFile]) -> list[str]:
    """Notes on what was read, for people."""
    return [note for file in files.values() for note in file.report.notes]


def _row(file: TraceFile) -> dict[str, object]:
    report = file.report
    row: dict[str, object] = {
        name: getattr(file, name) for name in ("world_size", "first_step", "last_step")
    }
    row |= {name: getattr(report, name, None) for name in LOAD_SCHEMA if name not in row}
    row |= {f"{table}_count": count for table, count in report.kept.items()}
    row["file"] = trace_name(file.path)
    faults = [finding for finding in file.findings if finding.is_fault]
    row["fault_count"] = sum(finding.count for finding in faults)
    row["faults"] = ", ".join(f"{each.count} {each.check}" for each in faults) or None
    row["redundant_count"] = sum(report.redundant.values())
    row["not_used_count"] = sum(report.not_used.values())
    return row
