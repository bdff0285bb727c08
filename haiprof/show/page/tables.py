"""Frames as tables of a page: cells of text, by the unit that their column's name ends in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl

from haiprof.show.tables.frame_table import Columns, cell


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """One table as the page shows it."""

    title: str
    head: tuple[str, ...]
    is_text: tuple[bool, ...]
    """Columns that are aligned to the left."""
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    """Rows that are left out."""
    note: str = ""
    """A note on it."""
    faint: frozenset[int] = frozenset()
    """Rows that are shown faintly, as they claim nothing."""


def page_table(
    title: str, found: pl.DataFrame, columns: Columns, *, limit: int, note: str = ""
) -> PageTable:
    """The first rows of a frame."""
    return PageTable(
        title=title,
        head=tuple(head for _, head in columns),
        is_text=tuple(found.schema[name] == pl.String for name, _ in columns),
        rows=tuple(
            tuple(cell(name, row[name]).plain for name, _ in columns)
            for row in found.head(limit).iter_rows(named=True)
        ),
        more=max(0, found.height - limit),
        note=note,
    )


def text_table(
    title: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[str] = (),
    more: int = 0,
    faint: Sequence[int] = (),
    note: str = "",
) -> PageTable:
    """A table of what is text already."""
    return PageTable(
        title=title,
        head=tuple(head),
        is_text=tuple(name in left for name in head),
        rows=tuple(map(tuple, rows)),
        more=more,
        faint=frozenset(faint),
        note=note,
    )
