"""What `haiprof lines` shows: by rank and phase, the lines of user code that take the time."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.units import duration_text, ratio_text
from haiprof.run_analysis.code_samples import CODE_PHASES
from haiprof.show.text import count_text
from haiprof.show.views.blocks import FittingTable, bullets, one_line, section

_LINES = 8
_MOST_GROUPS = 40
_TITLES = {
    "other": "outside the model",
    "worker": "DataLoader workers, loading",
    "worker_waiting": "DataLoader workers, waiting",
    "between_steps": "between steps",
    "other_threads": "other Python threads while they used a core",
}


def lines_view(lines: pl.DataFrame, notes: tuple[str, ...]) -> RenderableType:
    """The screen of a frame of lines (`run_analysis.lines`)."""
    if lines.is_empty():
        return Group(Text("no stacks were sampled", style="bold yellow"), *_notes(notes))
    parts = list(_sections(lines))
    return Group(*parts[:_MOST_GROUPS], *_notes(notes))


def _sections(lines: pl.DataFrame) -> Iterator[RenderableType]:
    workers = pl.col("worker").is_not_null()
    for (rank,), of_rank in lines.group_by("rank", maintain_order=True):
        for phase in CODE_PHASES:
            found = of_rank.filter(pl.col("phase") == phase)
            if found.is_empty():
                continue
            threads = found.filter(workers)["worker"].n_unique()
            who = f", {count_text(threads, 'worker')}" if threads else ""
            title = f"rank {rank}: {_TITLES.get(phase, phase)}{who}"
            yield section(title, _table(_merge_workers(found)))


def _merge_workers(found: pl.DataFrame) -> pl.DataFrame:
    """The lines of one phase, those of all workers together."""
    total = found.group_by("worker").agg(pl.col("sample_count").first())["sample_count"].sum()
    sums = found.group_by("file", "line", "function").agg(
        pl.col("self_count", "inclusive_count", "time_ns").sum()
    )
    order = ["self_count", "inclusive_count", "file", "line"]
    merged = sums.with_columns(sample_count=pl.lit(total))
    return merged.sort(order, descending=[True, True, False, False])


def _table(found: pl.DataFrame) -> RenderableType:
    rows = [
        (
            ratio_text(row["self_count"] / row["sample_count"]),
            ratio_text(row["inclusive_count"] / row["sample_count"]),
            f"{row['self_count']} of {row['sample_count']}",
            duration_text(row["time_ns"]) if row["time_ns"] else "",
            one_line(f"{row['file'].rpartition('/')[2]}:{row['line']} {row['function']}"),
        )
        for row in found.head(_LINES).iter_rows(named=True)
    ]
    names = ("itself", "with what it calls", "samples", "time", "line")
    table = FittingTable(names, rows, left=["line"], first_to_go=("samples", "time"))
    more = found.height - _LINES
    text = Text(f"and {more} more, in --json", style="dim") if more > 0 else Text()
    return Group(table, *([text] if more > 0 else []))


def _notes(notes: tuple[str, ...]) -> list[RenderableType]:
    return [section("notes", *bullets(notes))] if notes else []
