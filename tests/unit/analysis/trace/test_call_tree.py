from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.trace_analysis.call_tree import call_tree, innermost, nest, own_ns, roots
from haiprof.trace_format.find import trace_files
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.unit.analysis.trace.shared import event, trace_of, traces

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
def test_innermost_is_the_last_begun_span_around_a_call(
    spans: list[Span], calls: list[Span]
) -> None:
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
    trace = trace_of(
        tmp_path,
        [
            event("aten::linear", "cpu_op", 0, 10.5),
            event("aten::addmm", "cpu_op", 2, 5),
            event("aten::relu", "cpu_op", 11, 1),
            event("aten::other", "cpu_op", 3, 1, tid=2),
        ],
    )
    found = call_tree(trace)
    assert found.schema["name"] == pl.String
    assert found.select("name", "self_ns", "parent_event", "depth").rows() == [
        ("aten::linear", 5500, None, 0),
        ("aten::addmm", 5000, 0, 1),
        ("aten::relu", 1000, None, 0),
        ("aten::other", 1000, None, 0),
    ]


def test_a_trace_without_python_functions_has_an_empty_tree(tmp_path: Path) -> None:
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
