"""How ranks are laid out, from names and members of process groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from haiprof.run_analysis.parallelism import Layout, layout_of

WORLD = frozenset(range(8))
Family = Sequence[tuple[int, ...]]
PAIRS: Family = ((0, 1), (2, 3), (4, 5), (6, 7))
FAR: Family = ((0, 2), (1, 3), (4, 6), (5, 7))
QUADS: Family = ((0, 4), (1, 5), (2, 6), (3, 7))


def layout(*families: tuple[str, Family], hosts: int = 1) -> Layout | None:
    groups = {ranks: name for name, members in families for ranks in members}
    own = {f"node{n}": {r for r in WORLD if r * hosts // 8 == n} for n in range(hosts)}
    return layout_of(groups, own, WORLD)


@pytest.mark.parametrize(("data", "tensor", "pipeline"), [
    ("mesh_dp", "mesh_tp", "mesh_pp"),
    ("DATA_PARALLEL_GROUP", "TENSOR_MODEL_PARALLEL_GROUP", "PIPELINE_MODEL_PARALLEL_GROUP"),
    ("mesh_dp_shard", "tensor", "pipe"),
    ("replicate", "tp 0", "stages of shard 3"),
])  # fmt: skip
def test_names_of_groups_tell_what_they_are_for(data: str, tensor: str, pipeline: str) -> None:
    found = layout((data, QUADS), (tensor, PAIRS), (pipeline, FAR))
    assert found is not None
    assert found.names([2, 3, 6, 7]) == "pipeline stage 1 of 0-1 (ranks 2, 3, 6 and 7)"
    assert found.names([0, 1, 2, 3]) == "data shard 0 of 0-1 (ranks 0-3)"
    assert found.names([1, 3, 5, 7]) == "tensor shard 1 of 0-1 (ranks 1, 3, 5 and 7)"
    assert found.names([6]) == "rank 6 (PP 1, TP 0, DP 1)"
    assert found.names([0, 6]) == "ranks 0 and 6"


def test_machine_that_is_a_shard_has_both_names() -> None:
    found = layout(("dp", QUADS), ("tp", PAIRS), hosts=2)
    assert found is not None
    assert found.names([4, 5, 6, 7]) == "data shard 1 of 0-1 (ranks 4-7), which is machine node1"


def test_groups_without_a_name_are_told_by_their_like() -> None:
    found = layout(("undefined", QUADS), ("undefined", PAIRS))
    assert found is not None
    assert found.names([0, 2, 4, 6]) == (
        "place 0 of 0-1 in groups like ranks 0 and 1 (ranks 0, 2, 4 and 6)"
    )


@pytest.mark.parametrize(
    "families",
    [[], [("dp", [(0, 1)])], [("dp", PAIRS[:3])], [("dp", [*PAIRS, (0, 2)])], [("", [(0, 1, 2)])]],
)
def test_groups_that_do_not_divide_the_world_are_no_dimension(
    families: list[tuple[str, Family]],
) -> None:
    assert layout(*families) is None


def test_two_dimensions_of_one_kind_are_two() -> None:
    found = layout(("mesh_dp_replicate", QUADS), ("mesh_dp_shard", PAIRS))
    assert found is not None
    assert found.names([3]) == "rank 3 (DP 0, DP 1)"


def test_parts_of_a_dimension_divide_the_world() -> None:
    found = layout(("dp", QUADS), ("tp", PAIRS), ("pp", FAR), ("ep", QUADS), hosts=4)
    assert found is not None
    for parts in found.dimensions:
        assert frozenset().union(*(part.ranks for part in parts)) == WORLD
        assert not any(a.ranks & b.ranks for a, b in itertools.combinations(parts, 2))
