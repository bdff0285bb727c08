"""Why a source has no numbers: the agents' reasons, or the option that disabled it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from haiprof.base.errors import RunFormatError
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest
from haiprof.run_format.reader import read_lines
from haiprof.show.figures.panel_table import PANEL_ROWS, PanelRow, row_metrics

_ALL = "all"
Line = Mapping[str, Any]


def missing_sources(
    run: RunPaths, manifest: Manifest | None, counters: pl.DataFrame
) -> dict[str, str]:
    """Rows of panels without any sample, each with the reason.

    Reason by the row's title: `node`, `processes`, `GPU`, ...
    """
    present = set(counters.select("source", "metric").unique().rows())
    lines = _agent_lines(run)
    chosen = manifest.options.get("recorder") if manifest else None
    return {
        row.title: _reason(row, chosen, lines)
        for row in PANEL_ROWS
        if not present & row_metrics(row)
    }


def _reason(row: PanelRow, chosen: object, lines: Sequence[Line]) -> str:
    if isinstance(chosen, list) and row.recorder not in chosen:
        return f"the recorder `{row.recorder}` was left out by --recorder"
    wanted = {(source, _stem(metric)) for source, metric in row_metrics(row)}
    wanted |= {(source, _ALL) for source in row.sources}
    for line in lines:
        metric = _stem(str(line.get("metric") or _ALL))
        if (line.get("source"), metric) in wanted:
            return str(line.get("reason"))
    return "no sample was taken"


def _stem(metric: str) -> str:
    """The common part of the names of a column and the metric that is derived from it."""
    for end in ("_per_s", "_ns", "_ratio"):
        metric = metric.removesuffix(end)
    return metric


def _agent_lines(run: RunPaths) -> list[Line]:
    """The agents' event lines about counters; an unreadable file counts for the node."""
    found: list[Line] = []
    for _, node in run.node_folders():
        try:
            lines, _ = read_lines(node.events)
        except RunFormatError as error:
            lines = [{"type": "sampler_error", "source": "host", "reason": str(error)}]
        found += [x for x in lines if x.get("type") in ("counter_missing", "sampler_error")]
    return found
