"""What GPUs do over time: breakdowns, overlap, idle time, steps and bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.base.intervals import Intervals, union
from haiprof.trace_analysis.device_time import (
    KINDS,
    _combinations,
    gpu_events,
    idle_breakdown,
    overlap,
    temporal_breakdown,
    union_of,
)
from haiprof.trace_analysis.launches import memory_bandwidth, memory_bandwidth_summary
from haiprof.trace_analysis.step_time import CAUSES, step_time_breakdown
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    FEW_TRACES,
    Event,
    as_hta_sees,
    covered_by_hand,
    event,
    events_of,
    exact_intervals,
    kernel,
    launch,
    rank_file,
    ranks_of,
    reference,
    step,
    trace_of,
    traces,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def union_of_pairs(pairs: list[tuple[int, int]]) -> Intervals:
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    return union(starts, np.array([end for _, end in pairs], dtype=np.int64))


def cells(pairs: list[tuple[int, int]]) -> set[int]:
    """The oracle: every unit of time on its own."""
    return {cell for start, end in pairs for cell in range(start, end)}


def test_a_trace_of_the_cpu_alone_has_empty_frames(tmp_path: Path) -> None:
    rank_file(tmp_path, 0, [event("aten::relu", "cpu_op", 0, 1)])
    analysis = TraceAnalysis(tmp_path)
    for method in (
        "idle_time_breakdown", "kernel_type_breakdown", "kernel_breakdown", "memory_bandwidth",
        "memory_bandwidth_summary", "launch_statistics", "launch_summary", "queue_length",
        "queue_length_summary", "full_queue", "operator_sequences",
    ):  # fmt: skip
        assert getattr(analysis, method)().is_empty(), method


US = 1000
NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def test_overlap_is_the_hidden_share_of_communication(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        kernel(NCCL, 0, 10, stream=20), kernel("gemm", 4, 3), kernel("gemm", 8, 10),
        kernel("gemm", 5, 3, stream=9), kernel("alone", 0, 5, device=1),
    ])  # fmt: skip
    assert overlap(trace).rows() == [(0, 14 * US, 10 * US, 6 * US, 0.6), (1, 5 * US, 0, 0, None)]
    trace = trace_of(tmp_path, [event("aten::mm", "cpu_op", 0, 1)])
    assert overlap(trace).rows() == [(None,) * 5]


@given(st.tuples(PAIRS, PAIRS, PAIRS))
def test_combinations_are_those_of_sets(
    pairs: tuple[list[tuple[int, int]], list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    found = dict(_combinations({
        kind: union_of_pairs(own) for kind, own in zip(KINDS, pairs, strict=True)
    }))  # fmt: skip
    inside = {kind: cells(own) for kind, own in zip(KINDS, pairs, strict=True)}
    expected = dict.fromkeys(found, 0)
    for cell in set.union(*inside.values()):
        expected[" overlapping ".join(kind for kind in KINDS if cell in inside[kind])] += 1
    assert found == expected


def streams_trace(folder: Path) -> list[dict[str, object]]:
    """Stream 7: a long kernel, one inside it, then gaps of each category; stream 8: no gap."""
    return [
        launch(1, 0), kernel("long", 10, 90, correlation=1),
        launch(2, 1), kernel("inside", 20, 10, correlation=2),  # HTA: a gap of -80
        launch(3, 90), kernel("soon", 105, 5, correlation=3),  # 5 us after 100: kernel_wait
        launch(4, 91), kernel("late", 160, 10, correlation=4),  # 50 us after 110: other
        launch(5, 190), kernel("host", 200, 10, correlation=5),  # 30 us after 170, 20 of the host
        kernel("no launch", 217, 3, correlation=77),  # 7 us after 210: unknown
        kernel("touching", 220, 5, correlation=78),
        kernel("alone", 0, 5, stream=8),
        event("Stream Sync", "cuda_sync", 100, 5, device=0, stream=7),
    ]  # fmt: skip


def test_idle_time_has_a_row_per_stream_and_category(tmp_path: Path) -> None:
    found = idle_breakdown(trace_of(tmp_path, streams_trace(tmp_path)))
    columns = ("stream", "idle_category", "idle_ns", "idle_ratio", "before_launch_ns", "count")
    assert found.select(columns).rows() == [
        (7, "host_wait", 30 * US, 30 / 92, 20 * US, 1),
        (7, "kernel_wait", 5 * US, 5 / 92, 0, 1),
        (7, "other", 50 * US, 50 / 92, 0, 1),
        (7, "unknown", 7 * US, 7 / 92, None, 1),
        (8, "host_wait", 0, None, 0, 0),
        (8, "kernel_wait", 0, None, 0, 0),
        (8, "other", 0, None, 0, 0),
        (8, "unknown", 0, None, None, 0),
    ]


def test_idle_delay_moves_gaps_between_kernel_wait_and_other(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, streams_trace(tmp_path))
    for delay_us, kernel_wait in ((5, 0), (6, 5), (50, 5), (51, 55)):
        found = idle_breakdown(trace, consecutive_kernel_delay_ns=delay_us * US, streams=[7])
        assert found["idle_ns"].to_list()[1] == kernel_wait * US
        assert found["stream"].unique().to_list() == [7]


def test_idle_statistics_are_of_the_intervals(tmp_path: Path) -> None:
    events = []
    for number, gap_us in enumerate((2, 4, 6, 20)):
        at = 100 * number
        events += [
            launch(2 * number + 1, 0), kernel("a", at, 100 - gap_us, correlation=2 * number + 1),
        ]  # fmt: skip
    events += [launch(99, 0), kernel("end", 400, 1, correlation=99)]
    found = idle_breakdown(trace_of(tmp_path, events)).row(1, named=True)
    assert [found[f"{key}_ns"] for key in ("min", "q25", "median", "q75", "max", "mean")] == [
        2000, 3500, 5000, 9500, 20000, 8000
    ]  # fmt: skip
    assert found["std_ns"] == pytest.approx((((6**2 + 4**2 + 2**2 + 12**2) / 3) ** 0.5) * US)


@pytest.mark.parametrize("name", FEW_TRACES)
def test_idle_time_and_busy_time_make_each_streams_span(name: str) -> None:
    for trace in ranks_of(name).values():
        found = idle_breakdown(trace).group_by("stream").agg(pl.col("idle_ns").sum())
        idle = dict(found.iter_rows())
        for (stream,), events in gpu_events(trace, None).group_by("stream"):
            busy = union_of(events)
            span = busy.ends[-1] - busy.starts[0]
            assert idle[stream] == span - (busy.ends - busy.starts).sum()


# The published numbers of this trace come from float us since 1970: a quarter of a us apart.
FLOAT_STAMPS = "hta_nsres_v100_r0of1"
SYMMETRIC_MEMORY = "multimem_all_reduce"


def is_compute(name: str, category: str) -> bool:
    talks = name.startswith("nccl") or SYMMETRIC_MEMORY in name
    return category in ("kernel", "Kernel") and not talks


@pytest.mark.parametrize("name", FEW_TRACES)
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


def test_temporal_breakdown_does_not_count_waits(tmp_path: Path) -> None:
    wait = event("Stream Wait", "cuda_sync", 20, 100, device=0, stream=7)
    assert temporal_breakdown(trace_of(tmp_path, [kernel("a", 0, 10), wait])).rows() == [
        (0, 10 * US, 0, 10 * US, 0)
    ]
    rank_file(tmp_path, 0, [kernel("a", 5, 0)])
    found = TraceAnalysis(tmp_path).temporal_breakdown().row(0, named=True)
    assert (found["span_ns"], found["idle_ratio"]) == (0, None)


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


def test_device_and_stream_come_from_pid_and_tid_where_arguments_lack_them(tmp_path: Path) -> None:
    bare = event("a", "kernel", 0, 1, pid=2, tid="stream 20")
    assert gpu_events(trace_of(tmp_path, [bare]), None).select("device", "stream").rows() == [
        (2, 20)
    ]


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


GB_PER_S = "memory bandwidth (GB/s)"
HTA_COLUMNS = ["rank", "name", "count", "mean", "std", "min", "25%", "50%", "75%", "max"]
COPIES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10), st.integers(1, 9)), min_size=1, max_size=12
)


def copy(at: float, duration: float, **more: object) -> Event:
    named = {"name": "Memcpy HtoD (Pinned -> Device)", "category": "gpu_memcpy", **more}
    return kernel(str(named.pop("name")), at, duration, **named)


def test_residues_of_float_sums_are_no_bandwidth_as_in_hta() -> None:
    """HTA counts 7674 values from 2.8e-14 GB/s on where 3840 copies ran, and adds up neighbours."""
    path = reference("hta_diff_test_v100_r1of2/get_memory_bw_summary.csv")
    said = pl.read_csv(path, skip_rows=3, has_header=False, new_columns=HTA_COLUMNS)
    theirs = said.row(by_predicate=pl.col("name") == "Memcpy DtoD", named=True)
    found = memory_bandwidth_summary(as_hta_sees(ranks_of("hta_diff_test_v100_r1of2")[1]))
    ours = found.row(by_predicate=pl.col("copy_kind") == "Memcpy DtoD", named=True)
    assert theirs["min"] < 1e-12
    assert ours["change_min"] > 1e3
    assert ours["change_count"] == ours["copy_count"] < theirs["count"]
    assert ours["change_max"] / 1e9 < theirs["max"]


@settings(max_examples=examples(60))
@given(COPIES)
def test_bandwidth_equals_brute_force(copies: list[tuple[int, int, int]]) -> None:
    events = [copy(at, length, bytes=rate * length * 1000) for at, length, rate in copies]
    with TemporaryDirectory() as folder:
        trace = trace_of(Path(folder), events)
        series, summary = memory_bandwidth(trace), memory_bandwidth_summary(trace)
    for when, value in dict(series.select("ts_ns", "bandwidth_bytes_per_s").rows()).items():
        running = [rate for at, length, rate in copies if at <= when / 1000 < at + length]
        assert value == pytest.approx(sum(running) * 1e9)
        assert running or value == 0
    row = summary.row(0, named=True)
    cells = {cell for at, length, _ in copies for cell in range(at, at + length)}
    assert row["busy_ns"] == 1000 * len(cells)
    moved = sum(rate * length * 1000 for _, length, rate in copies)
    assert row["bytes"] == moved
    mean = row["mean_bandwidth_bytes_per_s"]
    assert mean == pytest.approx(moved / row["busy_ns"] * 1e9) if cells else mean is None


def test_recorded_bandwidth_comes_before_bytes_and_duration(tmp_path: Path) -> None:
    events = [
        copy(0, 1, bytes=1000, **{GB_PER_S: 2.5}), copy(10, 2, bytes=1000),
        kernel("Memset (Device)", 20, 1, category="gpu_memset"), kernel("compute", 30, 1),
    ]  # fmt: skip
    trace = trace_of(tmp_path, events)
    assert memory_bandwidth(trace).rows() == [
        (0, "Memcpy HtoD", 0, 2.5e9),
        (0, "Memcpy HtoD", 1000, 0.0),
        (0, "Memcpy HtoD", 10_000, 5e8),
        (0, "Memcpy HtoD", 12_000, 0.0),
    ]
    known, unknown = memory_bandwidth_summary(trace).rows(named=True)
    assert (known["bytes"], known["unsized_count"], known["busy_ns"]) == (2000, 0, 3000)
    assert unknown["copy_kind"] == "Memset"
    assert (unknown["bytes"], unknown["mean_bandwidth_bytes_per_s"]) == (None, None)
    counts = ("unsized_count", "unrated_count", "change_count")
    assert [unknown[name] for name in counts] == [1, 1, 0]
    trace = trace_of(tmp_path, [copy(0, 1, bytes=1000), copy(5, 1)])
    row = memory_bandwidth_summary(trace).row(0, named=True)
    assert (row["copy_count"], row["unsized_count"], row["bytes"]) == (2, 1, None)
    assert row["change_count"] == 1
