"""Ranks over time: their map against a slow and plain oracle, and lateness of a known story."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.base.errors import TraceFormatError
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.engine import diagnose
from haiprof.run_analysis.collectives import arrivals, host_clock_offsets, lateness
from haiprof.run_analysis.ranks import COLUMN_LIMIT, rank_grid
from haiprof.run_analysis.step_frame import STEP_PHASES, STEP_SCHEMA, by_attempt
from haiprof.run_format.layout import RunPaths
from haiprof.trace_format.flight_recorder import read_flight
from tests.unit.diagnosis.stories import write_story


def test_steps_of_each_attempt_are_the_rows_with_its_numbers() -> None:
    steps = frame(3, 5)
    again = steps.filter(pl.col("rank") == 1).with_columns(attempt=pl.lit(1, pl.Int64))
    whole = pl.concat([steps.filter(pl.col("rank") < 2), again, steps.filter(pl.col("rank") == 2)])
    found = dict(by_attempt(whole))
    assert list(found) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    for (rank, attempt), own in found.items():
        assert own.equals(whole.filter(rank=rank, attempt=attempt))
    assert not list(by_attempt(steps.clear()))


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
    usual = {name: ns or 0.0 for name, ns in grid.typical_ns.items()}
    excess = {name: grid.phase_ns[name][2] - usual[name] for name in ("forward", "other")}
    assert np.allclose(grid.step_ns / usual["step"], 1)
    assert np.allclose(excess["forward"] / usual["step"], 0.5)
    assert np.allclose(excess["other"] / usual["step"], -0.5)


def test_no_step_is_no_grid_and_a_thousand_ranks_stay_small() -> None:
    assert rank_grid(pl.DataFrame(schema=STEP_SCHEMA)) is None
    one = frame(1, 120)
    ranks = [one.with_columns(rank=pl.lit(rank, pl.Int64)) for rank in range(1024)]
    few, many = rank_grid(frame(2, 2000)), rank_grid(pl.concat(ranks))
    assert few is not None
    assert few.column_count == COLUMN_LIMIT
    assert many is not None
    assert many.column_count * 1024 <= 200_000


STEP_NS = 100 * NS_PER_MS


def entry(sequence: int, created_ns: int, **more: Any) -> dict[str, Any]:
    return {
        "collective_seq_id": sequence, "profiling_name": "gloo:all_reduce", "is_p2p": False,
        "process_group": ["0", "default_pg"], "time_created_ns": created_ns, "pg_id": 0,
        "input_sizes": [[2, 3], [4]], "input_dtypes": ["Float", "Float"], "record_id": sequence,
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "state": "scheduled",
        **more,
    }  # fmt: skip


def write_dump(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    groups = {"0": [0, 1]}
    content = {"version": 2, "wall_ns": 1, "groups": groups, "traces": [{"entries": entries}]}
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def collectives_of(
    created: Sequence[Sequence[int]], hosts: Sequence[str] = (), **more: Any
) -> pl.DataFrame:
    """Collectives of ranks 0, 1, ... with these enqueue times."""
    rows = [
        {
            "rank": rank, "attempt": 0, "host": hosts[rank] if hosts else "a", "group": "0",
            "group_name": "default_pg", "sequence": place, "kind": "all_reduce", "p2p": False,
            "element_count": 1, "dtype": "Float", "created_ns": time, "started_ns": None,
            "completed_ns": None, "state": "", **{k: v[rank][place] for k, v in more.items()},
        }
        for rank, times in enumerate(created)
        for place, time in enumerate(times)
    ]  # fmt: skip
    schema = {"started_ns": pl.Int64, "completed_ns": pl.Int64}
    return pl.DataFrame(rows, schema_overrides=schema)


def steps_at(starts: Sequence[int], ranks: int) -> pl.DataFrame:
    return pl.DataFrame(
        {"rank": [r for r in range(ranks) for _ in starts], "start_ns": list(starts) * ranks}
    )


def per_step(collectives: pl.DataFrame, steps: pl.DataFrame) -> dict[int, float]:
    rows = lateness(arrivals(collectives, host_clock_offsets(collectives)), steps)
    return dict(rows.select("rank", "late_ns_per_step").rows())


def test_buckets_count_one_delay_once_and_blocking_collectives_add_up() -> None:
    starts = [step * STEP_NS for step in range(10)]
    times = [[at + 40 + bucket for at in starts for bucket in range(5)] for _ in range(2)]
    times[1] = [time + 30 * NS_PER_MS for time in times[1]]
    assert per_step(collectives_of(times), steps_at(starts, 2)) == {1: 30 * NS_PER_MS, 0: 0}
    fast, slow = [], []
    for at in starts:
        now = at
        for _ in range(4):  # all go on together, then rank 1 needs 5 ms more
            fast.append(now + 1 * NS_PER_MS)
            slow.append(now + 6 * NS_PER_MS)
            now += 6 * NS_PER_MS
    assert per_step(collectives_of([fast, slow]), steps_at(starts, 2)) == {1: 20 * NS_PER_MS, 0: 0}


def test_one_slow_step_and_the_set_up_do_not_make_a_slow_rank() -> None:
    starts = [STEP_NS * (step + 10) for step in range(20)]
    before = [1, 2, 3]
    even = [before + [at + 1 for at in starts], before + [at + 1 for at in starts]]
    even[1][2] += 500 * NS_PER_MS  # building the model
    even[0][9] += 80 * NS_PER_MS  # a checkpoint of rank 0
    assert per_step(collectives_of(even), steps_at(starts, 2)) == {0: 0, 1: 0}


def test_middle_rank_is_the_measure_with_many_ranks() -> None:
    random = np.random.default_rng(3)
    starts = [STEP_NS * step for step in range(30)]
    times = [[at + int(random.integers(1, 1000)) for at in starts] for _ in range(8)]
    for slow in (2, 5):
        times[slow] = [time + 10 * NS_PER_MS for time in times[slow]]
    found = per_step(collectives_of(times), steps_at(starts, 8))
    assert {rank for rank, late in found.items() if late > 5 * NS_PER_MS} == {2, 5}


def test_hosts_are_compared_where_completions_give_their_common_clock() -> None:
    starts = [STEP_NS * step for step in range(20)]
    skewed = [[at + shift for at in starts] for shift in (0, 0, 50 * NS_PER_MS, 50 * NS_PER_MS)]
    collectives = collectives_of(skewed, hosts=("a", "a", "b", "b"))
    assert host_clock_offsets(collectives) == {"a": 0, "b": None}
    assert set(per_step(collectives, steps_at(starts, 4)).values()) == {0}
    late, offset = [0, 0, 0, 7 * NS_PER_MS], [0, 0, 9 * NS_PER_MS, 9 * NS_PER_MS]
    created = [[at + late[r] + offset[r] for at in starts] for r in range(4)]
    done = [[at + 20 * NS_PER_MS + offset[r] for at in starts] for r in range(4)]
    collectives = collectives_of(created, hosts=("a", "a", "b", "b"), completed_ns=done)
    assert host_clock_offsets(collectives) == {"a": 0, "b": 9 * NS_PER_MS}
    found = per_step(collectives, steps_at([s + 9 * NS_PER_MS for s in starts], 4))
    assert found[3] == 7 * NS_PER_MS
    assert found[0] == found[1] == found[2] == 0


def test_dump_is_read_with_sizes_and_nulls_for_what_gloo_does_not_tell(tmp_path: Path) -> None:
    flight = read_flight(write_dump(tmp_path / "d.json.gz", [entry(1, 5), entry(2, 9, state="x")]))
    assert flight.groups == {"0": [0, 1]}
    rows = flight.entries.select("sequence", "element_count", "created_ns", "completed_ns", "kind")
    assert rows.rows() == [(1, 10, 5, None, "all_reduce"), (2, 10, 9, None, "all_reduce")]


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"[1"), gzip.compress(b"{}"), gzip.compress(b"{" * 9)[:15]],
    ids=["empty", "no gzip", "no JSON", "something else", "torn"],
)
def test_dump_that_is_damaged_is_one_error_and_a_note(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "collectives-1.json.gz"
    path.write_bytes(content)
    with pytest.raises(TraceFormatError, match=r"collectives-1\.json\.gz"):
        read_flight(path)


def test_slow_backward_is_named_where_phases_are_alike_and_torn_dump_noted(tmp_path: Path) -> None:
    root = write_story(tmp_path / "run", lambda _, __: (1, 10, 60, 2), ranks=2, noise=0)
    steps = Analyzer(root).steps().filter(pl.col("rank") == 0)["start_ns"].to_list()
    for rank in range(2):
        late = 25 * NS_PER_MS * rank
        entries = [entry(n, at + 30 * NS_PER_MS + late) for n, at in enumerate(steps)]
        write_dump(RunPaths(root).rank(rank).collectives(7), entries)
    verdict = diagnose(Analyzer(root))
    first = verdict.findings[0]
    assert (first.rule, first.rank, first.cause) == ("ranks_uneven", 1, "backward")
    assert first.lost_ratio == pytest.approx(25 * NS_PER_MS / (verdict.step_ns or 1), rel=0.01)
    (RunPaths(root).rank(0).collectives(8)).write_bytes(b"torn")
    assert any("collectives-8" in note for note in Analyzer(root).notes())
