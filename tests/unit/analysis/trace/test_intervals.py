from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.intervals import (
    Intervals,
    covered_lengths,
    difference,
    intersection,
    total,
    union,
)

PAIRS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12)


def union_of(pairs: list[tuple[int, int]]) -> Intervals:
    starts = np.array([start for start, _ in pairs], dtype=np.int64)
    return union(starts, np.array([end for _, end in pairs], dtype=np.int64))


def cells(pairs: list[tuple[int, int]]) -> set[int]:
    """The oracle: every unit of time on its own."""
    return {cell for start, end in pairs for cell in range(start, end)}


def cells_of(found: Intervals) -> set[int]:
    return cells(list(zip(found.starts.tolist(), found.ends.tolist(), strict=True)))


@given(PAIRS)
def test_union_covers_the_same_and_is_disjoint(pairs: list[tuple[int, int]]) -> None:
    found = union_of(pairs)
    assert cells_of(found) == cells(pairs)
    assert total(found) == len(cells(pairs))
    assert (found.starts[1:] > found.ends[:-1]).all()


@given(PAIRS, PAIRS)
def test_intersection_and_difference_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    ours, theirs = union_of(left), union_of(right)
    both, only = intersection(ours, theirs), difference(ours, theirs)
    assert cells_of(both) == cells(left) & cells(right)
    assert cells_of(only) == cells(left) - cells(right)
    assert (both.ends > both.starts).all()
    assert (only.ends > only.starts).all()


@given(PAIRS, PAIRS)
def test_covered_counts_the_units_inside_each_interval(
    pairs: list[tuple[int, int]], asked: list[tuple[int, int]]
) -> None:
    starts = np.array([start for start, _ in asked], dtype=np.int64)
    ends = np.array([end for _, end in asked], dtype=np.int64)
    found = covered_lengths(union_of(pairs), starts, ends).tolist()
    assert found == [len(cells(pairs) & set(range(start, end))) for start, end in asked]
