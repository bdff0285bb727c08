"""A diagnosis as a self-contained folder: card, page, PerfTracker's five reports, tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.safe_files import make_named_folder, write_file
from haiprof.compat.exports import write_tables
from haiprof.diagnosis.function_reports import (
    FunctionReports,
    bursts_of,
    function_reports,
    hardware_by_function,
)
from haiprof.run_analysis.counter_sources import link_traffic
from haiprof.show.card import MAX_WIDTH, verdict_card, view_text
from haiprof.show.page.content import page_content
from haiprof.show.page.render import write_report
from haiprof.show.run_header import manifest_or_none, run_header
from haiprof.show.views.functions import functions_view
from haiprof.show.views.trace_report import trace_view
from haiprof.trace_analysis.pattern_gathering import reduce_patterns
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import TraceReport, reduce_traces, standard_report

if TYPE_CHECKING:
    from haiprof.diagnosis.verdict import Verdict
    from haiprof.run_analysis.run_frames import RunFrames

_CONTENT = {
    "report.html": "everything, in a browser",
    "verdict.txt": "the cause, the numbers that prove it, what to change",
    "diagnosis.json": "the same for scripts (docs/diagnosis.md)",
    "tables/counters.csv": "hardware samples by rank and GPU over the judged time",
    "tables/links.csv": "NVLink, PCIe and network by direction, and the share of what they carry",
    "tables/functions_hardware.csv": "hardware samples while each function ran",
    "functions.txt": "PerfTracker's five reports: GPU compute, memory, communication, runtime, "
    "Python",
    "functions.json": "the same for scripts",
    "functions/": "each rank's functions: haiprof trace functions functions, "
    "haiprof trace query functions "
    "--schema",
    "traces.txt": "temporal breakdown, steps, kernels, launches, collectives, who is late",
    "summaries/": "what that is made of: haiprof trace report summaries",
    "tables/": "every table as CSV: functions_... of the five reports, trace_... of traces.txt",
}
"""What is in the folder; the README says it of what is there."""
_COUNTER_KEYS = ("host", "source", "entity", "rank", "gpu", "metric", "unit")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traced:
    """What the traces of the judged time say."""

    functions: FunctionReports
    report: TraceReport
    hardware: pl.DataFrame
    """Counters while functions ran."""


def write_diagnosis_folder(
    folder: Path,
    analyzer: RunFrames,
    verdict: Verdict,
    *,
    document: Mapping[str, Any],
    since_ns: int | None = None,
) -> list[str]:
    """Writes all of a diagnosis into a folder that needs neither the run nor its traces.

    Args:
        folder: New, or empty.
        analyzer: Of the run.
        verdict: What was found in it.
        document: The verdict for scripts.
        since_ns: Only what was recorded from this Unix time on; None takes the whole run.

    Returns:
        The names of what is in it.

    Raises:
        UsageError: The folder is not empty, or cannot be written.
    """
    _make_empty(folder)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    card = verdict_card(verdict, header, everything=True)
    _write(folder / "verdict.txt", view_text(card, width=MAX_WIDTH))
    _write_json(folder / "diagnosis.json", document)
    write_report(page_content(analyzer), folder / "report.html")
    tables = {
        "counters": counter_summary(analyzer.counters(), since_ns),
        "links": link_traffic(
            _select_since(analyzer.counters(), since_ns),
            _select_since(bursts_of(analyzer), since_ns),
        ),
    }
    traced = _read_traces(folder, analyzer, since_ns)
    if isinstance(traced, _Traced):
        _write_traced(folder, traced)
        tables |= _tables(traced)
    write_tables(tables, folder / "tables", force=False)
    why = traced if isinstance(traced, str) else None
    _write(folder / "README.txt", _readme(folder, verdict, why))
    return sorted(path.name for path in folder.iterdir())


def counter_summary(counters: pl.DataFrame, since_ns: int | None) -> pl.DataFrame:
    """What each counter was over the judged time.

    Args:
        counters: From `RunFrames.counters`.
        since_ns: Only samples from this Unix time on.

    Returns:
        One row per `host`, `source`, `entity`, `rank`, `gpu`, `metric`, `unit`: `sample_count`,
        `mean`, `std`, `min`, `median`, `max`. Samples that are missing do not count.
    """
    samples = _select_since(counters, since_ns)
    value = pl.col("value")
    found = samples.drop_nulls("value").group_by(_COUNTER_KEYS, maintain_order=True).agg(
        sample_count=pl.len().cast(pl.Int64), mean=value.mean(), std=value.std(),
        min=value.min(), median=value.median(), max=value.max(),
    )  # fmt: skip
    return found.sort(_COUNTER_KEYS, nulls_last=True)


def _select_since(samples: pl.DataFrame, since_ns: int | None) -> pl.DataFrame:
    return samples if since_ns is None else samples.filter(pl.col("time_ns") >= since_ns)


def _read_traces(folder: Path, analyzer: RunFrames, since_ns: int | None) -> _Traced | str:
    """The answers about traces, from files in the folder alone; or why there are none."""
    if since_ns is not None:
        begun = analyzer.windows().drop_nulls("path")["start_ns"].max()
        if not isinstance(begun, int) or begun < since_ns:
            return "no steps were traced in the judged time: --save-traces asks for some"
    functions, summaries = folder / "functions", folder / "summaries"
    try:
        reduce_patterns(analyzer.run.root, functions)
        reduce_traces(analyzer.run.root, summaries)
        return _Traced(
            hardware=hardware_by_function(TraceQuestions(analyzer.run.root), analyzer),
            functions=function_reports(TraceQuestions(functions).patterns()),
            report=standard_report(summaries),
        )
    except UsageError:
        raise
    except HaiprofError as error:
        return str(error)


def _write_traced(folder: Path, traced: _Traced) -> None:
    _write(folder / "functions.txt", view_text(functions_view(traced.functions), width=MAX_WIDTH))
    _write_json(folder / "functions.json", traced.functions.as_json())
    _write(folder / "traces.txt", view_text(trace_view(traced.report), width=MAX_WIDTH))


def _tables(traced: _Traced) -> dict[str, pl.DataFrame]:
    reports = {
        f"functions_{report.kind}_{name}": table
        for report in traced.functions.reports
        for name, table in report.tables.items()
    }
    reports["functions_by_rank"] = traced.functions.functions
    reports["functions_hardware"] = traced.hardware
    return reports | {f"trace_{name}": table for name, table in traced.report.tables.items()}


def _readme(folder: Path, verdict: Verdict, why: str | None) -> str:
    there = {name: text for name, text in _CONTENT.items() if (folder / name).exists()}
    width = max(map(len, there))
    lines = [
        f"{verdict.name}: {verdict.headline}",
        f"Written by haiprof of the run {verdict.run}; nothing here needs that run.",
        "",
        *(f"{name:{width}}  {text}" for name, text in there.items()),
    ]
    if why is not None:
        lines += ["", f"Without what traces say (PerfTracker's five reports): {why}"]
    return "\n".join(lines) + "\n"


def _make_empty(folder: Path) -> None:
    try:
        make_named_folder(folder)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: is not empty", hint="name a new folder")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror or error}") from None


def _write(path: Path, text: str) -> None:
    with _errors_as_usage(path):
        write_file(path, text.encode(), below=path.parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with _errors_as_usage(path):
        write_file(path, (json.dumps(content, indent=1) + "\n").encode(), below=path.parent)


@contextmanager
def _errors_as_usage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from None
