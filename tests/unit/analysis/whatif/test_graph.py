"""The simulator against a brute-force oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_analysis.what_if.predict import Graph, plan_graph, times


def graph_of(edges: list[tuple[int, int]], points: int) -> Graph:
    pairs = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return Graph(point_count=points, sources=pairs[:, 0], targets=pairs[:, 1])


@st.composite
def random_graphs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]], list[int]]:
    points = draw(st.integers(1, 12))
    pairs = st.tuples(st.integers(0, points - 1), st.integers(0, points - 1), st.integers(0, 50))
    edges = [(min(a, b), max(a, b), w) for a, b, w in draw(st.lists(pairs)) if a != b]
    names = draw(st.permutations(range(points)))  # so that numbers say nothing about the order
    delays = draw(st.lists(st.integers(0, 9), min_size=points, max_size=points))
    return points, [(names[a], names[b], w) for a, b, w in edges], delays


@given(random_graphs())
def test_times_are_the_longest_paths(
    case: tuple[int, list[tuple[int, int, int]], list[int]],
) -> None:
    points, edges, delays = case

    def oracle(point: int) -> int:
        before = [oracle(a) + w for a, b, w in edges if b == point]
        return max(before) + delays[point] if before else 0

    plan = plan_graph(graph_of([(a, b) for a, b, _ in edges], points))
    lengths = np.array([w for *_, w in edges], dtype=np.int64).reshape(-1, 1)
    found = times(plan, lengths, np.array(delays).reshape(-1, 1))
    assert found[:, 0].tolist() == [oracle(point) for point in range(points)]


def test_columns_are_independent_cases() -> None:
    plan = plan_graph(graph_of([(0, 1), (1, 2)], 3))
    found = times(plan, np.array([[1, 10], [2, 20]]))
    assert found[2].tolist() == [3, 30]


def test_circle_is_an_error() -> None:
    with pytest.raises(TraceFormatError, match="wait for each other"):
        plan_graph(graph_of([(0, 1), (1, 2), (2, 1)], 3))
