"""Why a source has no numbers: the agents' own words, or the option that left it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from haiprof.errors import RunFormatError
from haiprof.plots.panel_table import PANEL_ROWS, PanelRow, row_metrics
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest
from haiprof.rundir.reader import read_lines

_ALL = "all"
Line = Mapping[str, Any]


def missing_sources(
    run: RunPaths, manifest: Manifest | None, counters: pl.DataFrame
) -> dict[str, str]:
    """Rows of panels without any sample, each with the reason.

    Args:
        run: The run's paths; the agents' `counter_missing` and `sampler_error` lines are read.
        manifest: For the recorders that were switched on.
        counters: `Analyzer.counters()`.

    Returns:
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
    """What a column and the metric that is derived from it have in common."""
    for end in ("_per_s", "_ns", "_ratio"):
        metric = metric.removesuffix(end)
    return metric


def _agent_lines(run: RunPaths) -> list[Line]:
    """What the agents said about counters; what cannot be read is said about the node."""
    found: list[Line] = []
    for _, node in run.node_folders():
        try:
            lines, _ = read_lines(node.events)
        except RunFormatError as error:
            lines = [{"type": "sampler_error", "source": "host", "reason": str(error)}]
        found += [x for x in lines if x.get("type") in ("counter_missing", "sampler_error")]
    return found
