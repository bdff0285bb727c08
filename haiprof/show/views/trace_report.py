"""What `haiprof trace-report` shows: one table per question, the same for one rank and many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text
from haiprof.show.tables import trace_report as rows
from haiprof.show.tables.frame_table import frame_table
from haiprof.show.text import count_text
from haiprof.show.views.blocks import bullets, missing_block, notes_block, section
from haiprof.trace_analysis.collectives import WHOLE_JOB
from haiprof.trace_analysis.files import fault_lines, fault_names
from haiprof.trace_analysis.report import TraceReport
from haiprof.trace_format.checks.finding import EVERYTHING

_MANY = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One table as people see it."""

    title: str
    of: tuple[str, ...]
    """Tables of the report that it needs."""
    rows: Callable[[rows.Tables], pl.DataFrame]
    columns: tuple[tuple[str, str], ...]
    """Column of the frame and its heading."""
    limit: int = _MANY
    legend: str = ""
    """A note on it."""
    legend_of: str = ""
    """The column that it is about; empty for all."""
    answer: str = ""
    """The column that says in words what the table comes to."""


VIEWS = (
    View(
        title="GPU time",
        of=("temporal", "overlap"),
        rows=rows.gpu_time,
        columns=(
            ("rank", "rank"), ("device", "device"), ("span_ns", "span"),
            ("compute_ratio", "computes"), ("non_compute_ratio", "other work"),
            ("idle_ratio", "idle"), ("communication_ns", "communication"),
            ("overlap_ratio", "of it hidden"),
        ),
    ),
    View(
        title="Steps: where their time goes, first what the GPU does",
        of=("steps",),
        rows=rows.step_time,
        columns=(
            ("rank", "rank"), ("step_count", "steps"), ("wall_ns", "mean"),
            ("kernel_ratio", "kernels"), ("communication_ratio", "comm."),
            ("memcpy_ratio", "copies"), ("memset_ratio", "sets"), ("runtime_ratio", "launches"),
            ("dataloader_ratio", "loader"), ("cpu_exec_ratio", "CPU"), ("other_ratio", "other"),
        ),
    ),
    View(
        title="Busy GPU time by what ran at once",
        of=("kernel_types",),
        rows=rows.kernel_types,
        columns=(("kernel_type", "kinds"), ("time_ns", "time"), ("time_ratio", "share")),
    ),
    View(
        title="Kernels, the longest in sum",
        of=("kernels",),
        rows=lambda tables: tables["kernels"],
        columns=(
            ("name", "kernel"), ("kind", "kind"), ("count", "calls"), ("sum_ns", "time"),
            ("mean_ns", "mean"), ("slowest_rank", "slowest rank"),
            ("distance_ratio", "above others"),
        ),
        limit=10,
        legend="a communication kernel's time holds its waiting for other ranks",
        legend_of="distance_ratio",
    ),
    View(
        title="Idle streams: what for",
        of=("idle",),
        rows=rows.idle,
        columns=(
            ("rank", "rank"), ("device", "device"), ("stream", "stream"), ("idle_ns", "idle"),
            ("count", "gaps"), ("host_wait_ratio", "host"), ("kernel_wait_ratio", "next kernel"),
            ("other_ratio", "other stream"), ("unknown_ratio", "not known"),
        ),
    ),
    View(
        title="Operators, the longest in own time",
        of=("operators",),
        rows=rows.operators,
        columns=(
            ("name", "operator"), ("shapes", "shapes"), ("call_count", "calls"),
            ("cpu_self_ns", "own time"), ("cpu_total_ns", "with inner ones"),
            ("own_ratio", "share of own"),
        ),
        limit=15,
    ),
    View(
        title="Launches",
        of=("launches",),
        rows=rows.launches,
        columns=(
            ("call", "call"), ("launch_count", "launches"), ("kernel_count", "kernels"),
            ("cpu_mean_ns", "mean call"), ("delay_mean_ns", "mean delay"),
            ("short_count", "short"), ("runtime_outlier_count", "slow"),
            ("launch_delay_outlier_count", "late"),
        ),
        legend="short: at most 50 µs and longer than its kernels; slow: above 50 µs; "
        "late: the kernel began more than 100 µs after the call",
    ),
    View(
        title="Launch queues, the longest first",
        of=("queue",),
        rows=rows.queues,
        columns=(
            ("rank", "rank"), ("device", "device"), ("stream", "stream"),
            ("launch_count", "launches"), ("mean_length", "mean length"), ("max_length", "max"),
            ("empty_ratio", "time empty"), ("full_ns", "time full"),
        ),
        limit=8,
    ),
    View(
        title="Efficiency: matrix work against the device's dense peak",
        of=("efficiency",),
        rows=lambda tables: tables["efficiency"].filter(pl.col("mfu_ratio").is_not_null()),
        columns=(
            ("rank", "rank"), ("device_name", "device"), ("mfu_ratio", "MFU"),
            ("hfu_ratio", "with recomputation"), ("kernel_known_ratio", "of kernels known"),
            ("matrix_known_ratio", "of matrix kernels"),
        ),
        legend="a lower bound where not all matrix kernels are known; by operator: "
        "haiprof efficiency",
    ),
    View(
        title="Copies and sets",
        of=("memory_bandwidth",),
        rows=rows.copies,
        columns=(
            ("copy_kind", "kind"), ("copy_count", "count"), ("bytes", "size"),
            ("busy_ns", "time"), ("mean_bytes_per_s", "bandwidth"),
        ),
    ),
    View(
        title="Communication by part of the job",
        of=("communication_parts",),
        rows=rows.communication_parts,
        columns=(
            ("rank", "rank"), ("device", "device"), ("part", "part"), ("group_count", "groups"),
            ("collective_count", "count"), ("time_ns", "time"), ("exposed_ns", "exposed"),
            ("exposed_ratio", "of the span"), ("wait_ns", "waited for others"),
        ),
        legend="exposed: no kernel computes; of a pipeline that is its bubble and its transfers",
    ),
    View(
        title="Collectives of one rank",
        of=("rank_collectives",),
        rows=rows.rank_collectives,
        columns=(
            ("process_group", "group"), ("part", "part"), ("kind", "kind"), ("dtype", "type"),
            ("group_size", "ranks"), ("collective_count", "count"), ("bytes", "size"),
            ("time_ns", "time"), ("algorithm_bandwidth_bytes_per_s", "bandwidth"),
            ("bus_bandwidth_bytes_per_s", "bus bandwidth"),
        ),
        legend="the time holds waiting for other ranks: bandwidths are lower bounds",
    ),
    View(
        title="Collectives: from the last rank's arrival on",
        of=("process_groups",),
        rows=lambda tables: tables["process_groups"],
        columns=(
            ("process_group", "group"), ("part", "part"), ("kind", "kind"), ("group_size", "ranks"),
            ("collective_count", "count"), ("timed_count", "timed"), ("bytes", "size"),
            ("transfer_ns", "transfer"), ("bus_bandwidth_bytes_per_s", "bus bandwidth"),
        ),
    ),
    View(
        title="Who is late at collectives",
        of=("lateness", "stragglers"),
        rows=rows.lateness,
        columns=(
            ("rank", "rank"), ("part", "part"), ("late_ns", "later per step"), ("low_ns", "from"),
            ("high_ns", "to"), ("last_ratio", "last"), ("held_up_ns", "held others up"),
            ("waited_ns", "waited itself"),
        ),
        answer="said",
    ),
)  # fmt: skip


def trace_view(report: TraceReport) -> RenderableType:
    """The whole view."""
    return Group(
        _head(report),
        *_recording(report),
        *map(_table, shown_tables(report)),
        *_closing(report),
    )


def _recording(report: TraceReport) -> Iterator[RenderableType]:
    """What is wrong with the recording, each kind of fault in a line."""
    lines = fault_lines(report.tables["checks"], EVERYTHING)
    if lines:
        yield section("Faults of the recording", *bullets(lines))


def _head(report: TraceReport) -> RenderableType:
    files = report.tables["files"]
    title = Text(str(report.path), style="bold", overflow="fold")
    worlds = files["world_size"].drop_nulls().unique().to_list()
    of = f" of {worlds[0]}" if len(worlds) == 1 and worlds[0] != files.height else ""
    summary = [count_text(files.height, "rank") + of]
    summary.append(count_text(int(files["event_count"].sum()), "event"))
    summary.append(_steps_text(report, files))
    if "clock_offsets" in report.tables:
        agree = report.tables["clock_offsets"]["residual_ns"].drop_nulls().to_list()
        summary += [f"clocks matched to {duration_text(max(agree))}"] if agree else []
    return Group(title, Text(" · ".join(summary), style="dim"))


def _steps_text(report: TraceReport, files: pl.DataFrame) -> str:
    if report.steps is not None:
        return _range_text("step", report.steps[0], report.steps[1] - 1)
    first = files["first_step"].drop_nulls().to_list()
    last = files["last_step"].drop_nulls().to_list()
    if not first:
        return "all that was recorded, no profiler step in it"
    return f"all that was recorded, profiler {_range_text('step', min(first), max(last))}"


def _range_text(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One table of a report, without uninformative columns."""

    title: str
    rows: pl.DataFrame
    columns: tuple[tuple[str, str], ...]
    limit: int
    legend: str
    faults: str
    """What is wrong with the recording that the table rests on; empty where nothing is."""


def shown_tables(report: TraceReport) -> Iterator[Shown]:
    """The tables that have rows, in order."""
    for view in VIEWS:
        if set(view.of) <= set(report.tables):
            found = view.rows(report.tables)
            columns = [column for column in view.columns if not _is_uninformative(column[0], found)]
            told = not view.legend_of or view.legend_of in (name for name, _ in columns)
            if any(found[name].count() for name, _ in columns if name != "rank"):
                yield Shown(
                    title=view.title,
                    rows=found,
                    columns=tuple(columns),
                    limit=view.limit,
                    legend=_legend(view, found) if told else "",
                    faults=fault_names(report.tables["checks"], view.of),
                )


def _legend(view: View, found: pl.DataFrame) -> str:
    """The note below a table: what it comes to, or how it is to be read."""
    return str(found[view.answer][0]) if view.answer else view.legend


def _table(shown: Shown) -> RenderableType:
    table = frame_table(shown.rows, shown.columns, limit=shown.limit, where="--json and --csv")
    legend = [Text(shown.legend, style="dim")] if shown.legend else []
    return section(shown.title, *_fault_line(shown.faults), *table, *legend)


def _fault_line(faults: str) -> list[RenderableType]:
    """The line above a table that rests on a faulty recording."""
    return [Text(f"rests on a faulty recording: {faults}", style="yellow")] if faults else []


def _is_uninformative(name: str, found: pl.DataFrame) -> bool:
    """The device where each rank has one, groups without a name, ranks without a second one."""
    if name == "device":
        return found.select("rank", "device").unique()["rank"].is_unique().all()
    if name == "slowest_rank":
        name = "distance_ratio"
    if name == "part":
        return found.filter(pl.col(name) != WHOLE_JOB).is_empty()
    return name in ("process_group", "wait_ns", "distance_ratio") and found[name].is_null().all()


def _closing(report: TraceReport) -> Iterator[RenderableType]:
    if report.missing:
        yield missing_block(report.missing)
    if report.notes:
        yield notes_block(report.notes)
