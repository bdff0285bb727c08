"""What `haiprof trace memory` shows: of a trace, a snapshot, or torch.profiler's own file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table

from haiprof.base.errors import MissingDataError
from haiprof.base.units import bytes_text, duration_text
from haiprof.show.figures.style import SKY
from haiprof.show.frame_table import frame_table, headings, heads
from haiprof.show.terminal import Sparkline
from haiprof.show.views.blocks import bullets, missing_block, section
from haiprof.trace_analysis.memory_timeline import CATEGORIES
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_format.memory_snapshot import memory_history, read_memory_snapshot, sum_by_line


def category_view(timeline: pl.DataFrame) -> RenderableType:
    """What each category holds where all together hold most."""
    span = int(timeline["ts_ns"][-1]) - int(timeline["ts_ns"][0])
    peak = int(str(timeline["total_bytes"].max()))
    title = f"Memory by category, {duration_text(span)}, {bytes_text(peak)} at the peak"
    rows = categories_at_peak(timeline)
    return section(title, *frame_table(rows, headings("memory_categories"), limit=len(CATEGORIES)))


def categories_at_peak(timeline: pl.DataFrame) -> pl.DataFrame:
    """A row per category: what it holds where all together hold most, the largest first."""
    peak = timeline.row(int(timeline["total_bytes"].arg_max() or 0), named=True)
    rows = [
        {
            "name": name.replace("_", " "), "at_peak_bytes": peak[f"{name}_bytes"],
            "share_ratio": peak[f"{name}_bytes"] / max(peak["total_bytes"], 1),
            "max_bytes": timeline[f"{name}_bytes"].max(),
            "end_bytes": timeline[f"{name}_bytes"][-1],
        }
        for name in CATEGORIES
    ]  # fmt: skip
    return pl.DataFrame(rows).sort("at_peak_bytes", descending=True)


_DEVICES = headings("snapshot_devices")
_LINES = headings("snapshot_lines")
_FAILED = headings("snapshot_failures")
_HELD = headings("snapshot_history")
_NO_HISTORY = "the snapshot holds no history: torch.cuda.memory._record_memory_history records one"
_NO_LINE = "(no line of your code)"
_MEMORY_SNAPSHOT_BEFORE = "(before the history began)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAnswers:
    """What a snapshot of the CUDA caching allocator says."""

    devices: pl.DataFrame
    by_line: pl.DataFrame
    failed: pl.DataFrame  # Allocations in its history that failed, oldest first
    event_count: int
    timeline: pl.DataFrame  # What it held over time; empty where no history was recorded
    history_by_line: pl.DataFrame  # The same by line of code


def snapshot_answers(path: Path) -> SnapshotAnswers:
    """Reads a snapshot; nothing in it is executed."""
    from haiprof.base.code_places import frame_text, own_frame

    found = read_memory_snapshot(path)
    free = found.blocks.filter(pl.col("state") == "inactive").group_by("device").agg(
        free_bytes=pl.col("size_bytes").sum(), largest_free_bytes=pl.col("size_bytes").max()
    )  # fmt: skip
    devices = found.segments.group_by("device").agg(
        reserved_bytes=pl.col("size_bytes").sum(), allocated_bytes=pl.col("allocated_bytes").sum(),
        private_bytes=pl.col("size_bytes").filter("private").sum(),
        segment_count=pl.len().cast(pl.Int64),
    ).join(free, on="device", how="left").sort("device")  # fmt: skip
    own = [own_frame(stack) for stack in found.stacks]
    places = {number: frame_text(frame) for number, frame in enumerate(own) if frame is not None}
    failed = found.events.filter(pl.col("action") == "oom").with_columns(
        line=pl.col("stack").replace_strict(places, default=None, return_dtype=pl.String)
    )
    total = pl.col("size_bytes").sum().over("device")
    by_line = sum_by_line(found).with_columns(share_ratio=pl.col("size_bytes") / total)
    history = memory_history(found)
    return SnapshotAnswers(
        devices=devices, by_line=by_line, event_count=found.events.height,
        failed=failed.select("device", "time_ns", "line", "size_bytes", "device_free_bytes"),
        timeline=history.levels, history_by_line=history.by_line,
    )  # fmt: skip


def snapshot_view(answers: SnapshotAnswers) -> RenderableType:
    """The whole view."""
    named = pl.col("line").fill_null(_MEMORY_SNAPSHOT_BEFORE).alias("name")
    parts = [
        section("GPU memory in the snapshot", *frame_table(answers.devices, _DEVICES, limit=16))
    ]
    parts += _history_parts(answers)
    if answers.by_line.height:
        lines = answers.by_line.with_columns(named)
        parts.append(section("In use, by line of your code", *frame_table(lines, _LINES, limit=20)))
    if answers.failed.height:
        failed = answers.failed.with_columns(named)
        parts.append(section("Allocations that failed", *frame_table(failed, _FAILED, limit=8)))
    missing = {} if answers.event_count else {"memory over time": _NO_HISTORY}
    return Group(*parts, missing_block(missing))


def _history_parts(answers: SnapshotAnswers) -> Iterator[RenderableType]:
    """Memory over time, and who held it at its peak."""
    if answers.timeline.is_empty():
        return
    on_gpu = answers.timeline.with_columns(rank=pl.lit(None, pl.Int64), device_type=pl.lit("GPU"))
    sentences = [_history_text(own) for _, own in on_gpu.group_by("device", maintain_order=True)]
    yield section("Memory over time", _lines(on_gpu), *bullets(sentences))
    before = pl.when("is_older").then(pl.lit(_MEMORY_SNAPSHOT_BEFORE)).otherwise(pl.lit(_NO_LINE))
    named = answers.history_by_line.with_columns(name=pl.coalesce("line", before))
    yield section("Held at the peak, by line of your code", *frame_table(named, _HELD, limit=12))
    grown = named.filter(pl.col("growth_bytes") > 0).sort(-pl.col("growth_bytes"), "name")
    if grown.height:
        title = "Allocated in the history and still held at its end"
        yield section(title, *frame_table(grown, _HELD, limit=8))


def _history_text(own: pl.DataFrame) -> str:
    """The history of one GPU in a sentence; the lowest levels tell growth from working memory."""
    held = own["allocated_bytes"]
    peak = held.arg_max() or 0
    quarters = own.with_columns(part=pl.int_range(pl.len()) * 4 // pl.len())
    lows = quarters.group_by("part", maintain_order=True).agg(pl.col("allocated_bytes").min())
    levels = ", ".join(map(bytes_text, lows["allocated_bytes"]))
    return (
        f"GPU {own['device'][0]}: {own.height:,} events; {bytes_text(held[0])} after the first one,"
        f" at most {bytes_text(held[peak])} after event {peak + 1:,}, {bytes_text(held[-1])} at the"
        f" end; the lowest level in each quarter of the events: {levels}"
    )


_BUCKETS = 100
DEVICE = ["rank", "device_type", "device"]
PEAK = heads(name="allocated by", block_count="blocks", size_bytes="size", share_ratio="share")
_OPERATORS = headings("memory_operators")
_OUTSIDE_MODULES = "(outside all modules)"
OUTSIDE, _BEFORE = "(outside all operators)", "(allocated before the trace)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAnswers:
    """The frames of `TraceAnalysis` on memory."""

    timeline: pl.DataFrame
    at_peak: pl.DataFrame | None  # Null where events have no addresses
    at_peak_by_module: pl.DataFrame | None  # None where no module, range or stack was recorded
    by_operator: pl.DataFrame
    missing: dict[str, str]  # By frame: why it is null


def memory_answers(analysis: TraceQuestions, rank: int | None) -> MemoryAnswers:
    """Asks for all of it."""
    if rank is not None:
        analysis.file_of(rank)
    own = pl.lit(True) if rank is None else pl.col("rank") == rank
    timeline, missing = analysis.memory_timeline().filter(own), dict[str, str]()

    def ask(name: str, question: Callable[[], pl.DataFrame]) -> pl.DataFrame | None:
        try:
            return question().filter(own)
        except MissingDataError as error:
            missing[name] = str(error)
            return None

    at_peak = ask("at_peak", analysis.memory_at_peak)
    return MemoryAnswers(
        timeline=timeline,
        at_peak=at_peak,
        at_peak_by_module=None if at_peak is None
        else ask("at_peak_by_module", analysis.memory_at_peak_by_module),
        by_operator=analysis.memory_by_operator().filter(own),
        missing=missing,
    )  # fmt: skip


def name_operators(found: pl.DataFrame) -> pl.DataFrame:
    """Allocations with their operator as `name`, and their share of all that was alive."""
    return _name_allocations(found, pl.col("operator"), OUTSIDE)


def name_classes(found: pl.DataFrame) -> pl.DataFrame:
    """The same by class of module: the instances of one have one name."""
    return _name_allocations(found, pl.col("module").str.replace(r"_\d+$", ""), _OUTSIDE_MODULES)


def _name_allocations(found: pl.DataFrame, name: pl.Expr, outside: str) -> pl.DataFrame:
    before = pl.when(pl.col("origin") == "before").then(pl.lit(_BEFORE))
    named = pl.coalesce(before, name, pl.lit(outside))
    return found.with_columns(name=named, share_ratio=pl.col("ratio"))


def _peak_by_class(found: pl.DataFrame, *, limit: int) -> Iterator[RenderableType]:
    """What was alive at the peak by class of module: the instances of one are summed."""
    for key, alive in name_classes(found).group_by(DEVICE, maintain_order=True):
        sums = alive.group_by("name").agg(pl.col("block_count", "size_bytes", "share_ratio").sum())
        ordered = sums.with_columns(
            pl.when(pl.col("name") != _BEFORE).then("block_count").alias("block_count")
        ).sort(-pl.col("size_bytes"), "name")
        yield section(
            f"Alive at the peak of {_device(key)}, by class of module",
            *frame_table(ordered, PEAK, limit=limit),
        )


def memory_view(answers: MemoryAnswers) -> RenderableType:
    """The whole view; of several ranks the peaks only."""
    alone = answers.timeline["rank"].n_unique() == 1
    parts = [section("Memory over time", _lines(answers.timeline))]
    if answers.at_peak is not None:
        for key, alive in name_operators(answers.at_peak).group_by(DEVICE, maintain_order=True):
            title = f"Alive at the peak of {_device(key)}: {bytes_text(alive['peak_bytes'][0])}"
            parts.append(section(title, *frame_table(alive, PEAK, limit=10 if alone else 3)))
    if answers.at_peak_by_module is not None:
        parts += _peak_by_class(answers.at_peak_by_module, limit=10 if alone else 3)
    operators = answers.by_operator.with_columns(name=pl.col("operator").fill_null(OUTSIDE))
    for key, own in operators.group_by(DEVICE, maintain_order=True) if alone else ():
        table = frame_table(own.sort(-pl.col("allocated_bytes")), _OPERATORS, limit=8)
        parts.append(section(f"Operators on {_device(key)}", *table))
    return Group(*parts, missing_block(answers.missing))


def _lines(timeline: pl.DataFrame) -> RenderableType:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False, expand=True)
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="dim")
    table.add_column("", ratio=1, no_wrap=True)
    table.add_column("max", justify="right", no_wrap=True)
    for key, own in timeline.group_by(DEVICE, maintain_order=True):
        title = _device(key)
        if own["ts_ns"][0]:  # 0 is a history without times, which are places
            span = int(own["ts_ns"][-1]) - int(own["ts_ns"][0])
            title += f", {duration_text(span)}"
        # Totals if they were recorded, else the change since the start.
        totals = [c for c in ("allocated_bytes", "reserved_bytes") if own[c].count()]
        for column in totals or ["since_start_bytes"]:
            values = _buckets(own, column)
            top = max(value for value in values if value is not None)
            what = column.removesuffix("_bytes").replace("_", " ")
            table.add_row(title, what, Sparkline(values, top=top, color=SKY), bytes_text(top))
            title = ""
    return table


def _buckets(own: pl.DataFrame, column: str) -> list[float | None]:
    """The highest value in each part of the time; a level holds until the next event."""
    first, last = int(own["ts_ns"][0]), int(own["ts_ns"][-1])
    width = max(1, (last - first) // _BUCKETS + 1)
    place = ((pl.col("ts_ns") - first) // width).alias("place")
    value = pl.col(column)
    levels = own.select(place, value).group_by("place").agg(value.max(), held=value.last())
    every = pl.DataFrame({"place": range(_BUCKETS)}, schema={"place": pl.Int64})
    found = every.join(levels, on="place", how="left").sort("place")
    before = pl.col("held").forward_fill().shift(1)
    return found.select(pl.max_horizontal(column, before))[column].cast(pl.Float64).to_list()


def _device(key: tuple[object, ...]) -> str:
    rank, kind, number = key
    device = str(kind) if number is None else f"{kind} {number}"
    return device if rank is None else f"rank {rank}, {device}"
