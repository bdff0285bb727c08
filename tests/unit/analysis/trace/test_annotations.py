from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from haiprof.trace_analysis.step_time import annotation_breakdown, annotation_kernels, innermost
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    ranks_of,
    step,
    trace_of,
)

US = 1000
GPU = "gpu_user_annotation"


def on_gpu(name: str, ts_us: float, dur_us: float, **more: int) -> Event:
    """An annotation as it shows on stream 7 of device 0."""
    return kernel(name, ts_us, dur_us, category=GPU, **more)


def ranges() -> list[Event]:
    return [
        step(1, 0, 100), step(2, 100, 100),
        event("forward", "user_annotation", 10, 30, **{"External id": 5}),
        event("forward", "user_annotation", 20, 10, **{"External id": 6}),  # inside the first
        event("forward", "user_annotation", 110, 30, **{"External id": 7}),
        on_gpu("forward", 50, 70, **{"External id": 5}),
        on_gpu("forward", 130, 50, **{"External id": 7}),
    ]  # fmt: skip


def test_annotations_are_counted_on_the_cpu_and_on_gpus(tmp_path: Path) -> None:
    found = annotation_breakdown(trace_of(tmp_path, ranges()))
    columns = ("category", "device", "name", "count", "sum_ns", "max_ns", "covered_ns")
    assert found.filter(~pl.col("name").str.starts_with("Prof")).select(columns).rows() == [
        (GPU, 0, "forward", 2, 120 * US, 70 * US, 120 * US),
        ("user_annotation", None, "forward", 3, 70 * US, 30 * US, 60 * US),
    ]
    assert found.schema["name"] == found.schema["category"] == pl.String


def test_annotations_on_gpus_belong_to_the_step_of_the_range_on_the_cpu(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ranges())
    for steps, sums in (((1, 2), [70, 40]), ((2, 3), [50, 30]), ((1, 3), [120, 70])):
        found = annotation_breakdown(trace, steps=steps).filter(name="forward")
        assert found["sum_ns"].to_list() == [each * US for each in sums]


def test_annotations_of_a_trace_without_any_are_an_empty_frame(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [kernel("a", 0, 1)])
    assert annotation_breakdown(trace).is_empty()
    assert annotation_kernels(trace)["annotation"].to_list() == [None]


def test_kernels_belong_to_the_innermost_annotation_of_their_stream(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
        on_gpu("outer", 0, 100), on_gpu("inner", 10, 20), on_gpu("other stream", 0, 100, stream=8),
        on_gpu("other device", 0, 100, device=1),
        kernel("k", 0, 5), kernel("k", 10, 5), kernel("k", 29, 5), kernel("k", 30, 5),
        kernel("k", 100, 5), kernel("k", 50, 5, stream=9), kernel("k", 50, 5, stream=8),
        launch(1, 0),
    ])  # fmt: skip
    found = annotation_kernels(trace).select("device", "annotation", "count", "sum_ns")
    assert found.sort("annotation").rows() == [
        (0, None, 2, 10 * US),
        (0, "inner", 2, 10 * US),
        (0, "other stream", 1, 5 * US),
        (0, "outer", 2, 10 * US),
    ]


def test_every_gpu_event_is_in_one_annotation_row() -> None:
    trace = ranks_of("hta_nsres_v100_r0of1")[0]
    found = annotation_kernels(trace)
    assert found["count"].sum() == trace.gpu.height
    assert found["sum_ns"].sum() == trace.gpu["dur_ns"].sum()


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20)), max_size=15),
    st.lists(st.integers(-1, 55), max_size=10),
)
def test_innermost_is_the_last_begun_around_a_time(
    pairs: list[tuple[int, int]], times: list[int]
) -> None:
    pairs.sort(key=lambda pair: (pair[0], -pair[1]))
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    ends = np.array([start + length for start, length in pairs], dtype=np.int64)
    found = innermost(starts, ends, np.array(times, dtype=np.int64)).tolist()
    assert found == [
        max((place for place, (start, length) in enumerate(pairs)
             if start <= time < start + length), default=-1)
        for time in times
    ]  # fmt: skip
