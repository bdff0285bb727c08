from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.trace_analysis.step_time import CAUSES, step_time_breakdown
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    REAL_TRACES,
    Event,
    event,
    kernel,
    launch,
    ranks_of,
    step,
    trace_of,
    traces,
)

US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
PARTS = [f"{cause}_ns" for cause in (*CAUSES, "other")]

# What torch_tb_profiler 0.4.3 prints for tb_resnet50_nw0_v100 (steps_costs; us).
TENSORBOARD = {
    5: (98598, 1941, 90, 0, 2796, 69317, 14091, 1115, 187948),
    6: (98570, 1947, 89, 0, 2762, 57669, 12968, 1148, 175153),
    7: (98596, 1931, 91, 0, 2877, 61257, 13768, 1213, 179733),
    8: (98623, 1938, 89, 0, 2841, 56453, 13420, 1200, 174564),
    9: (98504, 1937, 87, 0, 2788, 62690, 15025, 1141, 182172),
    10: (98641, 1798, 88, 0, 3381, 48185, 12773, 1117, 165983),
}

MAKERS: tuple[Callable[[int, int], Event], ...] = (
    lambda at, length: kernel("gemm", at, length),
    lambda at, length: kernel("copy", at, length, category="gpu_memcpy"),
    lambda at, length: kernel("set", at, length, category="gpu_memset"),
    lambda at, length: kernel(NCCL, at, length, stream=20),
    lambda at, length: launch(at * 100 + length, at, length),
    lambda at, length: event(LOADER, "user_annotation", at, length),
    lambda at, length: event("aten::mm", "cpu_op", at, length),
)
"""One maker of events per cause, in the order of priority."""


def parts_of(frame: pl.DataFrame) -> list[list[int]]:
    return [[value // US for value in row] for row in frame.select(PARTS).rows()]


def test_each_moment_goes_to_the_first_cause(tmp_path: Path) -> None:
    layers = [make(100, 10 * (place + 1)) for place, make in enumerate(MAKERS)]
    found = step_time_breakdown(trace_of(tmp_path, [step(7, 100, 100), *layers]))
    assert parts_of(found) == [[10] * 7 + [30]]
    assert found.row(0)[:3] == (7, 100 * US, 100 * US)


def test_collectives_on_the_cpu_are_communication_and_steps_are_no_work(tmp_path: Path) -> None:
    found = step_time_breakdown(trace_of(tmp_path, [
        step(1, 0, 50), event("gloo:all_reduce", "user_annotation", 0, 10),
        event("nccl:all_reduce", "user_annotation", 10, 5),
        event("ProfilerStep#1", "gpu_user_annotation", 0, 50, pid=0, tid=7),
    ]))  # fmt: skip
    row = found.row(0, named=True)
    assert (row["communication_ns"], row["cpu_exec_ns"], row["other_ns"]) == (
        10 * US, 5 * US, 35 * US
    )  # fmt: skip


def test_what_was_not_recorded_is_null(tmp_path: Path) -> None:
    cpu = step_time_breakdown(trace_of(tmp_path, [step(1, 0, 50), event("a", "cpu_op", 0, 10)]))
    assert cpu.select(PARTS).row(0) == (None, None, None, None, None, 0, 10 * US, 40 * US)


def test_a_trace_without_steps_is_one_row(tmp_path: Path) -> None:
    found = step_time_breakdown(trace_of(tmp_path, [event("a", "cpu_op", 5, 10),
                                                    kernel("k", 20, 5)]))  # fmt: skip
    assert found.row(0)[:3] == (None, 5 * US, 20 * US)
    assert parts_of(found.fill_null(0)) == [[5, 0, 0, 0, 0, 0, 10, 5]]


def test_a_trace_without_events_is_an_empty_frame(tmp_path: Path) -> None:
    assert step_time_breakdown(trace_of(tmp_path, [event("m", "overhead", 0, 1)])).is_empty()


def test_gpu_tail_moves_a_steps_end_to_its_last_gpu_event(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        kernel("before", 95, 10), step(1, 100, 100), step(2, 200, 100),
        launch(1, 150), kernel("first", 190, 30, correlation=1),
        launch(2, 250), kernel("second", 260, 20, correlation=2),
    ])  # fmt: skip
    found = step_time_breakdown(trace, gpu_tail=True)
    assert found.select(pl.col("start_ns", "wall_ns") // US).rows() == [(105, 115), (220, 80)]
    assert found["kernel_ns"].to_list() == [30 * US, 20 * US]


def test_steps_equal_tensorboards() -> None:
    found = TraceAnalysis(traces("tb_resnet50_nw0_v100")).step_time_breakdown(gpu_tail=True)
    ours = {row[0]: tuple(value // US for value in row[1:])
            for row in found.select("step", *PARTS, "wall_ns").iter_rows()}  # fmt: skip
    assert ours == TENSORBOARD


@pytest.mark.parametrize("name", REAL_TRACES)
def test_parts_add_up_to_the_steps_wall_time(name: str) -> None:
    for trace in ranks_of(name).values():
        for gpu_tail in (False, True):
            found = step_time_breakdown(trace, gpu_tail=gpu_tail)
            assert (
                found.select(pl.sum_horizontal(PARTS))
                .to_series()
                .equals(found["wall_ns"].alias(PARTS[0]))
            )
            assert found.select(pl.min_horizontal(PARTS)).to_series().min() >= 0  # type: ignore[operator]
        marks = trace.steps
        if marks.height:
            plain = step_time_breakdown(trace)
            assert plain["step"].to_list() == marks["step"].to_list()
            assert (plain["wall_ns"] == marks["end_ns"] - marks["start_ns"]).all()


SPANS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 60), st.integers(0, 15)), max_size=14)


@settings(max_examples=examples(40), deadline=None)
@given(SPANS, st.lists(st.integers(0, 20), min_size=1, max_size=3))
def test_parts_are_those_of_a_sweep_by_hand(
    spans: list[tuple[int, int, int]], lengths: list[int]
) -> None:
    marks, at = [], 3
    for number, length in enumerate(lengths):
        marks.append((number, at, at + length))
        at += length + 2
    events: list[Event] = [MAKERS[cause](start, length) for cause, start, length in spans]
    events += [step(number, start, end - start) for number, start, end in marks]
    with TemporaryDirectory() as folder:
        found = step_time_breakdown(trace_of(Path(folder), events))
    for row, (_, start, end) in zip(parts_of(found.fill_null(0)), marks, strict=True):
        expected = [0] * 8
        for cell in range(start, end):
            active = [cause for cause, at_, length in spans if at_ <= cell < at_ + length]
            expected[min(active, default=7)] += 1
        assert row == expected
