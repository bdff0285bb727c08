"""Steps of every rank for the page: the map of all of them, and the phases of each one's steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from haiprof.base.arrays import Floats
from haiprof.base.units import NS_PER_MS, NS_PER_S
from haiprof.run_analysis.rank_grid import RankGrid
from haiprof.show.figures.style import PHASES
from haiprof.show.figures.thinning import gap_starts, thin_points, with_gaps
from haiprof.show.page.packed_numbers import half_floats, single_floats
from haiprof.show.series import TimeRange

_POINT_LIMIT = 128_000
_LEAST_POINTS, _MOST_POINTS = 100, 4000


def map_data(grid: RankGrid, start_ns: int) -> dict[str, Any]:
    """The grid in ms: `phases` by name, each [rank, stretch]; a step is their sum."""
    return {
        "ranks": list(grid.ranks),
        "columns": grid.column_count,
        "start_s": (grid.start_ns - start_ns) / NS_PER_S,
        "end_s": (grid.end_ns - start_ns) / NS_PER_S,
        "typical_ms": {
            name: None if ns is None else ns / NS_PER_MS for name, ns in grid.typical_ns.items()
        },
        "phases": {phase: half_floats(grid.phase_ns[phase] / NS_PER_MS) for phase in PHASES},
    }


def traced_times(steps: pl.DataFrame) -> list[TimeRange]:
    """When steps were traced, on any rank: stretches that do not touch."""
    traced = steps.filter(pl.col("traced")).sort("start_ns")
    found: list[TimeRange] = []
    for start, length in traced.select("start_ns", "step_ns").iter_rows():
        if found and start <= found[-1].end_ns + length:
            end = max(found[-1].end_ns, start + length)
            found[-1] = TimeRange(start_ns=found[-1].start_ns, end_ns=end)
        else:
            found.append(TimeRange(start_ns=start, end_ns=start + length))
    return found


def step_data(steps: pl.DataFrame, start_ns: int) -> dict[str, Any]:
    """Real steps of each rank, the slowest and fastest of each stretch where they are many.

    `ranks`; `counts`, points of each; and for all of them together `time` (s), `step`, and
    `phases` (ms). A point without values is a pause.
    """
    ranks = steps["rank"].unique().sort().to_list()
    limit = max(_LEAST_POINTS, min(_MOST_POINTS, _POINT_LIMIT // max(1, len(ranks))))
    columns = ["start_ns", "step_ns", "step", *(f"{phase}_host_ns" for phase in PHASES)]
    ordered = steps.select("rank", *columns).sort("rank", "start_ns")
    tables = [
        _thin(own.drop("rank").cast(pl.Float64).fill_null(np.nan).to_numpy(), start_ns, limit)
        for own in ordered.partition_by("rank", maintain_order=True)
    ]
    whole = np.concatenate(tables, axis=1) if tables else np.empty((2 + len(PHASES), 0))
    return {
        "ranks": ranks,
        "counts": [table.shape[1] for table in tables],
        "time": single_floats(whole[0]),
        "step": single_floats(whole[1]),
        "phases": {phase: half_floats(whole[2 + place]) for place, phase in enumerate(PHASES)},
    }


def _thin(table: Floats, start_ns: int, limit: int) -> Floats:
    """[time, step, phases ...] by point."""
    seconds, step_ns = (table[:, 0] - start_ns) / NS_PER_S, table[:, 1]
    ends = seconds + step_ns / NS_PER_S
    kept = thin_points(step_ns, limit=limit)
    values = [table[:, 2], *(table[:, 3 + place] / NS_PER_MS for place in range(len(PHASES)))]
    return np.array(with_gaps(kept, gap_starts(seconds, ends), [seconds, *values], ends))
