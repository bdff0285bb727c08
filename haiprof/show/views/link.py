"""What `haiprof link` shows: how much of each rank was linked, how, and why not the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from haiprof.trace_analysis.execution_link import LinkShare

_NAMES_SHOWN = 3


def link_view(shares: Sequence[LinkShare], alone: Sequence[str]) -> RenderableType:
    """A row per rank, and below it what was not linked."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("rank", justify="right")
    table.add_column("linked by")
    for name in ("nodes", "operators", "GPU events"):
        table.add_column(name, justify="right")
    for share in shares:
        table.add_row(
            str(share.rank),
            share.linked_by or "-",
            _part(share.linked_count, share.linkable_count),
            _part(share.operator_linked_count, share.operator_count),
            _part(share.kernel_linked_count, share.kernel_count),
        )
    return Group(table, *_remarks(shares, alone))


def link_data(
    shares: Sequence[LinkShare], alone: Sequence[str], written: Sequence[Path]
) -> dict[str, Any]:
    """The same as JSON."""
    return {
        "ranks": [dataclasses.asdict(share) for share in shares],
        "without_partner": list(alone),
        "written": [str(path) for path in written],
    }


def _part(count: int, whole: int) -> str:
    return f"{count} of {whole} ({count / whole:.1%})" if whole else "-"


def _remarks(shares: Sequence[LinkShare], alone: Sequence[str]) -> list[Text]:
    lines: dict[str, list[int]] = {}
    for share in shares:
        said = [f"{count} {reason}" for reason, count in share.not_linked.items()]
        names = {**share.nodes_not_linked, **share.operators_not_linked}
        shown = ", ".join(list(names)[:_NAMES_SHOWN])
        said += [f"not linked: {shown}"] if shown else []
        for line in [*said, *share.notes]:
            lines.setdefault(line, []).append(share.rank)
    own = [f"rank {', '.join(map(str, ranks))}: {line}" for line, ranks in lines.items()]
    return [Text(line, style="dim") for line in (*own, *alone)]
