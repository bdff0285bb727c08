"""Operators in each other: their tree, sequences of kernels, annotations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.trace_analysis.attribution import kernel_sequences, operator_sequences
from haiprof.trace_analysis.call_tree import call_tree, innermost, nest, own_ns, roots
from haiprof.trace_analysis.step_time import annotation_breakdown, annotation_kernels
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    launch,
    ranks_of,
    step,
    trace_of,
    traces,
)

SPANS = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 30), st.integers(0, 12)), max_size=25)
Span = tuple[int, int, int]


def frame(spans: list[Span]) -> pl.DataFrame:
    schema = {"tid": pl.Int64, "ts_ns": pl.Int64, "dur_ns": pl.Int64}
    return pl.DataFrame(spans, schema=schema, orient="row").with_columns(pid=pl.lit(1, pl.Int64))


def rows_of(spans: pl.DataFrame) -> list[Span]:
    return spans.select("tid", "ts_ns", "dur_ns").rows()


def end_of(span: Span) -> int:
    return span[1] + max(span[2], 1)


def holder(rows: list[Span], at: int) -> int:
    """The oracle: the last earlier span of the thread that ends no earlier."""
    for other in reversed(range(at)):
        if rows[other][0] == rows[at][0] and end_of(rows[other]) >= end_of(rows[at]):
            return other
    return -1


@given(SPANS)
def test_parent_depth_and_root_equal_brute_force(spans: list[Span]) -> None:
    tree = nest(frame(spans))
    rows = rows_of(tree.spans)
    parent = [holder(rows, at) for at in range(len(rows))]
    assert tree.parent.tolist() == parent
    chains = []
    for at in range(len(rows)):
        chain = [at]
        while parent[chain[-1]] >= 0:
            chain.append(parent[chain[-1]])
        chains.append(chain)
    assert tree.depth.tolist() == [len(chain) - 1 for chain in chains]
    assert roots(tree.parent).tolist() == [chain[-1] for chain in chains]


@given(SPANS)
def test_own_time_is_what_no_direct_child_covers(spans: list[Span]) -> None:
    tree = nest(frame(spans))
    rows = rows_of(tree.spans)
    for at, own in enumerate(own_ns(tree).tolist()):
        cells = set(range(rows[at][1], rows[at][1] + rows[at][2]))
        for child in np.flatnonzero(tree.parent == at).tolist():
            cells -= set(range(rows[child][1], rows[child][1] + rows[child][2]))
        assert own == len(cells)


@given(SPANS, SPANS)
def test_innermost_is_last_begun_span_around_a_call(spans: list[Span], calls: list[Span]) -> None:
    tree = nest(frame(spans))
    rows = rows_of(tree.spans)
    for call, found in zip(calls, innermost(tree, frame(calls)).tolist(), strict=True):
        around = [
            at
            for at, row in enumerate(rows)
            if row[0] == call[0] and row[1] <= call[1] and end_of(row) >= end_of(call)
        ]
        assert found == max(around, default=-1)


def test_deep_recursion_takes_few_passes() -> None:
    depth = 20_000
    spans = [(1, at, 2 * (depth - at)) for at in range(depth)]
    assert nest(frame(spans)).depth.tolist() == list(range(depth))


def test_operators_name_their_caller_and_keep_their_own_time(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
            event("aten::linear", "cpu_op", 0, 10.5),
            event("aten::addmm", "cpu_op", 2, 5),
            event("aten::relu", "cpu_op", 11, 1),
            event("aten::other", "cpu_op", 3, 1, tid=2),
    ])  # fmt: skip
    found = call_tree(trace)
    assert found.schema["name"] == pl.String
    assert found.select("name", "self_ns", "parent_event", "depth").rows() == [
        ("aten::linear", 5500, None, 0),
        ("aten::addmm", 5000, 0, 1),
        ("aten::relu", 1000, None, 0),
        ("aten::other", 1000, None, 0),
    ]
    trace = trace_of(tmp_path, [event("aten::relu", "cpu_op", 0, 1)])
    assert call_tree(trace, table="python").is_empty()
    with pytest.raises(ValueError, match="no call tree of 'gpu'"):
        call_tree(trace, table="gpu")


@pytest.mark.parametrize("name", ["tl_b200_r0of8_nccl", "tl_h100_qwen05_mem_stack"])
def test_python_parents_are_those_that_the_profiler_recorded(name: str) -> None:
    trace = Trace(trace_files(traces(name))[0])
    found = call_tree(trace, table="python").join(
        trace.python.select("event", "python_id", "parent_id"), on="event"
    )
    ids = found.select(parent_event="event", said="python_id")
    joined = found.join(ids, on="parent_event", how="left", maintain_order="left")
    nested = joined.filter(pl.col("depth") > 0)
    assert len(nested) > 4000
    assert (nested["said"] == nested["parent_id"]).all()


def block(at: float, first: int, kernels: str, name: str = "aten::block") -> list[Event]:
    """A call of 50 us that launches kernels, the inner ones through an operator of their own."""
    found = [event(name, "cpu_op", at, 50), event("aten::block_inner", "cpu_op", at + 2, 40)]
    for number, letter in enumerate(kernels):
        found += [
            launch(first + number, at + 3 + number, 0.5),
            kernel(letter, at + 100 + number * 2, 1, correlation=first + number),
        ]
    return found


def test_sequences_are_counted_whole(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [
            *block(0, 1, "abc"),
            *block(1000, 11, "abc"),
            *block(2000, 21, "abcd"),
            *block(3000, 31, "ab"),
            event("aten::outer", "cpu_op", 4000, 90),
            *block(4010, 41, "xyz"),
    ])  # fmt: skip
    found = kernel_sequences(trace, operator="aten::block")
    assert found.rows() == [
        ("aten::block|a|b|c", 2, 3, 6000, 100_000),
        ("aten::block|a|b|c|d", 1, 4, 4000, 50_000),
        ("aten::block|x|y|z", 1, 3, 3000, 50_000),
    ]
    assert len(kernel_sequences(trace, operator="aten::block", top_k=1)) == 1
    short = kernel_sequences(trace, operator="aten::block", min_pattern_length=2)
    assert short.filter(pl.col("kernel_count") == 2)["count"].to_list() == [1]
    assert kernel_sequences(trace, operator="no such").is_empty()


def test_a_range_of_the_user_counts_as_an_operator(tmp_path: Path) -> None:
    events = [event("Optimizer.step#SGD.step", "user_annotation", 0, 60), *block(1, 1, "abc")]
    found = kernel_sequences(trace_of(tmp_path, events), operator="Optimizer.step")
    assert found["pattern"].to_list() == ["Optimizer.step#SGD.step|a|b|c"]


def test_operators_say_what_they_launch_and_when(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [*block(0, 1, "ab"), *block(1000, 11, "ab"), *block(2000, 21, "a")])
    assert operator_sequences(trace).rows() == [
        ("aten::block_inner", "a -> b", 2, 1000.0, 97_000.0),
        ("aten::block_inner", "a", 1, 1000.0, 97_000.0),
    ]


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
