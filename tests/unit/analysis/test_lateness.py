"""Lateness: dumps of the Flight Recorder with a known story, and clocks that differ."""

from __future__ import annotations

import gzip
import json
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
from haiprof.run_analysis.lateness import arrivals, host_clock_offsets, lateness
from haiprof.run_format.layout import RunPaths
from haiprof.trace_format.flight_recorder import read_flight
from tests.unit.diagnosis.stories import write_story

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
    content = {
        "version": 2,
        "wall_ns": 1,
        "groups": {"0": [0, 1]},
        "traces": [{"entries": entries}],
    }
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    return path


def frame(created: Sequence[Sequence[int]], hosts: Sequence[str] = (), **more: Any) -> pl.DataFrame:
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


def test_buckets_of_one_backward_count_one_delay_once() -> None:
    starts = [step * STEP_NS for step in range(10)]
    times = [[at + 40 + bucket for at in starts for bucket in range(5)] for _ in range(2)]
    times[1] = [time + 30 * NS_PER_MS for time in times[1]]
    assert per_step(frame(times), steps_at(starts, 2)) == {1: 30 * NS_PER_MS, 0: 0}


def test_blocking_collectives_add_up_what_each_of_them_waited() -> None:
    starts = [step * STEP_NS for step in range(10)]
    fast, slow = [], []
    for at in starts:
        now = at
        for _ in range(4):  # all go on together, then rank 1 needs 5 ms more
            fast.append(now + 1 * NS_PER_MS)
            slow.append(now + 6 * NS_PER_MS)
            now += 6 * NS_PER_MS
    assert per_step(frame([fast, slow]), steps_at(starts, 2)) == {1: 20 * NS_PER_MS, 0: 0}


def test_one_slow_step_and_the_set_up_do_not_make_a_slow_rank() -> None:
    starts = [STEP_NS * (step + 10) for step in range(20)]
    before = [1, 2, 3]
    even = [before + [at + 1 for at in starts], before + [at + 1 for at in starts]]
    even[1][2] += 500 * NS_PER_MS  # building the model
    even[0][9] += 80 * NS_PER_MS  # a checkpoint of rank 0
    assert per_step(frame(even), steps_at(starts, 2)) == {0: 0, 1: 0}


def test_middle_rank_is_the_measure_with_many_ranks() -> None:
    random = np.random.default_rng(3)
    starts = [STEP_NS * step for step in range(30)]
    times = [[at + int(random.integers(1, 1000)) for at in starts] for _ in range(8)]
    for slow in (2, 5):
        times[slow] = [time + 10 * NS_PER_MS for time in times[slow]]
    found = per_step(frame(times), steps_at(starts, 8))
    assert {rank for rank, late in found.items() if late > 5 * NS_PER_MS} == {2, 5}


def test_hosts_without_a_common_clock_are_not_compared() -> None:
    starts = [STEP_NS * step for step in range(20)]
    skewed = [[at + shift for at in starts] for shift in (0, 0, 50 * NS_PER_MS, 50 * NS_PER_MS)]
    collectives = frame(skewed, hosts=("a", "a", "b", "b"))
    assert host_clock_offsets(collectives) == {"a": 0, "b": None}
    assert set(per_step(collectives, steps_at(starts, 4)).values()) == {0}


def test_completions_give_the_offset_of_a_clock_and_lateness_survives_it() -> None:
    starts = [STEP_NS * step for step in range(20)]
    late, offset = [0, 0, 0, 7 * NS_PER_MS], [0, 0, 9 * NS_PER_MS, 9 * NS_PER_MS]
    created = [[at + late[r] + offset[r] for at in starts] for r in range(4)]
    done = [[at + 20 * NS_PER_MS + offset[r] for at in starts] for r in range(4)]
    collectives = frame(created, hosts=("a", "a", "b", "b"), completed_ns=done)
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


def test_slow_backward_is_named_where_phases_are_alike_and_a_torn_dump_noted(
    tmp_path: Path,
) -> None:
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
