"""Tables of the page about the run itself, and its traces as pictures and tables."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import plotly.graph_objects as go
import polars as pl

from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.units import MISSING, duration_text, ratio_text
from haiprof.diagnosis.function_reports import FunctionReports, function_reports
from haiprof.run_analysis.run_files import integer, number, objects
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest
from haiprof.run_format.reader import read_json
from haiprof.show.figures.style import PHASES
from haiprof.show.frame_table import Fields, PageTable, heads, page_records, page_table
from haiprof.show.summary import OverviewSummary, rank_name
from haiprof.show.text import moment_text, printable
from haiprof.show.trace_pictures import all_pictures
from haiprof.show.views import memory_timeline as views
from haiprof.show.views.functions import TITLES
from haiprof.show.views.functions import shown_tables as function_tables
from haiprof.show.views.trace_report import shown_tables
from haiprof.trace_analysis.device_time import Steps
from haiprof.trace_analysis.files import files_by_window
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import TraceReport, standard_report

_SLOW_LIMIT, _LATE_LIMIT = 5, 16
_NO_TRACES = "no traces in this run: `--trace` records a window"
_UNSET: tuple[object, ...] = (None, False, "", [], {})

_NODES: Fields = (
    (lambda node: printable(node.host or MISSING), "host"), ("cpu_count", "CPUs"),
    ("cpu_utilization_ratio", "CPU"), ("memory_used_bytes", "memory used"),
    ("memory_total_bytes", "memory in all"), ("disk_read_bytes_per_s", "disk read"),
    ("disk_write_bytes_per_s", "disk write"), ("network_receive_bytes_per_s", "received"),
    ("network_transmit_bytes_per_s", "sent"),
)  # fmt: skip

_RANKS: Fields = (
    (rank_name, "rank"), (lambda rank: printable(rank.host or MISSING), "host"),
    (lambda rank: printable(rank.device or MISSING), "device"), ("step_count", "steps"),
    ("mean_step_ns", "mean step"), ("median_step_ns", "median step"),
    *((lambda rank, of=phase: duration_text(rank.split_ns.get(of)), phase) for phase in PHASES),
    ("cpu_cores", "CPU cores"), ("memory_rss_bytes", "memory"), ("read_bytes_per_s", "read"),
)  # fmt: skip
_RANK_GPUS: Fields = (("gpu_utilization_ratio", "GPU"), ("gpu_memory_used_bytes", "GPU memory"))
"""Columns that are left out where no rank has a value."""


def rank_table(summary: OverviewSummary) -> PageTable:
    """A row per rank and attempt."""
    known = [f for f in _RANK_GPUS if any(getattr(r, str(f[0])) is not None for r in summary.ranks)]
    return page_records("", summary.ranks, (*_RANKS, *known), left=("host", "device"))


def node_table(summary: OverviewSummary) -> PageTable:
    """A row per host."""
    return page_records("", summary.nodes, _NODES, left=("host",))


def phase_table(steps: pl.DataFrame) -> PageTable:
    """Each phase over the steps given: of all ranks, warm and not traced."""
    head = ("phase", "5 %", "median", "95 %", "longest", "median on the GPU")
    rows = []
    for phase in PHASES:
        times, device = steps[f"{phase}_host_ns"], steps[f"{phase}_device_ns"]
        spread = [times.quantile(q) for q in (0.05, 0.5, 0.95)]
        known = [number(value) for value in (*spread, times.max(), device.median())]
        if times.count() or device.count():
            rows.append((phase, *map(duration_text, known)))
    shown = len(head) - all(row[-1] == MISSING for row in rows)
    cut = [row[:shown] for row in rows]
    return PageTable("Times of phases", head[:shown], cut, left=("phase",))


def slow_table(steps: pl.DataFrame) -> PageTable:
    """The slowest steps of all ranks, and what each consists of."""
    phases = [(f"{phase}_host_ns", phase) for phase in PHASES]
    columns = [("rank", "rank"), ("step", "step"), ("step_ns", "took"), *phases]
    slowest = steps.select(name for name, _ in columns).top_k(
        _SLOW_LIMIT, by=["step_ns", "rank", "step"], reverse=[False, True, True]
    )
    shown = columns if steps["rank"].n_unique() > 1 else columns[1:]
    return page_table("Slowest steps", slowest, shown, limit=_SLOW_LIMIT)


def late_table(late: pl.DataFrame) -> PageTable:
    """The latest ranks of all groups."""
    columns = heads("rank", group_name="group", late_per_step_ns="late per step", late_ns="in all",
                    last_ratio="alone last", kind="mostly at", collective_count="collectives",
                    step_count="steps")  # fmt: skip
    named = late.rename({"late_ns_per_step": "late_per_step_ns"})
    return page_table("", named, columns, limit=_LATE_LIMIT)


def collective_table(collectives: pl.DataFrame) -> PageTable:
    """Collectives of the ranks' Flight Recorders, by group and kind."""
    found = collectives.group_by("group_name", "kind").agg(
        rank_count=pl.col("rank").n_unique(), count=pl.len(),
        median_ns=(pl.col("completed_ns") - pl.col("created_ns")).median(),
    ).sort("count", "group_name", "kind", descending=[True, False, False])  # fmt: skip
    columns = heads(group_name="group", kind="kind", rank_count="ranks", count="in the record",
                    median_ns="from call to end")  # fmt: skip
    return page_table("Recorded", found, columns, limit=_LATE_LIMIT)


def trace_files(run: RunPaths) -> tuple[list[list[Path]], str]:
    """Traces by window, ranks in order; or why there are none."""
    if not run.traces.is_dir():
        return [], _NO_TRACES
    try:
        return [[member.path for member in found] for found in files_by_window(run.root)], ""
    except (HaiprofError, OSError) as error:
        return [], printable(str(error))


def snapshot_table(run: RunPaths) -> PageTable | None:
    """The run's snapshots; None without any."""
    rows = []
    for path in run.snapshot_files():
        name = printable(path.parent.name)
        try:
            found = read_json(path)
        except RunFormatError:
            rows.append((MISSING, MISSING, "cannot be read", name))
            continue
        suspects, taken = objects(found.get("suspects")), moment_text(integer(found.get("wall_ns")))
        who = ", ".join(f"rank {printable(str(s.get('rank')))}" for s in suspects)
        why = "; ".join(printable(str(s.get("reason"))) for s in suspects[:3])
        rows.append((taken, who or "nobody", why or MISSING, name))
    head = ("taken", "who holds the job up", "why", "kept in snapshots/")
    return PageTable("", head, rows, left=head) if rows else None


def one_rank_facts(ranks: PageTable, nodes: PageTable) -> tuple[tuple[str, str], ...]:
    """What the tables of ranks and hosts say of the only rank, without what the ledger says."""
    if len(ranks.rows) != 1:
        return ()
    said = {"rank", "steps", "mean step", "median step", *PHASES}
    own = [pair for pair in zip(ranks.head, ranks.rows[0], strict=True) if pair[0] not in said]
    host = zip(nodes.head[1:], nodes.rows[0][1:], strict=True) if len(nodes.rows) == 1 else ()
    return (*own, *host)


def option_pairs(manifest: Manifest | None) -> tuple[tuple[str, str], ...]:
    """The options that were set."""
    options = manifest.options.items() if manifest else ()
    return tuple(
        (f"--{printable(name).replace('_', '-')}", printable(_option(value)))
        for name, value in options if value not in _UNSET
    )  # fmt: skip


def environment_pairs(
    run: RunPaths, manifest: Manifest | None, ranks: pl.DataFrame
) -> tuple[tuple[str, str], ...]:
    """What was run, where, and with which versions."""
    known = manifest or Manifest(haiprof_version="", name=run.root.name, command=[])
    versions = [
        (name, ", ".join(sorted(printable(v) for v in ranks[column].drop_nulls().unique())))
        for name, column in (("Python", "python"), ("torch", "torch"), ("device", "device"))
    ]
    hosts = sorted(printable(host) for host in ranks["host"].drop_nulls().unique())
    shown = ", ".join(hosts[:_LATE_LIMIT])
    shown += f" and {len(hosts) - _LATE_LIMIT} more" if len(hosts) > _LATE_LIMIT else ""
    return (
        ("command", printable(shlex.join(map(str, known.command)))),
        ("folder", printable(known.cwd) or MISSING),
        ("started", moment_text(known.start_wall_ns or None)),
        ("hosts", shown or MISSING),
        *((name, text or MISSING) for name, text in versions),
        ("haiprof", printable(known.haiprof_version) or MISSING),
        ("run directory", printable(str(run.root))),
    )


def _option(value: object) -> str:
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return ",".join(value)  # as on the command line
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


T = TypeVar("T")

_TITLE_PX = 100  # What a figure's own title and legend take; on the page they stand above it


class PagePicture(NamedTuple):
    """One picture of the page; its figure is plain JSON values, as plotly's script takes them."""

    name: str
    title: str
    says: str
    height: int
    figure: Any


def page_pictures(
    traces: TraceQuestions, steps: Steps = None
) -> tuple[tuple[PagePicture, ...], tuple[tuple[str, str], ...]]:
    """All pictures of traces, and of those that cannot be drawn the reasons."""
    drawn, missing = all_pictures(traces, steps)
    pictures = (
        PagePicture(
            name=f"trace-{name.replace('_', '-')}", title=printable(picture.title),
            says=picture.says, height=picture.figure.layout.height - _TITLE_PX,
            figure=plain_figure(picture.figure),
        )
        for name, picture in drawn.items()
    )  # fmt: skip
    return tuple(pictures), tuple(missing.items())


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
    why = "" if any(run.traces.glob("*.json*")) else _NO_TRACES
    if why := why if read else "left out by --no-traces":
        wanted = ("kernels", "operators", "Python functions", "memory")
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
        answers = views.memory_answers(questions, None)
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
    for view, rows in shown_tables(report):
        yield page_table(view.title, rows, view.columns, limit=view.limit, note=view.legend)


def _short(text: str, run: RunPaths) -> str:
    """An error on one line, with file names relative to the run directory."""
    return printable(text.replace(f"{run.root}/", ""))


def _operator_tables(questions: TraceQuestions) -> Iterator[PageTable]:
    """Operators and nn.Modules by the GPU time that they launched; none without a GPU."""
    by_operator, launched = questions.operator_kernels(), questions.kernel_operators()
    columns = heads("operator", call_count="calls", cpu_self_ns="CPU, itself",
                    cpu_total_ns="CPU, with what it calls", kernel_count="kernels",
                    gpu_self_ns="GPU, itself", gpu_total_ns="GPU, with what it calls")  # fmt: skip
    names = [name for name, _ in columns[1:]]
    summed = by_operator.drop_nulls("operator").group_by("operator").agg(pl.col(names).sum())
    order = ("gpu_self_ns", "cpu_self_ns", "operator")
    ordered = summed.sort(*order, descending=[True, True, False])
    if ordered.height and launched.height:
        yield page_table("Operators", ordered, columns, limit=_OPERATOR_LIMIT, note=_SUMMED)
    modules = launched.drop_nulls("module").group_by("module")
    times = modules.agg(kernel_count=pl.len(), gpu_ns=pl.col("dur_ns").sum())
    if times.height:
        columns = heads("module", kernel_count="kernels", gpu_ns="GPU")
        ordered = times.sort("gpu_ns", "module", descending=[True, False])
        yield page_table("Modules", ordered, columns, limit=_OPERATOR_LIMIT, note=_INNERMOST)


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


def _memory_tables(answers: views.MemoryAnswers) -> Iterator[PageTable]:
    levels = ["allocated_bytes", "reserved_bytes", "since_start_bytes"]
    peaks = answers.timeline.group_by(views.DEVICE, maintain_order=True).agg(pl.col(levels).max())
    columns = (*heads("rank", device_type="device"), *heads(*levels))
    yield page_table("Highest in the window", peaks, columns, limit=_FUNCTION_LIMIT)
    if answers.at_peak is not None:
        largest = views.name_operators(answers.at_peak).sort("size_bytes", descending=True)
        columns = (*heads("rank"), *views.PEAK)
        yield page_table("Alive at the peak", largest, columns, limit=_MEMORY_LIMIT)
    if answers.at_peak_by_module is not None:
        by_class = views.name_classes(answers.at_peak_by_module).group_by("rank", "name")
        sums = by_class.agg(pl.col("size_bytes", "share_ratio").sum()).sort(
            "size_bytes", "rank", "name", descending=[True, False, False]
        )
        columns = heads("rank", name="module", size_bytes="size", share_ratio="share")
        title = "Alive at the peak, by class of module"
        yield page_table(title, sums, columns, limit=_MEMORY_LIMIT)
    operators = answers.by_operator.with_columns(name=pl.col("operator").fill_null(views.OUTSIDE))
    columns = heads("rank", name="operator", allocation_count="allocations",
                    allocated_bytes="allocated", freed_bytes="freed",
                    kept_bytes="kept")  # fmt: skip
    ordered = operators.sort("allocated_bytes", descending=True, nulls_last=True)
    yield page_table("By operator", ordered, columns, limit=_MEMORY_LIMIT)
