from __future__ import annotations

from pathlib import Path

import pytest

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.device_time import gpu_events, temporal_breakdown, with_launch
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    covered_by_hand,
    event,
    events_of,
    exact_intervals,
    kernel,
    launch,
    rank_file,
    ranks_of,
    step,
    trace_of,
    traces,
)

US = 1000
# The published numbers of this trace come from float us since 1970: a quarter of a us apart.
FLOAT_STAMPS = "hta_nsres_v100_r0of1"


SYMMETRIC_MEMORY = "multimem_all_reduce"


def is_compute(name: str, category: str) -> bool:
    talks = name.startswith("nccl") or SYMMETRIC_MEMORY in name
    return category in ("kernel", "Kernel") and not talks


@pytest.mark.parametrize("name", REAL_TRACES)
def test_temporal_breakdown_is_exact_on_real_traces(name: str) -> None:
    theirs = exact_intervals(name)
    for rank, trace in ranks_of(name).items():
        events = events_of(trace.path)
        span = max(each.end for each in events) - min(each.start for each in events)
        busy = covered_by_hand(events)
        compute = covered_by_hand(each for each in events if is_compute(each.name, each.category))
        symmetric = covered_by_hand(each for each in events if SYMMETRIC_MEMORY in each.name)
        found = temporal_breakdown(trace)
        assert found.rows() == [
            (trace.gpu["device"][0], span, span - busy, compute, busy - compute)
        ]
        got = found.row(0, named=True)
        tolerance = 20.0 if name == FLOAT_STAMPS else 0.02
        got["compute_ns"] += symmetric  # computing in the reference (D25); nothing runs beside it
        for part in ("span", "idle", "compute"):
            assert got[f"{part}_ns"] / US == pytest.approx(
                theirs[rank][f"{part}_us"], abs=tolerance
            )


def test_temporal_breakdown_of_one_folder_has_a_row_per_rank_with_ratios() -> None:
    found = TraceAnalysis(traces("dlrm_v100_8ranks")).temporal_breakdown()
    assert found["rank"].to_list() == list(range(8))
    ratios = found.select("idle_ratio", "compute_ratio", "non_compute_ratio").sum_horizontal()
    assert ratios.to_list() == pytest.approx([1.0] * 8, abs=1e-12)


def test_temporal_breakdown_of_several_devices_has_a_row_for_each(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        kernel("a", 0, 10), kernel("b", 15, 5),
        kernel("a", 100, 10, device=1), kernel("copy", 105, 10, device=1, category="gpu_memcpy"),
    ])  # fmt: skip
    assert temporal_breakdown(trace).rows() == [
        (0, 20 * US, 5 * US, 15 * US, 0),
        (1, 15 * US, 0, 10 * US, 5 * US),
    ]


def test_temporal_breakdown_of_a_cpu_trace_is_a_row_of_nulls(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [kernel("a", 0, 10)])
    rank_file(tmp_path, 1, [event("aten::mm", "cpu_op", 0, 10)])
    found = TraceAnalysis(tmp_path).temporal_breakdown()
    assert found.drop("rank").row(1) == (None,) * (found.width - 1)
    assert found["rank"].to_list() == [0, 1]
    assert found["idle_ratio"].to_list() == [0.0, None]


def test_temporal_breakdown_of_events_without_duration_has_no_ratio(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [kernel("a", 5, 0)])
    found = TraceAnalysis(tmp_path).temporal_breakdown().row(0, named=True)
    assert (found["span_ns"], found["idle_ratio"]) == (0, None)


def test_temporal_breakdown_does_not_count_waits(tmp_path: Path) -> None:
    wait = event("Stream Wait", "cuda_sync", 20, 100, device=0, stream=7)
    assert temporal_breakdown(trace_of(tmp_path, [kernel("a", 0, 10), wait])).rows() == [
        (0, 10 * US, 0, 10 * US, 0)
    ]


def steps_trace(folder: Path) -> list[dict[str, object]]:
    return [
        step(3, 0, 10), step(4, 10, 10), step(5, 20, 10),
        launch(1, 1), kernel("first", 8, 5, correlation=1),
        launch(2, 12), kernel("second", 25, 5, correlation=2),
        launch(3, 19), kernel("graph", 31, 1, correlation=3), kernel("graph", 33, 1, correlation=3),
        kernel("no launch", 22, 1, correlation=9),
    ]  # fmt: skip


def test_steps_choose_gpu_events_by_their_launch(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, steps_trace(tmp_path))
    names = {
        steps: gpu_events(trace, steps)["name"].to_list() for steps in ((3, 4), (4, 5), (5, 9))
    }
    assert names == {(3, 4): ["first"], (4, 5): ["second", "graph", "graph"], (5, 9): ["no launch"]}
    assert temporal_breakdown(trace, steps=(4, 5)).rows() == [(0, 9 * US, 2 * US, 7 * US, 0)]


def test_steps_that_were_not_recorded_are_an_error_that_says_which_were(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, steps_trace(tmp_path))
    with pytest.raises(MissingDataError, match="no step from 7 to before 9; it has 3 to 5"):
        temporal_breakdown(trace, steps=(7, 9))
    (tmp_path / "other").mkdir()
    with pytest.raises(MissingDataError, match="no profiler step was recorded"):
        temporal_breakdown(trace_of(tmp_path / "other", [kernel("a", 0, 1)]), steps=(7, 9))


def test_steps_of_old_traces_are_operators(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        event("ProfilerStep#5", "Operator", 0, 10), event("aten::mm", "Operator", 1, 2),
        kernel("a", 4, 1, category="Kernel"),
    ])  # fmt: skip
    assert trace.steps["step"].to_list() == [5]
    assert temporal_breakdown(trace, steps=(5, 6)).height == 1


def test_launches_are_joined_in_the_events_order(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, steps_trace(tmp_path))
    found = with_launch(trace.gpu, trace.runtime)
    assert found["ts_ns"].is_sorted()
    assert found["launch_ns"].to_list() == [1 * US, None, 12 * US, 19 * US, 19 * US]


def test_device_and_stream_come_from_pid_and_tid_where_the_arguments_lack_them(
    tmp_path: Path,
) -> None:
    bare = event("a", "kernel", 0, 1, pid=2, tid="stream 20")
    assert gpu_events(trace_of(tmp_path, [bare]), None).select("device", "stream").rows() == [
        (2, 20)
    ]
