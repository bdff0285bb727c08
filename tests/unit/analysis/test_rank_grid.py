"""The map of ranks over time, against a slow and plain oracle."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest

from haiprof.run_analysis.ranks import COLUMN_LIMIT, rank_grid
from haiprof.run_analysis.step_frame import STEP_PHASES, STEP_SCHEMA


def frame(
    ranks: int, steps: int, *, seed: int = 3, phases: tuple[str, ...] = STEP_PHASES
) -> pl.DataFrame:
    random = np.random.default_rng(seed)
    rows = []
    for rank in range(ranks):
        start = 1_000_000 + 37 * rank
        for step in range(steps):
            times = {p: int(random.integers(10, 5000)) for p in phases}
            rows.append({
                "rank": rank, "attempt": 0, "step": step, "start_ns": start,
                "step_ns": sum(times.values()),
                **{f"{p}_host_ns": ns for p, ns in times.items()},
            })  # fmt: skip
            start += sum(times.values()) + int(random.integers(0, 9000))
    return pl.DataFrame(rows, schema=STEP_SCHEMA)


def oracle(steps: pl.DataFrame, rank: int, column: int, count: int, name: str) -> float:
    """Mean of the steps that touch a stretch, by looking at each."""
    begin = min(steps["start_ns"].to_list())
    width = (max((steps["start_ns"] + steps["step_ns"]).to_list()) - begin) / count
    found = [
        row[f"{name}_host_ns"]
        for row in steps.filter(pl.col("rank") == rank).iter_rows(named=True)
        if (row["start_ns"] - begin) // width <= column
        and column <= min(count - 1, (row["start_ns"] + row["step_ns"] - 1 - begin) // width)
    ]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known else math.nan


@pytest.mark.parametrize("columns", [1, 7, 40])
def test_cells_are_means_of_the_steps_that_touch_them(columns: int) -> None:
    steps = frame(3, 25)
    grid = rank_grid(steps, column_count=columns)
    assert grid is not None
    assert grid.ranks == (0, 1, 2)
    for name in STEP_PHASES:
        for rank in grid.ranks:
            for column in range(columns):
                want = oracle(steps, rank, column, columns, name)
                assert grid.phase_ns[name][rank, column] == pytest.approx(want, nan_ok=True)


def test_phases_add_up_to_the_step_and_a_pause_is_missing() -> None:
    steps = frame(2, 5)
    late = frame(1, 1).with_columns(start_ns=pl.lit(10_000_000, pl.Int64))
    grid = rank_grid(pl.concat([steps, late]), column_count=50)
    assert grid is not None
    parts = np.stack([grid.phase_ns[name] for name in STEP_PHASES])
    seen = ~np.isnan(grid.step_ns)
    assert np.allclose(parts.sum(axis=0)[seen], grid.step_ns[seen])
    assert np.isnan(grid.step_ns[1, -1])
    assert not np.isnan(grid.step_ns[0, -1])


def test_phase_that_was_never_seen_is_missing_and_not_zero() -> None:
    grid = rank_grid(frame(2, 9, phases=("forward", "backward", "other")))
    assert grid is not None
    assert np.isnan(grid.phase_ns["dataloader"]).all()
    assert grid.typical_ns["dataloader"] is None
    assert np.isfinite(grid.step_ns).any()


def test_excess_is_a_share_of_the_median_step() -> None:
    steps = pl.DataFrame(
        [
            {"rank": r, "attempt": 0, "step": s, "start_ns": s * 1000, "step_ns": 1000,
             "forward_host_ns": 400 + 500 * (r == 2), "other_host_ns": 600 - 500 * (r == 2)}
            for r in range(3) for s in range(10)
        ],
        schema=STEP_SCHEMA,
    )  # fmt: skip
    grid = rank_grid(steps, column_count=10)
    assert grid is not None
    assert np.allclose(grid.excess_ratio("step"), 0)
    assert np.allclose(grid.excess_ratio("forward")[2], 0.5)
    assert np.allclose(grid.excess_ratio("other")[2], -0.5)


def test_no_step_is_no_grid_and_a_thousand_ranks_stay_small() -> None:
    assert rank_grid(pl.DataFrame(schema=STEP_SCHEMA)) is None
    one = frame(1, 120)
    ranks = [one.with_columns(rank=pl.lit(rank, pl.Int64)) for rank in range(1024)]
    few, many = rank_grid(frame(2, 2000)), rank_grid(pl.concat(ranks))
    assert few is not None
    assert few.column_count == COLUMN_LIMIT
    assert many is not None
    assert many.column_count * 1024 <= 200_000
