"""What `chakra`, `link`, `merge`, `trace check` and `flight-recorder` show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.run_analysis.collectives import FlightVerdict
from haiprof.run_analysis.nccl_witness import NcclReport, ranks_behind
from haiprof.show.frame_table import frame_table, headings
from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import notes_block, plain_table, section
from haiprof.trace_analysis.chakra import ChakraGraph
from haiprof.trace_analysis.collectives import RULE
from haiprof.trace_analysis.execution_link import LinkShare
from haiprof.trace_analysis.merge import MergeReport


def row_of(graph: ChakraGraph, path: Path) -> dict[str, Any]:
    """The row of one rank."""
    return {
        "rank": graph.rank, "path": str(path), "nodes": len(graph.nodes),
        "data_dependencies": len(graph.edges), "types": graph.type_counts,
    }  # fmt: skip


def chakra_view(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> RenderableType:
    """A row per rank, and notes below."""
    texts = ("of them", "file")
    table = plain_table("rank", "nodes", "dependencies", *texts, left=texts)
    for column in table.columns[3:]:
        column.no_wrap, column.overflow = False, "fold"
    for row in rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["types"].items())
        table.add_row(
            str(row["rank"]), str(row["nodes"]), str(row["data_dependencies"]), kinds, row["path"]
        )
    return Group(table, *(Text(note, style="dim") for note in dict.fromkeys(notes)))


_NAMES_SHOWN = 3


def link_view(shares: Sequence[LinkShare], alone: Sequence[str]) -> RenderableType:
    """A row per rank, and below it what was not linked."""
    counts = ("nodes", "operators", "GPU events")
    table = plain_table("rank", "linked by", *counts, left=("linked by",))
    for share in shares:
        table.add_row(
            str(share.rank), share.linked_by or "-",
            _part(share.linked_count, share.linkable_count),
            _part(share.operator_linked_count, share.operator_count),
            _part(share.kernel_linked_count, share.kernel_count),
        )  # fmt: skip
    lines: dict[str, list[int]] = {}
    for share in shares:
        said = [f"{count} {reason}" for reason, count in share.not_linked.items()]
        names = {**share.nodes_not_linked, **share.operators_not_linked}
        shown = ", ".join(list(names)[:_NAMES_SHOWN])
        said += [f"not linked: {shown}"] if shown else []
        for line in [*said, *share.notes]:
            lines.setdefault(line, []).append(share.rank)
    own = [f"rank {', '.join(map(str, ranks))}: {line}" for line, ranks in lines.items()]
    return Group(table, *(Text(line, style="dim") for line in (*own, *alone)))


def _part(count: int, whole: int) -> str:
    return f"{count} of {whole} ({count / whole:.1%})" if whole else "-"


_COLUMNS = headings("merged_ranks")
_SCHEMA = {name: pl.String if name == "method" else pl.Int64 for name, _ in _COLUMNS}
_LIMIT = 40


def merge_view(report: MergeReport) -> RenderableType:
    """The whole view."""
    merged = report.merged
    rows = [{name: row[name] for name in _SCHEMA} for row in report.as_json()["ranks"]]
    summary = f"{count_text(len(rows), 'rank')}, {count_text(merged.event_count, 'event')}"
    if merged.track_event_count:
        summary += f", {merged.track_event_count} of them haiprof's phases and counters"
    return Group(
        Text(str(report.path), style="bold"),
        Text(summary, style="dim"),
        section(
            "Ranks and their clocks",
            *frame_table(pl.DataFrame(rows, schema=_SCHEMA), _COLUMNS, limit=_LIMIT),
            Text(RULE, style="dim"),
        ),
        notes_block(report.notes),
    )


_TRACE_CHECK_LIMIT = 8


def check_view(checks: pl.DataFrame, files: pl.DataFrame) -> RenderableType:
    """The whole screen."""
    faults = checks.filter("is_fault")
    events = count_text(int(files["event_count"].sum()), "event")
    head = f"{count_text(files.height, 'trace')}, {events}"
    kinds = faults["check"].n_unique()
    said = count_text(kinds, "kind") + " of recording errors" if kinds else "no recording errors"
    by_design = checks.filter(~pl.col("is_fault"))
    return Group(
        Text(f"{head}: {said}", style="bold"),
        *_kinds(faults, "Recording errors"),
        *_kinds(by_design, "Anomalies that were corrected"),
    )


def _kinds(checks: pl.DataFrame, title: str) -> Iterator[RenderableType]:
    if checks.is_empty():
        return
    parts: list[RenderableType] = []
    for key, rows in checks.group_by("check", maintain_order=True):
        parts.append(Text(str(key[0]).replace("_", " "), style="bold"))
        for row in rows.head(_TRACE_CHECK_LIMIT).iter_rows(named=True):
            of = "" if row["rank"] is None else f"rank {row['rank']}: "
            said = f"  {of}{printable(str(row['text']))}; {printable(str(row['effect']))}"
            parts.append(Text(said, overflow="fold"))
        if len(rows) > _TRACE_CHECK_LIMIT:
            parts.append(Text(f"  and {len(rows) - _TRACE_CHECK_LIMIT} more: --json", style="dim"))
        answers = rows["answers"].str.split(", ").explode().unique(maintain_order=True).to_list()
        parts.append(Text(f"  concerns {', '.join(map(str, answers))}", style="dim"))
    yield section(title, *parts)


_AGREE = "all ranks are at the same collective of each group, and none is known to wait"


def flight_view(verdict: FlightVerdict) -> RenderableType:
    """The whole view."""
    last = verdict.last.rename({"line": "name"})
    known = [(name, head) for name, head in headings("last_collectives") if last[name].count()]
    return Group(
        *(Text(printable(text), style="bold") for text in verdict.findings or (_AGREE,)),
        section("The last collective of each rank", *frame_table(last, known, limit=40)),
        notes_block(verdict.notes),
    )


_NCCL_COLUMNS = headings("nccl_collectives")
_WAIT_COLUMNS = headings("nccl_waits")
_NCCL_LIMIT = 24


def nccl_block(report: NcclReport) -> Iterator[RenderableType]:
    """Sentences, then what each rank did, and what its network proxy waited for."""
    yield from (Text(printable(line), overflow="fold") for line in report.lines())
    for rows, columns in ((report.collectives, _NCCL_COLUMNS), (report.waits, _WAIT_COLUMNS)):
        known = [(name, head) for name, head in columns if rows[name].count()]
        if known:
            yield from (Text(), *frame_table(rows, known, limit=_NCCL_LIMIT))


def nccl_view(report: NcclReport) -> RenderableType:
    """The whole view."""
    named = [f"rank {each.rank}: {each.why}" for each in ranks_behind(report)[:_NCCL_LIMIT]]
    return Group(
        *(Text(printable(text), style="bold") for text in named),
        section("What NCCL wrote", *nccl_block(report)),
        notes_block(report.notes),
    )
