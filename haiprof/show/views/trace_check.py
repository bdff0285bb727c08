"""What `haiprof trace-check` shows: each thing that is odd about traces, faults first."""

from __future__ import annotations

from collections.abc import Iterator

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.show.text import count_text, printable
from haiprof.show.views.blocks import section

_LIMIT = 8


def check_view(checks: pl.DataFrame, files: pl.DataFrame) -> RenderableType:
    """The whole screen."""
    faults = checks.filter("is_fault")
    events = count_text(int(files["event_count"].sum()), "event")
    head = f"{count_text(files.height, 'trace')}, {events}"
    said = (
        count_text(faults["check"].n_unique(), "kind") + " of fault" if len(faults) else "no fault"
    )
    by_design = checks.filter(~pl.col("is_fault"))
    return Group(
        Text(f"{head}: {said} of the recording", style="bold"),
        *_kinds(faults, "Faults"),
        *_kinds(by_design, "Odd, but accounted for"),
    )


def _kinds(checks: pl.DataFrame, title: str) -> Iterator[RenderableType]:
    if checks.is_empty():
        return
    parts: list[RenderableType] = []
    for key, rows in checks.group_by("check", maintain_order=True):
        parts.append(Text(str(key[0]).replace("_", " "), style="bold"))
        parts += [_line(row) for row in rows.head(_LIMIT).iter_rows(named=True)]
        if len(rows) > _LIMIT:
            parts.append(Text(f"  and {len(rows) - _LIMIT} more: --json", style="dim"))
        answers = rows["answers"].str.split(", ").explode().unique(maintain_order=True).to_list()
        parts.append(Text(f"  concerns {', '.join(map(str, answers))}", style="dim"))
    yield section(title, *parts)


def _line(row: dict[str, object]) -> Text:
    of = "" if row["rank"] is None else f"rank {row['rank']}: "
    return Text(
        f"  {of}{printable(str(row['text']))}; {printable(str(row['effect']))}", overflow="fold"
    )
