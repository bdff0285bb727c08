"""The traces of a run as pictures and tables for the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import HaiprofError
from haiprof.base.units import ratio_text
from haiprof.diagnosis.function_reports import FunctionReports, function_reports
from haiprof.run_format.layout import RunPaths
from haiprof.show.frame_table import PageTable, page_table
from haiprof.show.text import printable
from haiprof.show.trace_pictures import all_pictures
from haiprof.show.views.functions import TITLES
from haiprof.show.views.functions import shown_tables as function_tables
from haiprof.show.views.memory_timeline import (
    OUTSIDE,
    MemoryAnswers,
    memory_answers,
    name_classes,
    name_operators,
)
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import TraceReport, standard_report

T = TypeVar("T")

_TITLE_PX = 100
"""What a figure's own title and legend take; on the page they stand above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePicture:
    """One picture of the page."""

    name: str
    title: str
    says: str
    """What to see in it."""
    height: int
    figure: Any
    """Plain JSON values, as plotly's script takes them."""


def page_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[tuple[PagePicture, ...], tuple[tuple[str, str], ...]]:
    """All pictures of traces, and of those that cannot be drawn the reasons."""
    drawn, missing = all_pictures(traces, steps)
    pictures = (
        PagePicture(
            name=f"trace-{name.replace('_', '-')}",
            title=printable(picture.title),
            says=picture.says,
            height=picture.figure.layout.height - _TITLE_PX,
            figure=plain_figure(picture.figure),
        )
        for name, picture in drawn.items()
    )
    return tuple(pictures), tuple(missing.items())


def figure_data(pictures: Sequence[PagePicture]) -> dict[str, Any]:
    """The numbers of pictures, by the name that their places on the page have."""
    return {picture.name: picture.figure for picture in pictures}


def plain_figure(figure: go.Figure) -> Any:  # noqa: ANN401 - any JSON value
    """A figure without plotly's own colours: the page has its own."""
    figure.update_layout(template=None)
    return json.loads(figure.to_json())


_FUNCTION_LIMIT, _MEMORY_LIMIT, _OPERATOR_LIMIT = 12, 10, 15
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

    @property
    def title(self) -> str:
        """Of the section with the tables and pictures: a job without a GPU has no kernels."""
        return "Kernels" if self.operators else "Traced steps"


def trace_sections(run: RunPaths, *, read: bool) -> TraceSections:
    """Reads the last window of a run's traces; failures are noted, never raised."""
    wanted = ("kernels", "operators", "Python functions", "memory")
    if not read:
        return TraceSections(missing=tuple((what, "left out by --no-traces") for what in wanted))
    if not run.traces.is_dir() or not any(run.traces.glob("*.json*")):
        why = "no traces in this run: `--trace` records a window"
        return TraceSections(missing=tuple((what, why) for what in wanted))
    missing: list[tuple[str, str]] = []
    questions = TraceQuestions(run.root)

    def try_to_read(what: str, read: Callable[[], Iterable[T]]) -> tuple[T, ...]:
        try:
            return tuple(read())
        except (HaiprofError, OSError) as error:
            missing.append((what, str(error)))
            return ()

    def read_memory() -> Iterator[PageTable]:
        answers = memory_answers(questions, None)
        missing.extend((f"memory, {what}", why) for what, why in answers.missing.items())
        return _memory_tables(answers)

    reports = try_to_read("kernels", lambda: [standard_report(run.root)])
    missing += [each for report in reports for each in report.missing.items()]
    kernels = tuple(table for report in reports for table in report_tables(report))
    functions = try_to_read("functions", lambda: _sections(function_reports(questions.patterns())))
    missing += [(f"functions, {each.title}", why) for each in functions if not each.tables
                for why in each.missing]  # fmt: skip
    memory = try_to_read("memory", read_memory)
    return TraceSections(
        kernels=kernels,
        pictures=page_pictures(questions)[0] if kernels else (),
        operators=try_to_read("operators", lambda: _operator_tables(questions)),
        functions=tuple(each for each in functions if each.tables),
        memory=memory,
        missing=tuple((what.replace("_", " "), _short(why, run)) for what, why in missing),
        notes=tuple(_short(note, run) for report in reports for note in report.notes),
    )


def report_tables(report: TraceReport) -> Iterator[PageTable]:
    """The tables of a report as a page shows them."""
    for each in shown_tables(report):
        yield page_table(each.title, each.rows, each.columns, limit=each.limit, note=each.legend)


def _short(text: str, run: RunPaths) -> str:
    """An error on one line, with file names relative to the run directory."""
    return printable(text.replace(f"{run.root}/", ""))


def _operator_tables(questions: TraceQuestions) -> Iterator[PageTable]:
    """Operators and nn.Modules by the GPU time that they launched; none without a GPU.

    Operators by their time on the host are in the report's tables.
    """
    by_operator, launched = questions.operator_kernels(), questions.kernel_operators()
    columns = [
        ("operator", "operator"), ("call_count", "calls"), ("cpu_self_ns", "CPU, itself"),
        ("cpu_total_ns", "CPU, with what it calls"), ("kernel_count", "kernels"),
        ("gpu_self_ns", "GPU, itself"), ("gpu_total_ns", "GPU, with what it calls"),
    ]  # fmt: skip
    names = [name for name, _ in columns[1:]]
    summed = by_operator.drop_nulls("operator").group_by("operator").agg(pl.col(names).sum())
    order = ("gpu_self_ns", "cpu_self_ns", "operator")
    ordered = summed.sort(*order, descending=[True, True, False])
    if ordered.height and launched.height:
        yield page_table("Operators", ordered, columns, limit=_OPERATOR_LIMIT, note=_SUMMED)
    modules = launched.drop_nulls("module").group_by("module")
    times = modules.agg(kernel_count=pl.len(), gpu_ns=pl.col("dur_ns").sum())
    if times.height:
        heads = [("module", "module"), ("kernel_count", "kernels"), ("gpu_ns", "GPU")]
        ordered = times.sort("gpu_ns", "module", descending=[True, False])
        yield page_table("Modules", ordered, heads, limit=_OPERATOR_LIMIT, note=_INNERMOST)


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


def _memory_tables(answers: MemoryAnswers) -> Iterator[PageTable]:
    device = ["rank", "device_type", "device"]
    levels = ["allocated_bytes", "reserved_bytes", "since_start_bytes"]
    peaks = answers.timeline.group_by(device, maintain_order=True).agg(pl.col(levels).max())
    names = [(name, name.removesuffix("_bytes").replace("_", " ")) for name in levels]
    heads = [("rank", "rank"), ("device_type", "device"), *names]
    yield page_table("Highest in the window", peaks, heads, limit=_FUNCTION_LIMIT)
    if answers.at_peak is not None:
        columns = [("rank", "rank"), ("name", "allocated by"), ("block_count", "blocks"),
                   ("size_bytes", "size"), ("share_ratio", "share")]  # fmt: skip
        largest = name_operators(answers.at_peak).sort("size_bytes", descending=True)
        yield page_table("Alive at the peak", largest, columns, limit=_MEMORY_LIMIT)
    if answers.at_peak_by_module is not None:
        yield from _by_module(answers.at_peak_by_module)
    operators = answers.by_operator.with_columns(name=pl.col("operator").fill_null(OUTSIDE))
    columns = [("rank", "rank"), ("name", "operator"), ("allocation_count", "allocations"),
               ("allocated_bytes", "allocated"), ("freed_bytes", "freed"),
               ("kept_bytes", "kept")]  # fmt: skip
    ordered = operators.sort("allocated_bytes", descending=True, nulls_last=True)
    yield page_table("By operator", ordered, columns, limit=_MEMORY_LIMIT)


def _by_module(found: pl.DataFrame) -> Iterator[PageTable]:
    """What was alive at the peak by class of module, each rank's instances of one summed."""
    sums = (
        name_classes(found)
        .group_by("rank", "name")
        .agg(pl.col("size_bytes", "share_ratio").sum())
        .sort("size_bytes", "rank", "name", descending=[True, False, False])
    )
    columns = [("rank", "rank"), ("name", "module"), ("size_bytes", "size"),
               ("share_ratio", "share")]  # fmt: skip
    yield page_table("Alive at the peak, by class of module", sums, columns, limit=_MEMORY_LIMIT)
