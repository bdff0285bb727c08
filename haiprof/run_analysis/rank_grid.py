"""All ranks on one time axis: how long steps and phases were in equal stretches of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from haiprof.base.intervals import Floats, Ints
from haiprof.run_analysis.run_files import median
from haiprof.run_analysis.step_frame import STEP_PHASES

COLUMN_LIMIT = 480
_CELL_LIMIT = 200_000
_LEAST_COLUMNS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGrid:
    """Mean times of the steps that touch each stretch; NaN where a rank has none."""

    ranks: tuple[int, ...]
    """The rows, in order."""
    start_ns: int
    """Unix time at which the first stretch begins."""
    end_ns: int
    """Unix time at which the last one ends."""
    phase_ns: Mapping[str, Floats]
    """[rank, stretch] on the host clock, by phase; together they are the step."""
    typical_ns: Mapping[str, float | None]
    """Median over all steps of all ranks: of `step` and of each phase; None where never seen."""

    @property
    def column_count(self) -> int:
        """How many stretches there are."""
        return int(self.phase_ns[STEP_PHASES[0]].shape[1])

    @property
    def step_ns(self) -> Floats:
        """[rank, stretch]: the whole step."""
        parts = np.stack([self.phase_ns[phase] for phase in STEP_PHASES])
        return np.where(np.isnan(parts).all(axis=0), np.nan, np.nansum(parts, axis=0))

    def of(self, name: str) -> Floats:
        """[rank, stretch]: of `step`, or of a phase."""
        return self.step_ns if name == "step" else self.phase_ns[name]

    def excess_ratio(self, name: str) -> Floats:
        """[rank, stretch]: what it takes above its median, as a share of the median step.

        Shares of phases add up to that of the step, so that one scale of colours serves all.
        """
        return (self.of(name) - (self.typical_ns[name] or 0.0)) / (self.typical_ns["step"] or 1.0)


def rank_grid(steps: pl.DataFrame, *, column_count: int | None = None) -> RankGrid | None:
    """Steps on a common time axis; None where there is no step."""
    if steps.is_empty():
        return None
    start = steps["start_ns"].to_numpy()
    end = start + steps["step_ns"].to_numpy()
    ranks, row = np.unique(steps["rank"].to_numpy(), return_inverse=True)
    count = column_count or _columns_for(len(ranks), int(np.bincount(row).max()))
    first_ns, last_ns = int(start.min()), max(int(end.max()), int(start.min()) + 1)
    scale = count / (last_ns - first_ns)
    first = np.clip(((start - first_ns) * scale).astype(np.int64), 0, count - 1)
    last = np.clip(((end - 1 - first_ns) * scale).astype(np.int64), first, count - 1)
    cells = _Cells(row * (count + 1) + first, row * (count + 1) + last + 1, len(ranks), count)
    return RankGrid(
        ranks=tuple(int(rank) for rank in ranks),
        start_ns=first_ns,
        end_ns=last_ns,
        phase_ns={phase: cells.mean(steps[f"{phase}_host_ns"]) for phase in STEP_PHASES},
        typical_ns={
            name: median(steps[column])
            for name, column in (
                ("step", "step_ns"),
                *((phase, f"{phase}_host_ns") for phase in STEP_PHASES),
            )
        },
    )


def _columns_for(rank_count: int, step_count: int) -> int:
    limit = min(COLUMN_LIMIT, max(_LEAST_COLUMNS, _CELL_LIMIT // rank_count))
    return max(1, min(limit, step_count))


@dataclass(frozen=True, slots=True)
class _Cells:
    """Where each step begins and ends, as places in a flat table with one column to spare."""

    first: Ints
    after: Ints
    row_count: int
    column_count: int

    def mean(self, values: pl.Series) -> Floats:
        """Mean of the known values of the steps that touch each cell."""
        numbers = values.cast(pl.Float64).fill_null(np.nan).to_numpy()
        known = np.isfinite(numbers)
        sums = self._running(np.where(known, numbers, 0.0))
        counts = np.round(self._running(known.astype(np.float64)))
        means = np.full(sums.shape, np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        return means

    def _running(self, weights: Floats) -> Floats:
        size = self.row_count * (self.column_count + 1)
        rises = np.bincount(self.first, weights=weights, minlength=size)
        falls = np.bincount(self.after, weights=weights, minlength=size)
        table = (rises - falls).reshape(self.row_count, self.column_count + 1)
        running: Floats = np.cumsum(table, axis=1)[:, :-1]
        return running
