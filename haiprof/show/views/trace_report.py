"""What `haiprof trace report` shows: one table per question, sums over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text
from haiprof.show.frame_table import HEADINGS, Columns, frame_table
from haiprof.show.text import count_text
from haiprof.show.views.blocks import bullets, missing_block, notes_block, section
from haiprof.show.views.tables import LAUNCH_HEADS
from haiprof.trace_analysis.collectives import WHOLE_JOB
from haiprof.trace_analysis.files import fault_lines, fault_names
from haiprof.trace_analysis.report import TraceReport
from haiprof.trace_format.launch_checks import EVERYTHING

Tables = Mapping[str, pl.DataFrame]

STEP_PARTS = (
    "kernel", "communication", "memcpy", "memset", "runtime", "dataloader", "cpu_exec", "other",
)  # fmt: skip
_SHAPES_WIDTH = 32
IDLE_PARTS = ("host_wait", "kernel_wait", "other", "unknown")


def gpu_time(tables: Tables) -> pl.DataFrame:
    """`temporal` with the communication of `overlap`, per rank and device."""
    keys = ["rank", "device"]
    talk = tables["overlap"].select(*keys, "communication_ns", "overlap_ratio")
    return tables["temporal"].join(talk, on=keys, how="left").sort(keys)


def step_time(tables: Tables) -> pl.DataFrame:
    """Mean step of each rank: `rank`, `step_count`, `wall_ns`, and each part's share of it.

    Without profiler steps it is all of the trace, and `step_count` is null.
    """
    wall = pl.col("wall_ns")
    parts = [
        pl.when((wall.sum() > 0) & pl.col(f"{part}_ns").is_not_null().all())
        .then(pl.col(f"{part}_ns").sum() / wall.sum())
        .alias(f"{part}_ratio")
        for part in STEP_PARTS
    ]
    found = tables["steps"].group_by("rank", maintain_order=True)
    count = pl.col("step").count()
    return found.agg(pl.when(count > 0).then(count).alias("step_count"), wall.mean(), *parts)


def kernel_types(tables: Tables) -> pl.DataFrame:
    """Busy time by kind over all ranks, the longest first; without what did not happen."""
    found = tables["kernel_types"].group_by("kernel_type").agg(pl.col("time_ns").sum())
    share = pl.col("time_ns") / pl.col("time_ns").sum()
    known = found.filter(pl.col("time_ns") > 0).with_columns(time_ratio=share)
    return known.sort(-pl.col("time_ns"), "kernel_type")


def idle(tables: Tables) -> pl.DataFrame:
    """Idle time of each stream and the share of each cause: `host_wait_ratio`, ..."""
    keys = ["rank", "device", "stream"]
    category = pl.col("idle_category")
    shares = [
        pl.col("idle_ratio").filter(category == part).first().alias(f"{part}_ratio")
        for part in IDLE_PARTS
    ]
    found = tables["idle"].group_by(keys).agg(pl.col("idle_ns", "count").sum(), *shares)
    return found.sort(keys)


def launches(tables: Tables) -> pl.DataFrame:
    """Launches by call over all ranks; of events without launch only how many they are."""
    counts = ("launch_count", "kernel_count", "short_count", "runtime_outlier_count",
              "launch_delay_outlier_count")  # fmt: skip
    known = pl.col("call").is_not_null()
    found = tables["launches"].group_by("call").agg(
        *(pl.col(name).sum() for name in counts),
        cpu_mean_ns=pl.col("cpu_duration_ns").sum() / pl.col("launch_count").sum(),
        delay_mean_ns=pl.col("launch_delay_ns").sum() / pl.col("launch_count").sum(),
    )  # fmt: skip
    numbers = [name for name in found.columns if name not in ("call", "kernel_count")]
    own = found.with_columns(pl.when(known).then(pl.col(name)).alias(name) for name in numbers)
    ordered = own.sort(-pl.col("kernel_count"), "call")
    return ordered.with_columns(pl.col("call").fill_null("launch not in the trace"))


def queues(tables: Tables) -> pl.DataFrame:
    """Launch queues, the longest first, with the share of time in which each was empty."""
    span = pl.col("span_ns")
    share = pl.when(span > 0).then(pl.col("empty_ns") / span)
    found = tables["queue"].with_columns(empty_ratio=share)
    return found.sort("mean_length", descending=True, nulls_last=True)


def copies(tables: Tables) -> pl.DataFrame:
    """Copies and sets by kind over all ranks; bytes are null unless every size is known."""
    size, busy = pl.col("bytes"), pl.col("busy_ns").sum()
    is_known = size.is_not_null().all()
    found = tables["memory_bandwidth"].group_by("copy_kind").agg(
        pl.col("copy_count").sum(), busy, bytes=pl.when(is_known).then(size.sum()),
        mean_bytes_per_s=pl.when(is_known & (busy > 0)).then(size.sum() / busy * 1e9),
    )  # fmt: skip
    return found.sort(-pl.col("busy_ns"), "copy_kind")


def operators(tables: Tables) -> pl.DataFrame:
    """Operators over all ranks of traces without a GPU, the most own time first."""
    short = pl.col("shapes").str.replace_all(" ", "").str.strip_prefix("[").str.strip_suffix("]")
    shapes = short.str.replace_all(r",\[\]", "").str.slice(0, _SHAPES_WIDTH)
    summed = tables["operators"].group_by("operator", "shapes").agg(
        pl.col("call_count", "cpu_self_ns", "cpu_total_ns").sum()
    )  # fmt: skip
    own = pl.col("cpu_self_ns")
    return summed.with_columns(
        name="operator", shapes=shapes, own_ratio=own / own.sum()
    ).sort(-own, "operator", "shapes", nulls_last=True)  # fmt: skip


def communication_parts(tables: Tables) -> pl.DataFrame:
    """Communication by part; nothing where no group says which part it serves."""
    found = tables["communication_parts"]
    return found.clear() if found.filter(pl.col("part") != WHOLE_JOB).is_empty() else found


def rank_collectives(tables: Tables) -> pl.DataFrame:
    """The collectives of a rank that is alone; of several ranks nothing: who waited is known."""
    found = tables["rank_collectives"]
    return found.clear() if "process_groups" in tables else found


def known_efficiency(tables: Tables) -> pl.DataFrame:
    """Efficiency of the ranks whose MFU is known."""
    return tables["efficiency"].filter(pl.col("mfu_ratio").is_not_null())


def launching_calls(tables: Tables) -> pl.DataFrame:
    """Calls of the operating system by threads that launch work."""
    return tables["os_calls"].filter("is_launching")


def late_ranks(tables: Tables) -> pl.DataFrame:
    """Lateness of each rank, with who was last at how many collectives."""
    late, stragglers = tables["lateness"], tables["stragglers"]
    return late.join(stragglers, on="rank", how="left", maintain_order="left", suffix="_any")


_MANY = 12


@dataclass(frozen=True, slots=True)
class View:
    """One table as people see it."""

    title: str
    of: Sequence[str]  # Tables of the report that it needs
    rows: Callable[[Tables], pl.DataFrame] | None
    """What is shown of them; None shows the first as it is."""
    columns: Columns
    limit: int = _MANY
    legend: str = ""
    legend_of: str = ""  # The column that it is about; empty for all
    answer: str = ""  # The column that says in words what the table comes to, after the legend


_ROWS = {each.__name__: each for each in (
    gpu_time, step_time, kernel_types, idle, launches, queues, copies, operators,
    communication_parts, rank_collectives, known_efficiency, launching_calls, late_ranks,
)}  # fmt: skip
VIEWS = tuple(
    View(**{**each, "columns": [*each["columns"].items()], "rows": _ROWS.get(each.get("rows"))})
    for each in HEADINGS["trace_report"]
)


def trace_view(report: TraceReport) -> RenderableType:
    """The whole view."""
    faults = fault_lines(report.tables["checks"], EVERYTHING)
    said = "\n".join(faults)
    notes = [note for note in report.notes if (note.partition(": ")[2] or note) not in said]
    return Group(
        _head(report),
        *([section("Faults of the recording", *bullets(faults))] if faults else []),
        *(_table(view, rows, report) for view, rows in shown_tables(report)),
        missing_block(report.missing),
        notes_block(notes),
    )


def _table(view: View, rows: pl.DataFrame, report: TraceReport) -> RenderableType:
    table = frame_table(rows, view.columns, limit=view.limit, where="--json and --csv")
    faults = fault_names(report.tables["checks"], view.of)
    above = [Text(f"rests on a faulty recording: {faults}", style="yellow")] if faults else []
    legend = [Text(view.legend, style="dim")] if view.legend else []
    return section(view.title, *above, *table, *legend)


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


def shown_tables(report: TraceReport) -> Iterator[tuple[View, pl.DataFrame]]:
    """The tables that have rows, in order, without uninformative columns."""
    for view in VIEWS:
        if set(view.of) <= set(report.tables):
            found = view.rows(report.tables) if view.rows else report.tables[view.of[0]]
            columns = [column for column in view.columns if not _is_uninformative(column[0], found)]
            told = not view.legend_of or view.legend_of in (name for name, _ in columns)
            if any(found[name].count() for name, _ in columns if name != "rank"):
                answers = found[view.answer].drop_nulls() if view.answer else [""]
                legend = f"{view.legend}{answers[0]}" if len(answers) else ""
                about = legend if told else ""
                yield replace(view, columns=columns, legend=about), found


_OPTIONAL = (
    "kernel_ratio", "communication_ratio", "memcpy_ratio", "memset_ratio", "runtime_ratio",
    "process_group", "wait_ns", "distance_ratio", "link_bytes_per_s", "link_ratio",
    *dict(LAUNCH_HEADS),
)  # fmt: skip


def _is_uninformative(name: str, found: pl.DataFrame) -> bool:
    """The device where each rank has one, groups without a name, a GPU that there is not."""
    if name == "device":
        return found.select("rank", "device").unique()["rank"].is_unique().all()
    if name == "part":
        return found.filter(pl.col(name) != WHOLE_JOB).is_empty()
    name = "distance_ratio" if name == "slowest_rank" else name
    return name in _OPTIONAL and found[name].is_null().all()
