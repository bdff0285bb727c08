"""Operation tables: the published jobs' numbers, and pipelines whose answer is known by hand."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import MissingDataError, TraceFormatError
from haiprof.trace_analysis.what_if.operations import OperationWhatIf, operation_table
from haiprof.trace_analysis.what_if.predict import Plan, plan_graph, times
from tests.unit.analysis.trace.shared import traces

Row = tuple[str, int, int, int, float, float]


def table(rows: list[Row], *, steps: int = 1) -> pl.DataFrame:
    """Operations of (type, seq_id, stage, dp_rank, start, duration), the same in every step."""
    names = ["optype", "seq_id", "stage", "dp_rank", "start_ts", "duration"]
    frame = pl.DataFrame(rows, schema=names, orient="row")
    ranks = frame.with_columns(rank=pl.col("stage") * 2 + pl.col("dp_rank"))
    return pl.concat([ranks.with_columns(step=pl.lit(step)) for step in range(steps)])


def two_ranks(first: float, second: float) -> pl.DataFrame:
    """Forward, backward and a reduce-scatter on two data-parallel ranks of one stage."""
    rows: list[Row] = []
    for rank, took in enumerate((first, second)):
        late = 2 * max(first, second)
        rows += [
            ("forward-compute", 0, 0, rank, 0.0, took),
            ("backward-compute", 0, 0, rank, took, took),
            ("grads-reduce-scatter", 0, 0, rank, 2 * took, late + 1 - 2 * took),
            ("optimizer", 0, 0, rank, late + 1, 1.0),
        ]
    return table(rows, steps=2)


@pytest.mark.parametrize("job", ["AR", "ST"])
def test_published_jobs_are_reproduced(job: str) -> None:
    folder = traces("straggler_whatif")
    said = json.loads((folder / f"result-{job}.json").read_text())
    what_if = OperationWhatIf(operation_table(folder / f"trace-{job}.parquet"))
    assert what_if.slowdown_ratio == pytest.approx(said["blocking_slowdown"], rel=1e-5)
    for key, ours in (
        ("step_t_base", what_if.measured_ns),
        ("step_t_nodelay", what_if.reproduced_ns),
        ("step_t_noblk", what_if.ideal_ns),
    ):
        theirs = [said[key][str(step)] for step in what_if.table.steps]
        np.testing.assert_allclose(ours / 1e9, theirs, rtol=1e-5)
    workers = json.loads((folder / f"mw-{job}.json").read_text())["Mw"]
    stage = json.loads((folder / f"ms-{job}.json").read_text())["Ms"]
    assert what_if.slowest_workers_ratio() == pytest.approx(workers, abs=1e-5)
    assert what_if.last_stage_ratio() == pytest.approx(stage, abs=1e-5)
    for column in ("dp_rank", "stage", "optype"):
        theirs_by = said[f"blocking_decompose_by_{column}"]
        ours_by = {str(group): ratio for group, ratio in what_if.by(column).rows()}
        assert ours_by == pytest.approx(theirs_by, rel=1e-5)


def test_error_is_the_time_that_no_operation_accounts_for() -> None:
    folder = traces("straggler_whatif")
    what_if = OperationWhatIf(operation_table(folder / "trace-ST.parquet"))
    said = json.loads((folder / "result-ST.json").read_text())["launch_slowdown"]
    assert what_if.error_ratio == pytest.approx(1 / said - 1, rel=1e-5)


def test_one_slow_rank_is_the_whole_slowdown() -> None:
    what_if = OperationWhatIf(operation_table(two_ranks(1.0, 3.0)))
    assert list(what_if.measured_ns) == [8_000_000_000] * 2
    assert list(what_if.reproduced_ns) == [8_000_000_000] * 2
    # Ideal: computing takes the mean of 1 and 3 s twice, the transfer 1 s, the optimizer 1 s.
    assert list(what_if.ideal_ns) == [6_000_000_000] * 2
    assert what_if.slowdown_ratio == pytest.approx(8 / 6)
    assert what_if.by_worker().row(0)[:3] == (1, 0, 1)
    assert what_if.slowest_workers_ratio() == pytest.approx(1.0)
    scatters = (what_if.table.rows["optype"] == "grads-reduce-scatter").to_numpy()
    assert set(what_if.durations_ns[scatters].ravel().tolist()) == {1_000_000_000}


def test_equal_ranks_have_no_slowdown() -> None:
    what_if = OperationWhatIf(operation_table(two_ranks(2.0, 2.0)))
    assert what_if.slowdown_ratio == 1.0
    assert what_if.error_ratio == 0.0
    assert what_if.last_stage_ratio() is None


def test_receive_waits_for_the_send_of_the_stage_before() -> None:
    rows: list[Row] = [
        ("forward-compute", 0, 0, 0, 0.0, 2.0),
        ("forward-send", 0, 0, 0, 2.0, 0.5),
        ("backward-recv", 0, 0, 0, 2.0, 4.5),
        ("backward-compute", 0, 0, 0, 6.5, 1.0),
        ("forward-recv", 0, 1, 0, 0.0, 2.5),
        ("forward-compute", 0, 1, 0, 2.5, 2.0),
        ("backward-compute", 0, 1, 0, 4.5, 1.5),
        ("backward-send", 0, 1, 0, 6.0, 0.5),
    ]
    what_if = OperationWhatIf(operation_table(table(rows)))
    assert list(what_if.reproduced_ns) == [7_500_000_000]
    faster = what_if.durations_ns.copy()
    names = what_if.table.rows
    second = ((names["optype"] == "forward-compute") & (names["stage"] == 1)).to_numpy()
    faster[second] //= 2
    assert list(what_if.replay(faster)) == [6_500_000_000]


def test_table_that_lacks_something_is_refused() -> None:
    with pytest.raises(MissingDataError, match="seq_id"):
        operation_table(two_ranks(1.0, 1.0).drop("seq_id"))
    whole = two_ranks(1.0, 1.0)
    with pytest.raises(TraceFormatError, match="every operation"):
        operation_table(whole.head(whole.height - 1))
    chunks = two_ranks(1.0, 1.0).with_columns(mc=pl.lit(1))
    with pytest.raises(MissingDataError, match="virtual stages"):
        operation_table(chunks)


def plan_of(edges: list[tuple[int, int]], points: int) -> Plan:
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return plan_graph(points, pairs[:, 0], pairs[:, 1])


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]], list[int]]:
    points = draw(st.integers(1, 12))
    pairs = st.tuples(st.integers(0, points - 1), st.integers(0, points - 1), st.integers(0, 50))
    edges = [(min(a, b), max(a, b), w) for a, b, w in draw(st.lists(pairs)) if a != b]
    names = draw(st.permutations(range(points)))  # so that numbers say nothing about the order
    delays = draw(st.lists(st.integers(0, 9), min_size=points, max_size=points))
    return points, [(names[a], names[b], w) for a, b, w in edges], delays


@given(random_graphs())
def test_times_are_longest_paths(case: tuple[int, list[tuple[int, int, int]], list[int]]) -> None:
    points, edges, delays = case

    def oracle(point: int) -> int:
        before = [oracle(a) + w for a, b, w in edges if b == point]
        return max(before) + delays[point] if before else 0

    plan = plan_of([(a, b) for a, b, _ in edges], points)
    lengths = np.array([w for *_, w in edges], dtype=np.int64).reshape(-1, 1)
    found = times(plan, lengths, np.array(delays).reshape(-1, 1))
    assert found[:, 0].tolist() == [oracle(point) for point in range(points)]


def test_columns_are_independent_cases() -> None:
    plan = plan_of([(0, 1), (1, 2)], 3)
    found = times(plan, np.array([[1, 10], [2, 20]]))
    assert found[2].tolist() == [3, 30]
    with pytest.raises(TraceFormatError, match="wait for each other"):
        plan_of([(0, 1), (1, 2), (2, 1)], 3)
