"""One export of a run, into a file or to standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import polars as pl

from haiprof.base.output_file import output_file
from haiprof.compat.exports.otlp import RunIdentity, otlp_requests
from haiprof.compat.exports.prometheus import exposition, last_values
from haiprof.compat.exports.tabular import print_text, write_csv, write_parquet
from haiprof.run_analysis.raw_counters import raw_counters
from haiprof.run_analysis.run_files import RunFiles
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.entities import process_key

_Write = Callable[[BinaryIO], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """The options of an export."""

    format: str
    """`csv`, `parquet`, `prometheus` or `otlp-json`."""
    what: str = "counters"
    """`counters`, `steps`, `phases` or `ranks`; the last two formats hold counters only."""
    lines: bool = False
    """OTLP: one request per line, node and process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """How much was written."""

    count: int
    unit: str
    """`rows` or `series`."""
    notes: tuple[str, ...]
    """Notes on what was cut, damaged or missing in the run."""


def write_export(
    analyzer: RunFrames, export: Export, path: Path | None, *, force: bool, stdout: BinaryIO
) -> Exported:
    """Writes one export."""
    write, exported = _prepare(analyzer, export)
    if path is None:
        print_text(write, stdout)
        return exported
    with output_file(path, force=force) as file:
        write(file)
    return exported


def _prepare(analyzer: RunFrames, export: Export) -> tuple[_Write, Exported]:
    if export.format in ("csv", "parquet"):
        return _table(analyzer, export)
    series, notes = raw_counters(analyzer.files)
    exported = Exported(count=len(series), unit="series", notes=notes)
    if export.format == "prometheus":
        text = exposition(last_values(series, run=_run_name(analyzer.files)))
    else:
        text = otlp_requests(series, _identity(analyzer.files), lines=export.lines)
    return lambda file: _write_text(text, file), exported


def _table(analyzer: RunFrames, export: Export) -> tuple[_Write, Exported]:
    frames: dict[str, Callable[[], pl.DataFrame]] = {
        "counters": analyzer.counters,
        "steps": analyzer.steps,
        "phases": analyzer.phases,
        "ranks": analyzer.ranks,
    }
    frame = frames[export.what]()
    write = write_csv if export.format == "csv" else write_parquet
    notes = tuple(analyzer.notes())
    return lambda file: write(frame, file), Exported(count=frame.height, unit="rows", notes=notes)


def _write_text(pieces: Iterable[str], file: BinaryIO) -> None:
    for piece in pieces:
        file.write(piece.encode("utf-8", "replace"))


def _run_name(run: RunFiles) -> str:
    return run.paths.root.resolve().name.encode("utf-8", "replace").decode()


def _identity(run: RunFiles) -> RunIdentity:
    version = run.manifest.haiprof_version if run.manifest is not None else ""
    reports = {
        (str(rank.report.get("host")), process_key(rank.report)): rank.report for rank in run.ranks
    }
    return RunIdentity(name=_run_name(run), version=version, reports=reports)
