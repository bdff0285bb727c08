"""The traces of a run as pictures and tables for the page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import HaiprofError
from haiprof.base.units import ratio_text
from haiprof.diagnosis.function_reports import FunctionReports, function_reports
from haiprof.run_format.layout import RunPaths
from haiprof.show.frame_table import PageTable, page_table
from haiprof.show.text import printable
from haiprof.show.trace_pictures import TracePicture, all_pictures
from haiprof.show.views.functions import TITLES
from haiprof.show.views.functions import shown_tables as function_tables
from haiprof.show.views.memory_timeline import MemoryAnswers, memory_answers
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import standard_report

_TITLE_PX = 100
"""What a figure's own title and legend take; on the page they stand above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePicture:
    """One picture of the page."""

    name: str
    title: str
    height: int
    figure: Any
    """Plain JSON values, as plotly's script takes them."""


def page_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[tuple[PagePicture, ...], tuple[tuple[str, str], ...]]:
    """All pictures of traces, and of those that cannot be drawn the reasons."""
    drawn, missing = all_pictures(traces, steps)
    return tuple(_part(name, each) for name, each in drawn.items()), tuple(missing.items())


def figure_data(pictures: Sequence[PagePicture]) -> dict[str, Any]:
    """The numbers of pictures, by the name that their places on the page have."""
    return {picture.name: picture.figure for picture in pictures}


def plain_figure(figure: go.Figure) -> Any:  # noqa: ANN401 - any JSON value
    """A figure without plotly's own colours: the page has its own."""
    figure.update_layout(template=None)
    return json.loads(figure.to_json())


def _part(name: str, picture: TracePicture) -> PagePicture:
    return PagePicture(
        name=f"trace-{name.replace('_', '-')}",
        title=printable(picture.title),
        height=picture.figure.layout.height - _TITLE_PX,
        figure=plain_figure(picture.figure),
    )


_FUNCTION_LIMIT, _MEMORY_LIMIT, _OPERATOR_LIMIT = 12, 10, 15
_OUTSIDE_MODULES = "(outside all modules)"
_OUTSIDE, _BEFORE = "(outside all operators)", "(allocated before the trace)"

_SUMMED = "Sums over all ranks of the last window."
_INNERMOST = "By the innermost nn.Module around the launch."


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSection:
    """One of the five reports on functions."""

    title: str
    meaning: tuple[str, ...]
    tables: tuple[PageTable, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSections:
    """Sections of the page that need traces; each empty with its reason in `missing`."""

    kernels: tuple[PageTable, ...] = ()
    pictures: tuple[PagePicture, ...] = ()
    operators: tuple[PageTable, ...] = ()
    functions: tuple[FunctionSection, ...] = ()
    memory: tuple[PageTable, ...] = ()
    missing: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


def trace_sections(run: RunPaths, *, read: bool) -> TraceSections:
    """Reads the last window of a run's traces; failures are noted, never raised."""
    wanted = ("kernels", "operators", "Python functions", "memory")
    if not read:
        return TraceSections(missing=tuple((what, "left out by --no-traces") for what in wanted))
    if not run.traces.is_dir() or not any(run.traces.glob("*.json*")):
        why = "no traces in this run: `--trace` records a window"
        return TraceSections(missing=tuple((what, why) for what in wanted))
    missing: list[tuple[str, str]] = []
    kernels, notes = _kernels(run, missing)
    functions, memory = _functions(run, missing), _memory(run, missing)
    pictures, _ = page_pictures(TraceQuestions(run.root)) if kernels else ((), ())
    return TraceSections(
        kernels=kernels,
        pictures=pictures,
        operators=_operators(run, missing),
        functions=functions,
        memory=memory,
        missing=tuple((what.replace("_", " "), _short(why, run)) for what, why in missing),
        notes=tuple(_short(note, run) for note in notes),
    )


def _short(text: str, run: RunPaths) -> str:
    """An error on one line, with file names relative to the run directory."""
    return printable(text.replace(f"{run.root}/", ""))


def _kernels(
    run: RunPaths, missing: list[tuple[str, str]]
) -> tuple[tuple[PageTable, ...], tuple[str, ...]]:
    try:
        report = standard_report(run.root)
    except (HaiprofError, OSError) as error:
        missing.append(("kernels", str(error)))
        return (), ()
    missing += report.missing.items()
    tables = tuple(
        page_table(each.title, each.rows, each.columns, limit=each.limit, note=each.legend)
        for each in shown_tables(report)
    )
    return tables, report.notes


def _operators(run: RunPaths, missing: list[tuple[str, str]]) -> tuple[PageTable, ...]:
    """Operators by their own time, and nn.Modules by the GPU time that they launched."""
    analysis = TraceQuestions(run.root)
    try:
        by_operator, launched = analysis.operator_kernels(), analysis.kernel_operators()
    except (HaiprofError, OSError) as error:
        missing.append(("operators", str(error)))
        return ()
    return tuple(_operator_tables(by_operator, launched))


def _operator_tables(by_operator: pl.DataFrame, launched: pl.DataFrame) -> Iterator[PageTable]:
    """Sums over all ranks; the GPU's columns only where a GPU was traced."""
    columns = [("operator", "operator"), ("call_count", "calls"), ("cpu_self_ns", "CPU, itself"),
               ("cpu_total_ns", "CPU, with what it calls")]  # fmt: skip
    order = "cpu_self_ns"
    if launched.height:
        columns += [("kernel_count", "kernels"), ("gpu_self_ns", "GPU, itself"),
                    ("gpu_total_ns", "GPU, with what it calls")]  # fmt: skip
        order = "gpu_self_ns"
    names = [name for name, _ in columns[1:]]
    summed = by_operator.drop_nulls("operator").group_by("operator").agg(pl.col(names).sum())
    ordered = summed.sort(order, "cpu_self_ns", "operator", descending=[True, True, False])
    if ordered.height:
        yield page_table("Operators", ordered, columns, limit=_OPERATOR_LIMIT, note=_SUMMED)
    modules = launched.drop_nulls("module").group_by("module")
    times = modules.agg(kernel_count=pl.len(), gpu_ns=pl.col("dur_ns").sum())
    if times.height:
        heads = [("module", "module"), ("kernel_count", "kernels"), ("gpu_ns", "GPU")]
        ordered = times.sort("gpu_ns", "module", descending=[True, False])
        yield page_table("Modules", ordered, heads, limit=_OPERATOR_LIMIT, note=_INNERMOST)


def _functions(run: RunPaths, missing: list[tuple[str, str]]) -> tuple[FunctionSection, ...]:
    try:
        found = function_reports(TraceQuestions(run.root).patterns())
    except (HaiprofError, OSError) as error:
        missing.append(("functions", str(error)))
        return ()
    return tuple(_sections(found))


def _sections(found: FunctionReports) -> Iterator[FunctionSection]:
    for report in found.reports:
        share = report.facts["bottleneck"]["median"]
        of = "" if share is None else f": {ratio_text(share)} of the time"
        yield FunctionSection(
            title=f"{report.title}{of}",
            meaning=tuple(map(printable, report.meaning)),
            tables=tuple(
                page_table(TITLES[name], rows, columns, limit=_FUNCTION_LIMIT)
                for name, rows, columns in function_tables(report, len(found.ranks))
            ),
            missing=tuple(map(printable, report.missing)),
        )


def _memory(run: RunPaths, missing: list[tuple[str, str]]) -> tuple[PageTable, ...]:
    try:
        answers = memory_answers(TraceQuestions(run.root), None)
    except (HaiprofError, OSError) as error:
        missing.append(("memory", str(error)))
        return ()
    missing += [(f"memory, {what}", why) for what, why in answers.missing.items()]
    return tuple(_memory_tables(answers))


def _memory_tables(answers: MemoryAnswers) -> Iterator[PageTable]:
    device = ["rank", "device_type", "device"]
    levels = ["allocated_bytes", "reserved_bytes", "since_start_bytes"]
    peaks = answers.timeline.group_by(device, maintain_order=True).agg(pl.col(levels).max())
    names = [(name, name.removesuffix("_bytes").replace("_", " ")) for name in levels]
    heads = [("rank", "rank"), ("device_type", "of"), *names]
    yield page_table("Highest in the window", peaks, heads, limit=_FUNCTION_LIMIT)
    if answers.at_peak is not None:
        origin = pl.when(pl.col("origin") == "before").then(pl.lit(_BEFORE))
        named = answers.at_peak.with_columns(
            name=pl.coalesce(origin, "operator", pl.lit(_OUTSIDE)), share_ratio=pl.col("ratio")
        )
        columns = [("rank", "rank"), ("name", "allocated by"), ("block_count", "blocks"),
                   ("size_bytes", "size"), ("share_ratio", "share")]  # fmt: skip
        largest = named.sort("size_bytes", descending=True)
        yield page_table("Alive at the peak", largest, columns, limit=_MEMORY_LIMIT)
    if answers.at_peak_by_module is not None:
        yield from _by_module(answers.at_peak_by_module)
    operators = answers.by_operator.with_columns(name=pl.col("operator").fill_null(_OUTSIDE))
    columns = [("rank", "rank"), ("name", "operator"), ("allocation_count", "allocations"),
               ("allocated_bytes", "allocated"), ("freed_bytes", "freed"),
               ("kept_bytes", "kept")]  # fmt: skip
    ordered = operators.sort("allocated_bytes", descending=True, nulls_last=True)
    yield page_table("By operator", ordered, columns, limit=_MEMORY_LIMIT)


def _by_module(found: pl.DataFrame) -> Iterator[PageTable]:
    """What was alive at the peak by class of module, each rank's instances of one summed."""
    before = pl.when(pl.col("origin") == "before").then(pl.lit(_BEFORE))
    plain = pl.col("module").str.replace(r"_\d+$", "")
    sums = (
        found.with_columns(name=pl.coalesce(before, plain, pl.lit(_OUTSIDE_MODULES)))
        .group_by("rank", "name")
        .agg(pl.col("size_bytes").sum(), share_ratio=pl.col("ratio").sum())
        .sort("size_bytes", "rank", "name", descending=[True, False, False])
    )
    columns = [("rank", "rank"), ("name", "module"), ("size_bytes", "size"),
               ("share_ratio", "share")]  # fmt: skip
    yield page_table("Alive at the peak, by class of module", sums, columns, limit=_MEMORY_LIMIT)
