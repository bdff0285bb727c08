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


LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
BACKWARD = "autograd::engine::evaluate_function: MulBackward0"


def cpu_op(name: str, ts_us: float, dur_us: float, **more: Any) -> Event:
    return event(name, "cpu_op", ts_us, dur_us, **more)


def renamed(ranks: list[list[Event]]) -> list[list[Event]]:
    for one in ranks[0]:
        one["name"] = "gemm_of_rank_0" if one["name"] == "gemm" else one["name"]
    return ranks


STORIES: dict[str, tuple[list[list[Event]], dict[Change, int]]] = {
    # 400 us with 200 of gemm and 100 of relu in a row; the CPU needs 70 us after the wait.
    "kernels of a GPU-bound step": (
        [gpu_bound()], {faster_kernel("gemm", 2): 300, faster_kernel("relu", 4): 325}),
    "a name that is not there meets nothing": ([gpu_bound()], {faster_kernel("conv"): 400}),
    "an operator counts its CPU time": ([gpu_bound()], {faster_operator("aten::add"): 340}),
    # 4 us less before the third launch do not matter: the relu kernel takes 50 us less.
    "an operator counts its kernels": (
        [[*gpu_bound(), cpu_op("aten::relu", 19, 8)]], {faster_operator("aten::relu", 2): 350}),
    "a CPU-bound step gains nothing from kernels": (
        [[step(1, 0, 1000), *(each for at in range(5) for each in (
            launch(at, 100 + 150 * at, 5), kernel("gemm", 110 + 150 * at, 50, correlation=at)))]],
        {faster_kernel("gemm"): 1000}),
    "a loader is taken out": (
        [[step(1, 0, 500), event(LOADER, "user_annotation", 10, 300),
          cpu_op("aten::stack", 50, 20), cpu_op("aten::add", 400, 50)]],
        {faster_loader(): 200, faster_loader(3): 300}),
    "backward runs while the main thread waits": (
        [[step(1, 0, 600), cpu_op("aten::mul", 10, 90), cpu_op(BACKWARD, 120, 200, tid=2),
          cpu_op(BACKWARD, 320, 180, tid=2), cpu_op("aten::add", 520, 50)]],
        {faster_operator("MulBackward0", 2): 410, faster_operator("aten::mul"): 510}),
    # A gradient on the CPU takes its time; what ran meanwhile did not wait for it.
    "the main thread works while another one goes backward": (
        [[step(1, 0, 600), cpu_op("aten::mul", 10, 90), cpu_op(BACKWARD, 120, 100, tid=2),
          cpu_op("AccumulateGrad", 230, 200), cpu_op(BACKWARD, 220, 100, tid=2),
          cpu_op("aten::add", 520, 50)]],
        {faster_operator("AccumulateGrad", 2): 500, faster_operator("aten::mul"): 510}),
    # nn.DataParallel: a thread per device runs the forward pass, and the main thread waits.
    "forward in threads of its own is no reason not to wait": (
        [[step(1, 0, 600), cpu_op("scatter", 10, 20),
          cpu_op("aten::mul", 40, 50, tid=3, **{"Sequence number": 7, "Fwd thread id": 0}),
          cpu_op("MulBackward0", 120, 380, tid=2, **{"Sequence number": 7, "Fwd thread id": 1}),
          cpu_op("aten::add", 520, 50)]],
        {faster_operator("MulBackward0", 2): 410}),
    "a thread without launches holds nothing up": (
        [[*gpu_bound(),
          *(launch(0, at, 2, name="cudaEventQuery", tid=77) for at in range(0, 400, 50))]],
        {faster_kernel("gemm|relu"): 120}),
    "stream waits as recorded hold back the other stream": (
        [[step(1, 0, 300), launch(1, 10, 5), launch(5, 20, 5),
          kernel("gemm", 20, 100, correlation=1),
          kernel("copy", 121, 100, correlation=5, stream=9),
          event("Stream Wait Event", "cuda_sync", 18, 1, correlation=4, stream=9, wait_on_stream=7,
                cuda_sync_kind="Stream Wait Event", wait_on_cuda_event_record_corr_id=2),
          sync(9, 40, 185)]],
        {faster_kernel("gemm", 2): 250}),
    "a network shortens the transfer and not the waiting": (
        two_ranks(), {faster_network(2): 475, faster_network(math.inf): 450}),
    "one rank is as fast as the others": (
        two_ranks(), {rank_as_others(1): 300, rank_as_others(): 400, rank_as_others(0): 500}),
    "a kernel of the rank that waits changes nothing": (
        renamed(two_ranks()), {faster_kernel("gemm_of_rank_0"): 500}),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_replay_gives_what_was_measured_and_what_follows_by_hand(
    tmp_path: Path, story: str
) -> None:
    ranks, expected = STORIES[story]
    assert predicted(analysis_of(tmp_path, ranks), *expected) == list(expected.values())


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
