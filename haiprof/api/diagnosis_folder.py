"""A diagnosis as a self-contained folder: card, page, PerfTracker's five reports, tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import HaiprofError, UsageError, convert_os_errors
from haiprof.base.safe_files import make_named_folder
from haiprof.compat.exports import write_tables
from haiprof.diagnosis.function_reports import bursts_of, function_reports, hardware_by_function
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.counter_sources import link_traffic
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.card import verdict_card, view_text
from haiprof.show.figures.style import write_text
from haiprof.show.page.content import page_content
from haiprof.show.page.render import write_report
from haiprof.show.run_header import manifest_or_none, run_header
from haiprof.show.views.functions import functions_view
from haiprof.show.views.trace_report import trace_view
from haiprof.trace_analysis.function_patterns import reduce_patterns
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import reduce_traces, standard_report

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


def write_diagnosis_folder(
    folder: Path, analyzer: RunFrames, verdict: Verdict, *, document: Mapping[str, Any],
    since_ns: int | None = None,
) -> list[str]:  # fmt: skip
    """Writes all of a diagnosis into a new folder that needs neither the run nor its traces.

    Returns the names of what is in it; raises UsageError where it is not empty, or not writable.
    """
    with convert_os_errors(UsageError, f"{folder}: cannot be made"):
        make_named_folder(folder)
        if any(folder.iterdir()):
            raise UsageError(f"{folder}: is not empty", hint="name a new folder")
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    card = view_text(verdict_card(verdict, header, everything=True))
    write_text(folder / "verdict.txt", card, below=folder)
    write_text(folder / "diagnosis.json", _as_json(document), below=folder)
    write_report(page_content(analyzer), folder / "report.html")
    samples = _select_since(analyzer.counters(), since_ns)
    links = link_traffic(samples, _select_since(bursts_of(analyzer), since_ns))
    tables = {"counters": summarize_counters(samples), "links": links}
    traced, why = _write_traced(folder, analyzer, since_ns)
    write_tables(tables | traced, folder / "tables", force=False)
    write_text(folder / "README.txt", _readme(folder, verdict, why), below=folder)
    return sorted(path.name for path in folder.iterdir())


def _as_json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=1) + "\n"


def summarize_counters(samples: pl.DataFrame) -> pl.DataFrame:
    """What each counter was: a row per source, owner and metric; missing samples do not count."""
    value = pl.col("value")
    found = samples.drop_nulls("value").group_by(_COUNTER_KEYS, maintain_order=True).agg(
        sample_count=pl.len().cast(pl.Int64), mean=value.mean(), std=value.std(),
        min=value.min(), median=value.median(), max=value.max(),
    )  # fmt: skip
    return found.sort(_COUNTER_KEYS, nulls_last=True)


def _select_since(samples: pl.DataFrame, since_ns: int | None) -> pl.DataFrame:
    return samples if since_ns is None else samples.filter(pl.col("time_ns") >= since_ns)


def _write_traced(
    folder: Path, analyzer: RunFrames, since_ns: int | None
) -> tuple[dict[str, pl.DataFrame], str]:
    """The tables of what traces say, from files in the folder alone; or why there are none."""
    if since_ns is not None:
        begun = analyzer.windows().drop_nulls("path")["start_ns"].max()
        if not isinstance(begun, int) or begun < since_ns:
            return {}, "no steps were traced in the judged time: --save-traces asks for some"
    try:
        reduce_patterns(analyzer.run.root, folder / "functions")
        reduce_traces(analyzer.run.root, folder / "summaries")
        hardware = hardware_by_function(TraceQuestions(analyzer.run.root), analyzer)
        found = function_reports(TraceQuestions(folder / "functions").patterns())
        report = standard_report(folder / "summaries")
    except UsageError:
        raise
    except HaiprofError as error:
        return {}, str(error)
    write_text(folder / "functions.txt", view_text(functions_view(found)), below=folder)
    write_text(folder / "functions.json", _as_json(found.as_json()), below=folder)
    write_text(folder / "traces.txt", view_text(trace_view(report)), below=folder)
    tables = {
        f"functions_{r.kind}_{name}": t for r in found.reports for name, t in r.tables.items()
    }
    tables |= {"functions_by_rank": found.functions, "functions_hardware": hardware}
    return tables | {f"trace_{name}": table for name, table in report.tables.items()}, ""


def _readme(folder: Path, verdict: Verdict, why: str) -> str:
    there = {name: text for name, text in _CONTENT.items() if (folder / name).exists()}
    width = max(map(len, there))
    lines = [
        f"{verdict.name}: {verdict.headline}",
        f"Written by haiprof of the run {verdict.run}; nothing here needs that run.",
        "",
        *(f"{name:{width}}  {text}" for name, text in there.items()),
    ]
    if why:
        lines += ["", f"Without what traces say (PerfTracker's five reports): {why}"]
    return "\n".join(lines) + "\n"
