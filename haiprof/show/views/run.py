"""What `overview`, `rank` and `lines` show of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, islice

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base import units
from haiprof.base.code_places import place_text
from haiprof.base.ledger import POSITIONS, position_words
from haiprof.run_analysis.code_samples import CODE_PHASES
from haiprof.run_analysis.flame_graph import OTHER_THREADS
from haiprof.run_analysis.settings import ModelSettings, RankSettings
from haiprof.run_analysis.steps import WORDS
from haiprof.show.card import work_text
from haiprof.show.figures.style import PHASES
from haiprof.show.frame_table import Fields, heads, record_table
from haiprof.show.rank_summary import OneRankSummary, SlowStep
from haiprof.show.series import fold_series
from haiprof.show.summary import NodeSummary, OverviewSummary, RankSummary, Split, rank_name
from haiprof.show.terminal import PHASE_OF, PhaseMark, SplitBar, SplitLegend, phase_heading
from haiprof.show.text import PHASE_TITLES, count_text, printable, share_text, steps_text
from haiprof.show.views.blocks import (
    FittingTable,
    LabelTable,
    header_block,
    missing_block,
    more_lines,
    notes_block,
    one_line,
    plain_table,
    section,
    series_block,
)
from haiprof.show.views.trace_files import nccl_block

_SWITCHES = {
    "anomaly": "anomaly detection", "deterministic": "deterministic algorithms",
    "cudnn_benchmark": "cudnn.benchmark", "cudnn_deterministic": "cudnn.deterministic",
    "tracemalloc": "tracemalloc", "developer_mode": "python -X dev",
}  # fmt: skip


def setting_rows(settings: RankSettings) -> list[tuple[str, str]]:
    """What it is, and how it is set; what torch or Python leave alone by itself is left out."""
    rows = [("model", _model_text(model)) for model in settings.models]
    for optimizer in settings.optimizers:
        given = {"foreach": optimizer.foreach, "fused": optimizer.fused}
        chosen = [f"{name}={value}" for name, value in given.items() if value is not None]
        how = ", ".join(chosen) or "foreach and fused left to torch"
        tensors = count_text(optimizer.tensor_count or 0, "tensor")
        rows.append(("optimizer", f"{optimizer.name}: {tensors}, {how}"))
    told = {"default": settings.flags.get("default_dtype"),
            "float32 matmul": settings.flags.get("matmul_precision"),
            "autocast": settings.autocast or "not seen at the call of a model"}  # fmt: skip
    known = (f"{name} {value}" for name, value in told.items() if value)
    rows.append(("precision", ", ".join(known)))
    rows.append(("cores", ", ".join(_core_parts(settings))))
    rows.append(("switched on", ", ".join(_switch_parts(settings))))
    off = [n for n in ("mkldnn", "cudnn_enabled") if settings.flags.get(n) is False]
    rows += [("switched off", name.removesuffix("_enabled")) for name in off]
    rows.append(("collector", ", ".join(_collector_parts(settings))))
    rows += [("not read", problem) for problem in settings.problems]
    return [(name, text) for name, text in rows if text]


def _model_text(model: ModelSettings) -> str:
    parts = [count_text(model.parameter_count, "parameter")] if model.parameter_count else []
    parts.append(f"in {count_text(model.tensor_count or 0, 'tensor')}")
    if model.trainable_ratio is not None and model.trainable_ratio < 1:
        parts.append(f"{units.ratio_text(model.trainable_ratio)} trained")
    parts.append(" and ".join(sorted(model.dtypes)))
    parts.append(f"on {' and '.join(model.devices) or 'no device'}")
    if model.fsdp_unit_count:
        parts.append(count_text(model.fsdp_unit_count, "FSDP unit"))
    if model.ddp is not None:
        known = {name: value for name, value in model.ddp.items() if value is not None}
        given = (f"{n}={v:.0f}" if isinstance(v, float) else f"{n}={v}" for n, v in known.items())
        parts.append(f"DDP({', '.join(given)})")
    return f"{model.name}: {', '.join(part for part in parts if part)}"


def _core_parts(settings: RankSettings) -> Iterator[str]:
    if settings.operator_threads is not None:
        yield f"{count_text(settings.operator_threads, 'thread')} per operator"
    if settings.cores is not None:
        yield f"{count_text(settings.cores, 'core')} allowed"
    if settings.cpu_limit_cores is not None:
        yield f"control group limits it to {settings.cpu_limit_cores:g} cores"
    if settings.memory_limit_bytes is not None:
        yield f"and to {units.bytes_text(settings.memory_limit_bytes)} of memory"


def _switch_parts(settings: RankSettings) -> Iterator[str]:
    yield from (title for name, title in _SWITCHES.items() if settings.flags.get(name) is True)
    if ratio := settings.on_ratio("profiler"):
        yield f"a profiler of the job's own ({units.ratio_text(ratio)} of the time)"
    level = settings.flags.get("distributed_debug")
    if level not in (None, "OFF"):
        yield f"TORCH_DISTRIBUTED_DEBUG={level}"


def _collector_parts(settings: RankSettings) -> Iterator[str]:
    if settings.gc_enabled is not None:
        thresholds = ", ".join(map(str, settings.gc_thresholds))
        yield f"thresholds {thresholds}" if settings.gc_enabled else "disabled"
    looks = settings.looks
    if looks.collect_count:
        times = count_text(looks.collect_count, "call")
        yield f"{times} of gc.collect() for {units.duration_text(looks.collect_ns)}"


ONE_LINE_CELLS_WIDTH = 108
BAR_WIDTH = 132
COMPACT_BELOW_WIDTH = 84
_STEPS_WIDTH = 68
HOST_WIDTH = 14
SHOWN_RANKS = 24


def overview_view(summary: OverviewSummary, *, width: int) -> RenderableType:
    """The terminal view of a job."""
    ranks = shown_ranks(summary.ranks)
    last = {rank.rank: rank.step_count for rank in sorted(summary.ranks, key=lambda r: r.attempt)}
    parts = [header_block(summary.run, counts=steps_text(sum(last.values()), len(last)))]
    if any(rank.step_count for rank in ranks):
        work = [Text(work_text(summary.work), style="dim")] if summary.work else []
        parts.append(section("Steps", *_steps(ranks, width), *work))
    parts += _machine(summary, ranks, width)
    if summary.series:
        series = [
            line
            for _, group in groupby(summary.series, key=lambda s: s.title)
            for line in fold_series(list(group))
        ]
        parts.append(section("Over time", series_block(series, summary.window, begin=summary.span)))
    if summary.reactions:
        lines = [Text(printable(line), overflow="fold") for line in summary.reactions]
        parts.append(section("Noticed", *lines))
    if summary.nccl is not None:
        parts.append(section("NCCL", *nccl_block(summary.nccl)))
    if summary.traces:
        parts.append(section("Traces", *(Text(line, overflow="fold") for line in summary.traces)))
    parts.append(missing_block(summary.missing))
    notes = list(summary.notes)
    if len(ranks) < len(summary.ranks):
        notes.append(f"shown are the {len(ranks)} slowest of {len(summary.ranks)}; all: --json")
    return Group(*parts, notes_block(notes))


def shown_ranks(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """All ranks, or the slowest of many."""
    if len(ranks) <= SHOWN_RANKS:
        return list(ranks)
    return sorted(ranks, key=lambda rank: -(rank.mean_step_ns or 0.0))[:SHOWN_RANKS]


def _steps(ranks: Sequence[RankSummary], width: int) -> Iterator[RenderableType]:
    bars = width >= BAR_WIDTH
    counts = ["steps"] if width >= _STEPS_WIDTH else []  # which the header has, too
    names = ["rank", *counts, "mean", "median"]
    table = plain_table(*names, left=["rank"], gap=2 if width >= COMPACT_BELOW_WIDTH else 1)
    for phase in PHASES:
        table.add_column(phase_heading(phase, width), justify="right", no_wrap=True)
    if bars:
        table.add_column("mean step", ratio=1)
    longest = max((rank.mean_step_ns or 0.0 for rank in ranks), default=0.0)
    for rank in ranks:
        splits = [("", rank.split_ns)]
        splits += [] if rank.device_split_ns is None else [(" gpu", rank.device_split_ns)]
        for clock, split in splits:
            cells = [rank_name(rank) + clock, *(str(rank.step_count) for _ in counts)]
            times = (rank.mean_step_ns, rank.median_step_ns)
            cells += ["" if clock else units.duration_text(ns) for ns in times]
            row: list[RenderableType] = [*cells, *_split_cells(split, width)]
            scale = (rank.mean_step_ns or 0.0) / longest if longest else 1.0
            table.add_row(*row, *([SplitBar(split, scale=scale)] if bars else []))
    table.expand = bars
    yield table
    if bars:
        yield SplitLegend()


def _split_cells(split: Split, width: int) -> Iterator[str]:
    total = sum(ns or 0.0 for ns in split.values())
    between = " " if width >= ONE_LINE_CELLS_WIDTH else "\n"
    for ns in (split[phase] for phase in PHASES):
        share = f"{share_text(ns, total):>5}"
        yield units.MISSING if ns is None else f"{units.duration_text(ns)}{between}{share}"


def _host(node: NodeSummary) -> Text:
    name = Text(str(node.host))
    name.truncate(HOST_WIDTH, overflow="ellipsis")
    return name


_PROCESSES: Fields = (
    (rank_name, "rank"), ("pid", "pid"), ("cpu_cores", "CPU cores"), ("memory_rss_bytes", "memory"),
    ("read_bytes_per_s", "read"), ("write_bytes_per_s", "written"),
)  # fmt: skip
_READ_AND_WRITTEN = "read and written: files, cached ones too, pipes and sockets"
_GPUS: Fields = heads(
    gpu="GPU", rank="rank", utilization_ratio="utilization", memory_used_bytes="memory",
    memory_total_bytes="of", power_watts="power",
)  # fmt: skip
_NODE_LOAD: Fields = (
    (_host, "node"), ("cpu_utilization_ratio", "CPU"),
    (lambda n: units.MISSING if n.cpu_count is None else count_text(int(n.cpu_count), "core"),
     "of"), ("memory_used_bytes", "memory"), ("memory_total_bytes", "of"),
)  # fmt: skip
_NODE_TRAFFIC: Fields = (
    (_host, "node"), ("disk_read_bytes_per_s", "disk read"), ("disk_write_bytes_per_s", "write"),
    ("network_receive_bytes_per_s", "net receive"), ("network_transmit_bytes_per_s", "send"),
)  # fmt: skip


def _machine(
    summary: OverviewSummary, ranks: Sequence[RankSummary], width: int
) -> Iterator[RenderableType]:
    if ranks:
        what = Text(_READ_AND_WRITTEN, style="dim")
        yield section("Processes", record_table(ranks, _PROCESSES), what)
    if summary.gpus:
        yield section("GPUs", record_table(summary.gpus[:SHOWN_RANKS], _GPUS))
    if summary.nodes:
        nodes = summary.nodes[:SHOWN_RANKS]
        tables = [record_table(nodes, fields) for fields in (_NODE_LOAD, _NODE_TRAFFIC)]
        if width >= ONE_LINE_CELLS_WIDTH:
            grid = Table.grid(padding=(0, 4, 0, 0))
            grid.add_row(*tables)
            tables = [grid]
        yield section("Nodes", *tables)


_EVENT_TITLES = {
    "gc": "garbage collection", "save": "checkpoint save", "eval": "evaluation forward",
    "dataloader_iter": "dataloader start", "nograd_forward": "forward without gradients",
}  # fmt: skip
_BOUNDARIES = {
    "dataloader": "a step begins with its batch", "optimizer": "a step ends with its optimizer",
    "backward": "a step ends with its backward", **WORDS,
}  # fmt: skip


def rank_view(summary: OneRankSummary) -> RenderableType:
    """The terminal view of a rank."""
    counts = count_text(summary.step_count, "step")
    parts = [header_block(summary.run, counts=counts), Text(), _identity(summary)]
    axis = {"window": summary.window, "begin": summary.span}
    if summary.step_count:
        parts += [
            section("Mean step", SplitBar(summary.split_ns), Text(_steps_line(summary))),
            section("Positions in the step", _positions(summary)),
            section("Over time", series_block(summary.phase_series, **axis)),
            section("Slowest steps, without evaluation and checkpoints", _slowest(summary)),
        ]
    if summary.events:
        parts.append(section("Besides the phases", record_table(summary.events, _EVENTS)))
    if summary.settings is not None:
        rows = [(name, units.visible(text)) for name, text in setting_rows(summary.settings)]
        parts.append(section("Settings", LabelTable(rows, first="dim")))
    if summary.counter_series:
        parts.append(section("Counters", series_block(summary.counter_series, **axis)))
    parts.append(missing_block(summary.missing))
    of_run = [note for note in summary.notes if not note.startswith("rank ")]
    notes = [*(summary.about.get("notes") or ()), *of_run]
    return Group(*parts, notes_block(notes))


def _identity(summary: OneRankSummary) -> Text:
    about = summary.about
    text = Text(f"rank {summary.rank}", style="bold")
    words = [
        f"of {about['world_size']}" if about.get("world_size") else "",
        f"pid {about['pid']} on {about['host']}",
        f"Python {about['python']}" if about.get("python") else "",
        f"torch {about['torch']}" if about.get("torch") else "",
        str(about.get("device") or ""),
        f"attempt {summary.attempt}" if summary.attempt or summary.other_attempts else "",
    ]
    text.append("  " + " · ".join(fact for fact in words if fact), style="not bold dim")
    return text


def _steps_line(summary: OneRankSummary) -> str:
    parts = [f"mean step {units.duration_text(summary.mean_step_ns)}",
             f"median step {units.duration_text(summary.median_step_ns)}"]  # fmt: skip
    boundary = _BOUNDARIES.get(summary.boundary or "")
    if boundary:
        parts.append(f"{boundary} (confidence {units.ratio_text(summary.confidence)})")
    if summary.skipped_step_count:
        parts.append(f"{count_text(summary.skipped_step_count, 'skipped step')}")
    return " · ".join(parts)


def _positions(summary: OneRankSummary) -> RenderableType:
    device = any(stat.device_median_ns is not None for stat in summary.positions)
    columns = ["", "position", "median", "p95", "max", "share"]
    table = plain_table(*columns, *(["on the GPU"] if device else []), left=["", "position"])
    for stat in summary.positions:
        name = position_words(stat.phase)
        row: list[RenderableType] = [PhaseMark(PHASE_OF.get(stat.phase, "other")), name]
        row += [units.duration_text(ns) for ns in (stat.median_ns, stat.p95_ns, stat.max_ns)]
        row.append(units.ratio_text(stat.share_ratio))
        table.add_row(*row, *([units.duration_text(stat.device_median_ns)] if device else []))
    return table


def _slowest(summary: OneRankSummary) -> RenderableType:
    begin_ns = summary.span.start_ns if summary.span else 0
    fields: Fields = (
        ("step", "step"),
        (lambda slow: f"{(slow.start_ns - begin_ns) / units.NS_PER_S:.1f} s", "at"),
        ("step_ns", "took"),
        (lambda slow: f"{units.digits_text(slow.over_median_ratio)}x", "of median"),
        (_excess, "mostly"),
    )
    return record_table(summary.slowest, fields, left=4)


def _excess(slow: SlowStep) -> str:
    excess_ns = slow.longest_excess_ns or 0
    more = f"{slow.longest_excess} +{units.duration_text(excess_ns)}"
    return more if excess_ns > 0 else units.MISSING


_EVENTS: Fields = (
    (lambda event: _EVENT_TITLES.get(event.phase, event.phase), "what"), ("count", "count"),
    ("total_ns", "total"), ("max_ns", "longest"),
)  # fmt: skip

_LINES = 8
_MOST_GROUPS = 40
_TITLES = {**PHASE_TITLES, "other_threads": "other Python threads while they used a core"}


def lines_view(lines: pl.DataFrame, notes: tuple[str, ...]) -> RenderableType:
    """The screen of a frame of lines (`run_analysis.lines`)."""
    parts = list(islice(_sections(lines), _MOST_GROUPS))
    if lines.is_empty():
        parts.append(Text("no stacks were sampled", style="bold yellow"))
    return Group(*parts, notes_block(notes, "notes"))


def _sections(lines: pl.DataFrame) -> Iterator[RenderableType]:
    """By position where the ledger gives one, else by phase."""
    workers, placed = pl.col("worker").is_not_null(), pl.col("position").is_not_null()
    for (rank,), of_rank in lines.group_by("rank", maintain_order=True):
        parts = [(name, pl.col("position") == name) for name in POSITIONS]
        known = of_rank.select(placed.any()).item()
        shown = OTHER_THREADS if known else CODE_PHASES
        parts += [(name, ~placed & (pl.col("phase") == name)) for name in shown]
        for name, chosen in parts:
            found = of_rank.filter(chosen)
            if found.is_empty():
                continue
            threads = found.filter(workers)["worker"].n_unique()
            # Their samples are counted: none stands for a length of time.
            who = f", {count_text(threads, 'worker')}, by count of samples" if threads else ""
            title = f"rank {rank}: {_TITLES.get(name, position_words(name))}{who}"
            yield section(title, _table(_merge_workers(found)))


def _merge_workers(found: pl.DataFrame) -> pl.DataFrame:
    """The lines of one part, those of all workers together."""
    totals = found.group_by("worker", "phase").agg(pl.col("sample_count").first())
    sums = found.group_by("file", "line", "function").agg(
        pl.first("code"),
        pl.col("self_count", "inclusive_count").sum(),
        *(
            pl.when(pl.col(name).is_not_null().any()).then(pl.col(name).sum())
            for name in ("time_ns", "ns_per_step", "inclusive_ns_per_step")
            if name in found.columns
        ),
    )
    order = ["self_count", "inclusive_count", "file", "line"]
    merged = sums.with_columns(sample_count=pl.lit(totals["sample_count"].sum()))
    return merged.sort(order, descending=[True, True, False, False])


def _table(found: pl.DataFrame) -> RenderableType:
    of_step = found["ns_per_step"].is_not_null().any()
    time = "ns_per_step" if of_step else "time_ns"
    own, inclusive, whole = "self_count", "inclusive_count", found["sample_count"].max()
    if of_step and found["ns_per_step"].sum():  # without waits that no line explains
        own, inclusive, whole = time, f"inclusive_{time}", found[time].sum()
        found = found.sort(own, inclusive, descending=True)
    rows = [
        (
            units.ratio_text(row[own] / whole),
            units.ratio_text(row[inclusive] / whole),
            f"{row['self_count']} of {row['sample_count']}",
            units.duration_text(row[time]),
            one_line(
                place_text(row["file"], row["line"], row["function"])
                + (f": {row['code']}" if row["code"] else "")
            ),
        )
        for row in found.head(_LINES).iter_rows(named=True)
    ]
    names = ("itself", "with what it calls", "samples", "per step" if of_step else "time", "line")
    table = FittingTable(names, rows, left=["line"], first_to_go=("samples", names[3]))
    return Group(table, *more_lines(found.height - _LINES))
