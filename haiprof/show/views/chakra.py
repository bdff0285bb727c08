"""What `haiprof chakra` shows: a row per rank with its nodes by type, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.trace_analysis.chakra import ChakraGraph


def row_of(graph: ChakraGraph, path: Path) -> dict[str, Any]:
    """The row of one rank."""
    return {
        "rank": graph.rank,
        "path": str(path),
        "nodes": len(graph.nodes),
        "data_dependencies": len(graph.edges),
        "types": graph.type_counts,
    }


def chakra_view(rows: Sequence[dict[str, Any]], notes: Sequence[str]) -> RenderableType:
    """A row per rank, and notes below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rank", "nodes", "dependencies"):
        table.add_column(name, justify="right")
    table.add_column("of them")
    table.add_column("file", overflow="fold")
    for row in rows:
        kinds = ", ".join(f"{count} {kind}" for kind, count in row["types"].items())
        table.add_row(
            str(row["rank"]), str(row["nodes"]), str(row["data_dependencies"]), kinds, row["path"]
        )
    return Group(table, *(Text(note, style="dim") for note in dict.fromkeys(notes)))
