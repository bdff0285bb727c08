"""What `haiprof node --show` and `ls --nodes` show: counters, jobs seen, GPUs held; nodes named."""

from __future__ import annotations

import pwd
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import MISSING, NS_PER_S, bytes_text, duration_text, ratio_text
from haiprof.diagnosis.named_nodes import NodeNames
from haiprof.run_analysis.node_history import NodeRecord
from haiprof.show.frame_table import frame_table, headings
from haiprof.show.text import count_text, fine_ratio_text, moment_text, printable
from haiprof.show.views.blocks import FittingTable, one_line, plain_table, section

_CPU_BUSY = ("user", "nice", "system", "irq", "softirq")
_CPU_STATES = (*_CPU_BUSY, "idle", "iowait", "steal")
_ROWS = 60
STEPS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 86_400, 7 * 86_400, 28 * 86_400)
_MOST_ROWS = 30


def step_ns(span_s: float) -> int:
    """The least step of a table that covers so much time in thirty rows."""
    fits = (step for step in STEPS_S if span_s / step <= _MOST_ROWS)
    return next(fits, STEPS_S[-1]) * NS_PER_S


def node_view(found: NodeRecord, step: int) -> RenderableType:
    """The whole view of one node."""
    title = Text(printable(found.host), style="bold")
    title.append("  recording" if found.is_recording else "  not recorded now")
    rows = node_rows(found.counters)
    shown = [(name, head) for name, head in headings("node_counters") if rows[name].count()]
    counters = frame_table(rows, shown, limit=_ROWS) if rows.height else [Text("none in this time")]
    parts = [section(f"means of {duration_text(step)}", *counters)]
    if found.held_gpus:
        parts.append(section("GPUs held", _held_table(found)))
    jobs = _jobs_table(found) if found.jobs else Text("none in this time")
    parts.append(section("jobs seen", jobs))
    notes = [Text(printable(note), style="dim") for note in (*_event_texts(found), *found.notes)]
    return Group(title, Text(_summary(found), style="dim"), *notes, *parts)


def named_nodes_view(log_dir: Path, found: NodeNames) -> RenderableType:
    """Which nodes were named, those named most often first."""
    table = plain_table("node", "named", "in runs", "of", "last", "as", left=("node", "as"))
    table.columns[-1].no_wrap = False
    for node in found.nodes:
        kinds = Counter(f"{each.role} {each.what}".rstrip() for each in node.namings)
        table.add_row(
            printable(node.host), str(len(node.namings)), str(node.named_run_count),
            str(node.run_count), moment_text(node.namings[-1].wall_ns),
            printable(", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())),
        )  # fmt: skip
    runs, preflights = (
        count_text(found.run_count, "verdict"), count_text(found.preflight_count, "preflight"),
    )  # fmt: skip
    named = f"{len(found.nodes)} of {count_text(found.node_count, 'node')} named"
    parts: list[RenderableType] = [Text(str(log_dir), style="bold"),
                                   one_line(f"{named} by {runs} and {preflights}"),
                                   *([table] if found.nodes else [])]  # fmt: skip
    if found.unjudged:
        names = count_text(len(found.unjudged), "run")
        parts.append(Text(f"{names} without a verdict kept at the end: name nobody", style="dim"))
    return Group(*parts)


def node_rows(counters: pl.DataFrame) -> pl.DataFrame:
    """One row for each step: what the table shows; missing where it was not measured."""

    def of(source: str, metric: str, *, statistic: str = "mean") -> pl.Expr:
        chosen = (pl.col("source") == source) & (pl.col("metric") == metric)
        return pl.col(statistic).filter(chosen)

    def total(source: str, metric: str) -> pl.Expr:
        return pl.when(of(source, metric).len() > 0).then(of(source, metric).sum())

    busy, whole = (
        pl.sum_horizontal(of("host", f"cpu_{state}_cores").sum() for state in states)
        for states in (_CPU_BUSY, _CPU_STATES)
    )
    memory = total("host", "memory_total_bytes")
    network = ("disk_read", "disk_write", "network_receive", "network_transmit")
    rates = {f"{name}_bytes_per_s": ("host", name) for name in network}
    rates |= {f"ib_{name}_bytes_per_s": ("infiniband", name) for name in ("receive", "transmit")}
    rows = counters.group_by("time_ns").agg(
        cpu_ratio=pl.when(whole > 0).then(busy / whole),
        memory_used_ratio=1 - total("host", "memory_available_bytes") / memory,
        gpu_ratio=of("gpu", "utilization_ratio").mean(),
        gpu_max_ratio=of("gpu", "utilization_ratio", statistic="max").max(),
        gpu_memory_bytes=total("gpu", "memory_used_bytes"),
        gpu_watts=total("gpu", "power_watts"),
        **{rate: total(source, f"{name}_bytes_per_s") for rate, (source, name) in rates.items()},
    )
    when = pl.col("time_ns").map_elements(moment_text, return_dtype=pl.String).alias("when")
    return rows.sort("time_ns").select(when, pl.exclude("time_ns"))


def _summary(found: NodeRecord) -> str:
    full = "" if found.whole_bytes is None else f", {bytes_text(found.whole_bytes)} when full"
    cost = "" if found.cpu_ratio is None else f"its own cost {fine_ratio_text(found.cpu_ratio)}"
    most = "" if found.peak_rss_bytes is None else f"{bytes_text(found.peak_rss_bytes)} at most"
    parts = (
        f"{bytes_text(found.size_bytes)} on the disk{full}",
        cost and f"{cost} of a core",
        most,
    )
    return " · ".join(filter(None, parts))


def _event_texts(found: NodeRecord) -> Iterator[str]:
    for event in found.events[-_MOST_ROWS:]:
        when = moment_text(event.get("wall_ns"))
        if event.get("type") == "clock_set":
            by = duration_text(event.get("by_ns"))
            yield f"{when}: the clock was set, or the machine slept: {by}"
        elif event.get("type") == "disk_full":
            yield f"{when}: the disk was full: counters are missing from here"


def _held_table(found: NodeRecord) -> RenderableType:
    rows: list[list[str | Text]] = [
        [
            str(each.gpu), moment_text(each.start_wall_ns),
            _length_text(each.start_wall_ns, each.end_wall_ns, found),
            ratio_text(each.utilization_mean_ratio), ratio_text(each.utilization_max_ratio),
            _user(each.uid),
            one_line(f"{'unused: ' if each.unused else ''}{each.pid} {each.command}"),
        ]
        for each in found.held_gpus[-_ROWS:]
    ]  # fmt: skip
    heads = ("GPU", "since", "for", "mean", "max", "user", "process")
    return FittingTable(heads, rows, left=("since", "user", "process"), first_to_go=("since",))


def _jobs_table(found: NodeRecord) -> RenderableType:
    rows: list[list[str | Text]] = [
        [
            moment_text(job.start_wall_ns), _length_text(job.start_wall_ns, job.end_wall_ns, found),
            _user(job.uid), one_line(job.run or f"{job.pid} {job.command}", middle=True),
        ]
        for job in found.jobs[-_ROWS:]
    ]  # fmt: skip
    heads = ("started", "lasted", "user", "run, or process without haiprof")
    return FittingTable(heads, rows, left=("started", "user", heads[-1]), first_to_go=("user",))


def _length_text(start_ns: int | None, end_ns: int | None, found: NodeRecord) -> str:
    """How long; of what has not ended, or whose end nobody saw, only that."""
    if end_ns is None:
        return "goes on" if found.is_recording else "end not seen"
    return MISSING if start_ns is None else duration_text(max(0, end_ns - start_ns))


def _user(uid: int | None) -> str:
    try:
        return MISSING if uid is None else pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
