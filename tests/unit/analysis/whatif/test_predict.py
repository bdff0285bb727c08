"""Replay of traces: reproduced first, then with changes whose effect is known by hand."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError, UsageError
from haiprof.trace_analysis.what_if.replay import (
    Change,
    faster_kernel,
    faster_loader,
    faster_network,
    faster_operator,
    rank_as_others,
)
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    Event,
    all_reduce,
    analysis_of,
    event,
    kernel,
    launch,
    rank_file,
    step,
    traces,
)

SYNC = "cudaDeviceSynchronize"


def sync(correlation: int, ts_us: float, dur_us: float) -> Event:
    return launch(correlation, ts_us, dur_us, name=SYNC)


def predicted(found: TraceAnalysis, *changes: Change) -> list[int]:
    """Predicted step times in us; the replay must have reproduced what was measured."""
    rows = found.what_if(*changes)
    assert (rows["reproduced_step_ns"] == rows["measured_step_ns"]).all()
    assert set(rows["error_ratio"]) == {0.0}
    return [ns // 1000 for ns in rows["predicted_step_ns"]]


def gpu_bound() -> list[Event]:
    """Three launches in 30 us, three kernels of 100 us back to back, then a wait for them."""
    return [
        step(1, 0, 400),
        *(launch(number, 10 * number, 5) for number in (1, 2, 3)),
        kernel("gemm", 20, 100, correlation=1),
        kernel("relu", 120, 100, correlation=2),
        kernel("gemm", 220, 100, correlation=3),
        sync(9, 40, 285),
        event("aten::add", "cpu_op", 330, 60),
    ]


def test_kernels_of_a_gpu_bound_step(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, [gpu_bound()])
    # 400 us with 200 of gemm and 100 of relu in a row; the CPU needs 70 us after the wait.
    assert predicted(found, faster_kernel("gemm", 2), faster_kernel("relu", 4)) == [300, 325]


@pytest.mark.parametrize("overlap_us", [0.1, 0.9, 20.0])
def test_kernels_that_overlap_a_little_still_follow_each_other(
    overlap_us: float, tmp_path: Path
) -> None:
    """Rounding of stamps, or programmatic dependent launch: four kernels of 2 ms on one stream."""
    length, kernels = 2000.0, []
    for at in range(4):
        begin = 50 + at * (length - overlap_us)
        kernels += [launch(at + 1, 10 * at, 5), kernel(f"k{at}", begin, length, correlation=at + 1)]
    end = 50 + 4 * length - 3 * overlap_us
    found = analysis_of(tmp_path, [[step(1, 0, end + 10), *kernels, sync(9, 45, end - 45)]])
    changed = predicted(found, *(faster_kernel(f"k{at}", 2) for at in range(4)))
    assert changed == [pytest.approx(end + 10 - 1000, abs=1)] * 4


def test_operator_counts_its_cpu_time_and_its_kernels(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, [gpu_bound()])
    assert predicted(found, faster_operator("aten::add")) == [340]
    inside = [*gpu_bound(), event("aten::relu", "cpu_op", 19, 8)]
    (tmp_path / "2").mkdir()
    # 4 us less before the third launch do not matter: the relu kernel takes 50 us less.
    assert predicted(analysis_of(tmp_path / "2", [inside]), faster_operator("aten::relu", 2)) == [
        350
    ]


def test_cpu_bound_step_gains_nothing_from_kernels(tmp_path: Path) -> None:
    events = [step(1, 0, 1000)]
    for number in range(5):
        events += [launch(number, 100 + 150 * number, 5)]
        events += [kernel("gemm", 110 + 150 * number, 50, correlation=number)]
    found = analysis_of(tmp_path, [events])
    assert predicted(found, faster_kernel("gemm")) == [1000]


def test_nothing_meets_a_name_that_is_not_there(tmp_path: Path) -> None:
    (row,) = analysis_of(tmp_path, [gpu_bound()]).what_if(faster_kernel("conv")).rows(named=True)
    assert (row["shortened_ns"], row["saved_ratio"]) == (0, 0.0)


def test_loader_is_taken_out(tmp_path: Path) -> None:
    loader = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    events = [
        step(1, 0, 500),
        event(loader, "user_annotation", 10, 300),
        event("aten::stack", "cpu_op", 50, 20),
        event("aten::add", "cpu_op", 400, 50),
    ]
    assert predicted(analysis_of(tmp_path, [events]), faster_loader(), faster_loader(3)) == [
        200,
        300,
    ]


def test_backward_runs_while_the_main_thread_waits(tmp_path: Path) -> None:
    name = "autograd::engine::evaluate_function: MulBackward0"
    events = [
        step(1, 0, 600),
        event("aten::mul", "cpu_op", 10, 90),
        event(name, "cpu_op", 120, 200, tid=2),
        event(name, "cpu_op", 320, 180, tid=2),
        event("aten::add", "cpu_op", 520, 50),
    ]
    found = analysis_of(tmp_path, [events])
    assert predicted(found, faster_operator("MulBackward0", 2)) == [410]
    assert predicted(found, faster_operator("aten::mul")) == [510]


def test_main_thread_works_while_another_one_goes_backward(tmp_path: Path) -> None:
    """A gradient on the CPU takes its time; what ran meanwhile did not wait for it."""
    name = "autograd::engine::evaluate_function: MulBackward0"
    events = [
        step(1, 0, 600),
        event("aten::mul", "cpu_op", 10, 90),
        event(name, "cpu_op", 120, 100, tid=2),
        event("AccumulateGrad", "cpu_op", 230, 200),
        event(name, "cpu_op", 220, 100, tid=2),
        event("aten::add", "cpu_op", 520, 50),
    ]
    found = analysis_of(tmp_path, [events])
    assert predicted(found, faster_operator("AccumulateGrad", 2)) == [500]
    assert predicted(found, faster_operator("aten::mul")) == [510]


def test_forward_in_threads_of_its_own_is_no_reason_not_to_wait(tmp_path: Path) -> None:
    """nn.DataParallel: a thread per device runs the forward pass, and the main thread waits."""
    forward, gradient = {"Fwd thread id": 0}, {"Fwd thread id": 1}
    number = {"Sequence number": 7}
    events = [
        step(1, 0, 600),
        event("scatter", "cpu_op", 10, 20),
        event("aten::mul", "cpu_op", 40, 50, tid=3, **number, **forward),
        event("MulBackward0", "cpu_op", 120, 380, tid=2, **number, **gradient),
        event("aten::add", "cpu_op", 520, 50),
    ]
    assert predicted(analysis_of(tmp_path, [events]), faster_operator("MulBackward0", 2)) == [410]


def test_thread_without_launches_holds_nothing_up(tmp_path: Path) -> None:
    watch = [launch(0, at, 2, name="cudaEventQuery", tid=77) for at in range(0, 400, 50)]
    found = analysis_of(tmp_path, [[*gpu_bound(), *watch]])
    assert predicted(found, faster_kernel("gemm|relu")) == [120]


def two_ranks(seconds: int = 2) -> list[list[Event]]:
    """Rank 1's kernel takes 300 us, rank 0's 100; the all-reduce transfers for 50."""
    ranks = []
    for took in (100, 300):
        events: list[Event] = []
        for number in range(seconds):
            at, one = 500 * number, 10 * number
            reduce = all_reduce(
                at + 20 + took, at + 370, seq=number, correlation=one + 2, stream=20
            )
            events += [
                step(number, at, 500),
                launch(one + 1, at + 10, 5),
                kernel("gemm", at + 20, took, correlation=one + 1),
                launch(one + 5, at + 16, 1, name="cudaStreamWaitEvent"),
                launch(one + 2, at + 18, 5),
                reduce,
                sync(one + 3, at + 30, 345),
                event("aten::add", "cpu_op", at + 400, 50),
            ]
        ranks.append(events)
    return ranks


def test_network_shortens_the_transfer_and_not_the_waiting(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, two_ranks())
    assert predicted(found, faster_network(2), faster_network(math.inf)) == [475, 450]


def test_one_rank_as_fast_as_the_others(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, two_ranks())
    assert predicted(found, rank_as_others(1), rank_as_others(), rank_as_others(0)) == [
        300, 400, 500,
    ]  # fmt: skip


def test_kernel_of_the_rank_that_waits_changes_nothing(tmp_path: Path) -> None:
    ranks = two_ranks()
    for one in ranks[0]:
        if one["name"] == "gemm":
            one["name"] = "gemm_of_rank_0"
    found = analysis_of(tmp_path, ranks)
    assert predicted(found, faster_kernel("gemm_of_rank_0")) == [500]


def test_steps_are_replayed_on_demand(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, two_ranks(3))
    (row,) = found.what_if(faster_network(2), steps=(1, 2)).rows(named=True)
    assert (row["measured_step_ns"], row["predicted_step_ns"]) == (500_000, 475_000)
    with pytest.raises(MissingDataError, match="no step from 7"):
        found.what_if(faster_network(2), steps=(7, 9))


def test_ranks_of_different_length_are_refused(tmp_path: Path) -> None:
    found = analysis_of(tmp_path, [two_ranks(2)[0], two_ranks(3)[1]])
    with pytest.raises(MissingDataError, match="from 2 to 3 profiler steps"):
        found.what_if(faster_network(2))


def test_change_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no speed-up"):
        faster_network(0)
    with pytest.raises(UsageError, match="regular expression"):
        faster_kernel("(")
    with pytest.raises(UsageError, match="rank 5"):
        analysis_of(tmp_path, two_ranks()).what_if(rank_as_others(5))


def test_stream_waits_as_recorded_hold_back_the_other_stream(tmp_path: Path) -> None:
    said: dict[str, Any] = {"cuda_sync_kind": "Stream Wait Event", "stream": 9}
    said |= {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 2}
    events = [
        step(1, 0, 300),
        launch(1, 10, 5),
        launch(5, 20, 5),
        kernel("gemm", 20, 100, correlation=1),
        kernel("copy", 121, 100, correlation=5, stream=9),
        event("Stream Wait Event", "cuda_sync", 18, 1, correlation=4, **said),
        sync(9, 40, 185),
    ]
    (row,) = analysis_of(tmp_path, [events]).what_if(faster_kernel("gemm", 2)).rows(named=True)
    assert row["predicted_step_ns"] == 250_000


@pytest.mark.parametrize(
    ("name", "unexplained"),
    [
        pytest.param("dlrm_v100_8ranks", 0.01, marks=pytest.mark.proof),
        pytest.param("tb_resnet50_nw0_v100", 0.01, marks=pytest.mark.proof),
        pytest.param("hta_nsres_v100_r0of1", 0.01, marks=pytest.mark.proof),
        ("tl_h100_qwen05_mem_stack", 0.01),
    ],
)
def test_real_traces_are_reproduced_and_explained(name: str, unexplained: float) -> None:
    changes = [faster_kernel("."), faster_operator("aten::", 2), faster_loader()]
    rows = TraceAnalysis(traces(name)).what_if(*changes)
    assert rows["error_ratio"].abs().max() == 0.0
    assert 0 <= rows["unexplained_ratio"][0] < unexplained
    assert (rows["predicted_step_ns"] <= rows["measured_step_ns"]).all()


def test_dlrm_waits_for_the_rank_that_arrives_last() -> None:
    """Its transfers take 0.2 ms of 13.3: a faster network cannot save more."""
    analysed = TraceAnalysis(traces("dlrm_v100_8ranks"))
    (row,) = analysed.what_if(faster_network(math.inf)).rows(named=True)
    assert row["collective_count"] == 8
    transfers = analysed.collectives()["transfer_ns"].sum()
    assert 0 <= row["measured_step_ns"] - row["predicted_step_ns"] <= transfers


TIMES = st.integers(0, 30)
SHORT = st.integers(0, 6)


@st.composite
def ranks(draw: st.DrawFn) -> list[Event]:
    """Launches, kernels, waits and backward spans at few different times, many of them at once."""
    events = [step(1, 0, 40)]
    free = dict.fromkeys((7, 20), 0)
    for number in range(draw(st.integers(0, 8))):
        at, stream = draw(TIMES), draw(st.sampled_from([7, 20]))
        begin = max(free[stream], at + draw(SHORT))
        free[stream] = begin + draw(SHORT)
        said: dict[str, Any] = {"correlation": number + 1, "stream": stream}
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if stream == 20 else "gemm"
        events.append(launch(number + 1, at, draw(SHORT), tid=draw(st.sampled_from([1, 2, 3]))))
        events.append(kernel(name, begin, free[stream] - begin, **said))
    names = ["cudaDeviceSynchronize", "cudaStreamWaitEvent", "cudaEventQuery"]
    for number in range(draw(st.integers(0, 4))):
        tid, name = draw(st.sampled_from([1, 2])), draw(st.sampled_from(names))
        events.append(launch(100 + number, draw(TIMES), draw(SHORT), name=name, tid=tid))
    spans = ["autograd::engine::evaluate_function: MulBackward0", "aten::add"]
    for _ in range(draw(st.integers(0, 6))):
        tid, name = draw(st.sampled_from([1, 2])), draw(st.sampled_from(spans))
        events.append(event(name, "cpu_op", draw(TIMES), draw(SHORT), tid=tid))
    return [*events, event("aten::mul", "cpu_op", 35, 2)]


@given(st.lists(ranks(), min_size=1, max_size=3))
@settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck))
def test_replay_lasts_as_long_and_nothing_faster_slows_it(found: list[list[Event]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rank, events in enumerate(found):
            rank_file(Path(folder), rank, events, len(found))
        changes = [faster_kernel("gemm", 2), faster_operator("aten"), faster_network(3)]
        rows = TraceAnalysis(folder).what_if(*changes)
    assert rows["error_ratio"].to_list() == [0.0] * 3
    assert (rows["predicted_step_ns"] <= rows["reproduced_step_ns"]).all()
    assert (rows["unexplained_ratio"] >= -1e-9).all()
