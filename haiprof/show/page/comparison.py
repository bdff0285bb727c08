"""The comparison with another run as the page shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from haiprof.base.errors import MissingDataError
from haiprof.diagnosis.compare.baseline import baseline_named
from haiprof.diagnosis.compare.compared_run import compared_run_of
from haiprof.diagnosis.compare.comparison import Comparison, caveats, compare_runs
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures.run_figures import comparison_picture
from haiprof.show.page.tables import PageTable
from haiprof.show.tables import compare as rows
from haiprof.show.text import printable
from haiprof.show.views.compare import compare_data

_KERNEL_LIMIT = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSection:
    """A section of the page; all but `missing` is empty without a baseline."""

    state: str = "undecided"
    headline: str = ""
    lines: tuple[str, ...] = ()
    """What was compared."""
    tables: tuple[PageTable, ...] = ()
    notes: tuple[str, ...] = ()
    """Caveats of the claim, and what could not be compared."""
    missing: str = ""
    """Why there is no comparison."""
    figure: go.Figure | None = None
    data: Mapping[str, Any] | None = None
    """As `haiprof compare --json`."""
    other: RunFrames | None = None
    """The run that it is compared with."""


def comparison_section(
    analyzer: RunFrames, baseline: str, *, read_traces: bool
) -> ComparisonSection:
    """Compares the page's run with another."""
    after = compared_run_of(analyzer)
    try:
        chosen = baseline_named(baseline, after)
    except MissingDataError as error:
        return ComparisonSection(missing=printable(str(error)))
    found = compare_runs(chosen.side, after, read_traces=read_traces)
    return _part(found, chosen.why)


def _part(found: Comparison, why: str) -> ComparisonSection:
    kernels = rows.kernel_table(found, limit=_KERNEL_LIMIT)
    tables = (rows.part_table(found), rows.line_table(found), rows.rank_table(found),
              rows.counter_table(found), *([kernels] if kernels else []),
              rows.around_table(found))  # fmt: skip
    evaluation = rows.evaluation_text(found)
    around = () if found.differs else ("nothing that was recorded around the runs differs",)
    if found.no_lines:
        around = (*around, f"lines of code: {found.no_lines}")
    no_kernels = (f"kernels: {found.no_kernels}",) if kernels is None else ()
    same = ("kernels: nothing in the traced steps differs beyond chance",)
    no_kernels = same if kernels is not None and not kernels.rows else no_kernels
    lines = [rows.step_facts(found), f"baseline {found.before.path}", *([why] if why else []),
             *([evaluation] if evaluation else [])]  # fmt: skip
    return ComparisonSection(
        state=found.state,
        headline=rows.headline(found),
        lines=tuple(map(printable, lines)),
        tables=tables,
        notes=tuple(map(printable, (*caveats(found), *around, *no_kernels, *found.unknown))),
        figure=comparison_picture(found, title=""),
        data=compare_data(found, chosen=why),
        other=found.before.analyzer,
    )
