"""The overview of a job in the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.base.units import MISSING, bytes_text, duration_text, rate_text, ratio_text
from haiprof.show.figures.style import PHASES
from haiprof.show.series import fold_series
from haiprof.show.split_bar import SplitBar
from haiprof.show.split_legend import SplitLegend, phase_heading
from haiprof.show.step_work import work_text
from haiprof.show.summary import (
    GpuSummary,
    NodeSummary,
    OverviewSummary,
    RankSummary,
    Split,
    rank_name,
)
from haiprof.show.text import (
    count_text,
    number_text,
    printable,
    share_text,
    steps_text,
    value_text,
)
from haiprof.show.views.blocks import (
    header_block,
    missing_block,
    notes_block,
    plain_table,
    section,
    series_block,
)

ONE_LINE_CELLS_WIDTH = 104
BAR_WIDTH = 132
COMPACT_BELOW_WIDTH = 80
HOST_WIDTH = 14
SHOWN_RANKS = 24


def overview_view(summary: OverviewSummary, *, width: int) -> RenderableType:
    """The terminal view of a job."""
    ranks = shown_ranks(summary.ranks)
    parts = [_header(summary)]
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
    if summary.traces:
        parts.append(section("Traces", *(Text(line, overflow="fold") for line in summary.traces)))
    if summary.missing:
        parts.append(missing_block(summary.missing))
    notes = list(summary.notes)
    if len(ranks) < len(summary.ranks):
        notes.append(f"shown are the {len(ranks)} slowest of {len(summary.ranks)}; all: --json")
    if notes:
        parts.append(notes_block(notes))
    return Group(*parts)


def shown_ranks(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """All ranks, or the slowest of many."""
    if len(ranks) <= SHOWN_RANKS:
        return list(ranks)
    slowest = sorted(ranks, key=lambda rank: rank.median_step_ns or 0.0, reverse=True)
    return slowest[:SHOWN_RANKS]


def _header(summary: OverviewSummary) -> RenderableType:
    ranks = {rank.rank for rank in summary.ranks}
    last = {rank.rank: rank.step_count for rank in sorted(summary.ranks, key=lambda r: r.attempt)}
    return header_block(summary.run, counts=steps_text(sum(last.values()), len(ranks)))


def _steps(ranks: Sequence[RankSummary], width: int) -> Iterator[RenderableType]:
    bars = width >= BAR_WIDTH
    names = ["rank", "steps", "median"]
    table = plain_table(*names, left=["rank"], gap=2 if width >= COMPACT_BELOW_WIDTH else 1)
    for phase in PHASES:
        table.add_column(phase_heading(phase, width), justify="right", no_wrap=True)
    if bars:
        table.add_column("middle step", ratio=1)
    longest = max((rank.median_step_ns or 0.0 for rank in ranks), default=0.0)
    for rank in ranks:
        for clock, split in _splits(rank):
            cells = [rank_name(rank) + clock, str(rank.step_count)]
            cells += [duration_text(rank.median_step_ns) if not clock else ""]
            row: list[RenderableType] = [*cells, *_split_cells(split, width)]
            scale = (rank.median_step_ns or 0.0) / longest if longest else 1.0
            table.add_row(*row, *([SplitBar(split, scale=scale)] if bars else []))
    table.expand = bars
    yield table
    if bars:
        yield SplitLegend()


def _splits(rank: RankSummary) -> Iterator[tuple[str, Split]]:
    """The host's split, and the device's if there is one, each on a line."""
    yield "", rank.split_ns
    if rank.device_split_ns is not None:
        yield " gpu", rank.device_split_ns


def _split_cells(split: Split, width: int) -> Iterator[str]:
    total = sum(ns or 0.0 for ns in split.values())
    between = " " if width >= ONE_LINE_CELLS_WIDTH else "\n"
    for phase in PHASES:
        ns = split[phase]
        share = share_text(ns, total)
        yield MISSING if ns is None else f"{duration_text(ns)}{between}{share:>5}"


def _machine(
    summary: OverviewSummary, ranks: Sequence[RankSummary], width: int
) -> Iterator[RenderableType]:
    if ranks:
        yield section("Processes", _processes(ranks))
    if summary.gpus:
        yield section("GPUs", _gpus(summary.gpus))
    if summary.nodes:
        tables = [_node_load(summary.nodes), _node_traffic(summary.nodes)]
        side_by_side = width >= ONE_LINE_CELLS_WIDTH
        yield section("Nodes", *([_side_by_side(*tables)] if side_by_side else tables))


def _processes(ranks: Sequence[RankSummary]) -> RenderableType:
    table = plain_table("rank", "pid", "CPU cores", "memory", "read", "write", left=["rank"])
    for rank in ranks:
        table.add_row(
            rank_name(rank),
            MISSING if rank.pid is None else str(rank.pid),
            number_text(rank.cpu_cores),
            bytes_text(rank.memory_rss_bytes),
            rate_text(rank.read_bytes_per_s),
            rate_text(rank.write_bytes_per_s),
        )
    return table


def _gpus(gpus: Sequence[GpuSummary]) -> RenderableType:
    table = plain_table("GPU", "rank", "utilization", "memory", "of", "power", left=["GPU"])
    for gpu in gpus[:SHOWN_RANKS]:
        table.add_row(
            MISSING if gpu.gpu is None else str(gpu.gpu),
            MISSING if gpu.rank is None else str(gpu.rank),
            ratio_text(gpu.utilization_ratio),
            bytes_text(gpu.memory_used_bytes),
            bytes_text(gpu.memory_total_bytes),
            value_text(gpu.power_watts, "watts"),
        )
    return table


def _node_load(nodes: Sequence[NodeSummary]) -> RenderableType:
    table = plain_table("node", "CPU", "of", "memory", "of", left=["node"])
    for node in nodes[:SHOWN_RANKS]:
        table.add_row(
            _host(node),
            ratio_text(node.cpu_utilization_ratio),
            MISSING if node.cpu_count is None else count_text(int(node.cpu_count), "core"),
            bytes_text(node.memory_used_bytes),
            bytes_text(node.memory_total_bytes),
        )
    return table


def _node_traffic(nodes: Sequence[NodeSummary]) -> RenderableType:
    table = plain_table("node", "disk read", "write", "net receive", "send", left=["node"])
    for node in nodes[:SHOWN_RANKS]:
        table.add_row(
            _host(node),
            rate_text(node.disk_read_bytes_per_s),
            rate_text(node.disk_write_bytes_per_s),
            rate_text(node.network_receive_bytes_per_s),
            rate_text(node.network_transmit_bytes_per_s),
        )
    return table


def _host(node: NodeSummary) -> Text:
    name = Text(str(node.host))
    name.truncate(HOST_WIDTH, overflow="ellipsis")
    return name


def _side_by_side(*tables: RenderableType) -> RenderableType:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(*tables)
    return grid
