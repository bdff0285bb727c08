"""Placement and settings as they are read: what was recorded, and lines that hold anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as effort
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.run_analysis.ranks import compile_intervals
from haiprof.run_analysis.run_files import open_run
from haiprof.run_analysis.settings import (
    Placement,
    cpu_list,
    differences,
    placements,
    read_settings,
    sharing_groups,
)
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.setting_lines import SEEN_FIELDS, SETTINGS_FIELDS
from tests.sampling import examples
from tests.unit.analysis.recorded import spans_of, write_rank, write_run

LINE: dict[str, Any] = {
    "type": "placement", "pid": 100, "start_ticks": 7, "allowed_cpus": "0-3,8", "thread_count": 12,
    "cpu_nodes": [0], "memory_nodes": {"0": 90, "1": 10}, "gpu_uuid": "GPU-1",
    "gpu_bus_id": "0000:1b:00.0", "gpu_node": 1, "gpu_cpus": "4-7",
    "nics": [{"name": "mlx5_0", "node": 0, "near_gpu": False}, {"name": "mlx5_1", "node": None}],
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return write_run(tmp_path / "run")


def write_lines(run: RunPaths, *lines: object, host: str = "node0") -> None:
    node = run.node(host)
    node.root.mkdir(parents=True, exist_ok=True)
    with node.events.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def placed(run: RunPaths) -> dict[int, Placement]:
    return placements(open_run(run.root))


def test_last_line_of_a_rank_counts(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"))
    write_lines(run, LINE | {"allowed_cpus": "0-63"}, LINE)
    (placement,) = placed(run).values()
    assert placement.allowed_cpus == frozenset((0, 1, 2, 3, 8))
    assert (placement.rank, placement.host) == (0, "node0")
    assert (placement.cpu_nodes, placement.gpu_node) == ((0,), 1)
    assert placement.memory_pages == {0: 90, 1: 10}
    assert placement.adapters == (("mlx5_0", 0),)
    assert placement.nodes == {0, 1}
    assert placement.pages_off([0]) == pytest.approx(0.1)
    assert placement.pages_off([1]) == pytest.approx(0.9)


def test_lines_of_other_processes_and_earlier_attempts_do_not_count(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"))
    write_rank(run, spans_of("D F B O"), attempt=1, pid=200)
    write_lines(run, LINE, LINE | {"pid": 200, "start_ticks": 8})
    assert placed(run) == {}
    write_lines(run, LINE | {"pid": 200, "allowed_cpus": "5"})
    assert placed(run)[0].allowed_cpus == frozenset((5,))


def test_ranks_are_told_apart_by_host(run: RunPaths) -> None:
    for rank in (0, 1):
        write_rank(run, spans_of("D F B O"), rank=rank, pid=100, host=f"node{rank}")
        write_lines(run, LINE | {"gpu_node": rank}, host=f"node{rank}")
    assert {rank: p.gpu_node for rank, p in placed(run).items()} == {0: 0, 1: 1}


def test_damaged_values_are_unknown_not_zero(run: RunPaths) -> None:
    write_rank(run, spans_of("D F B O"))
    damaged: dict[str, Any] = {
        "allowed_cpus": 3, "thread_count": "x", "cpu_nodes": "0", "memory_nodes": [1],
        "gpu_node": -1, "nics": {"name": "mlx5_0"},
    }  # fmt: skip
    write_lines(run, LINE | damaged)
    (placement,) = placed(run).values()
    assert placement.allowed_cpus is None
    assert placement.thread_count is None
    assert (placement.cpu_nodes, placement.gpu_node, placement.adapters) == ((), None, ())
    assert placement.nodes == frozenset()
    assert placement.pages_off([0]) is None


@pytest.mark.parametrize(("text", "cpus"), [
    ("0", {0}),
    ("0-2,5\n", {0, 1, 2, 5}),
    ("", None),
    ("3-1", None),
    ("a", None),
    ("0-99999", None),
    ("-1", None),
    (None, None),
])  # fmt: skip
def test_cpu_list_is_read_or_unknown(text: str | None, cpus: set[int] | None) -> None:
    assert cpu_list(text) == cpus


def on(rank: int, cpus: set[int] | None, host: str = "node0") -> Placement:
    return Placement(
        rank=rank, host=host, allowed_cpus=None if cpus is None else frozenset(cpus), cpu_nodes=(),
        memory_pages={}, thread_count=None, gpu_node=None, adapters=(),
    )  # fmt: skip


def test_ranks_with_overlapping_cores_are_one_group() -> None:
    ranks = [on(0, {0, 1}), on(1, {4, 5}), on(2, {1, 4}), on(3, {9}), on(4, {0}, "node1")]
    groups = [[p.rank for p in group] for group in sharing_groups([*ranks, on(5, None)])]
    assert groups == [[0, 1, 2], [3], [4]]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


def analyzer(root: Path, *ranks: list[dict[str, Any]]) -> Analyzer:
    run = write_run(root)
    for rank, lines in enumerate(ranks):
        write_rank(run, spans_of("D F B O"), rank=rank, lines=lines)
    return Analyzer(root)


@pytest.mark.sampled
@effort(max_examples=examples(60), suppress_health_check=list(HealthCheck), deadline=None)
@given(
    line=st.dictionaries(st.sampled_from(sorted(SETTINGS_FIELDS)), anything),
    seen=st.dictionaries(st.sampled_from(sorted(SEEN_FIELDS)), anything),
    spans=anything,
)
def test_lines_that_hold_anything_are_read(
    tmp_path_factory: pytest.TempPathFactory, line: Any, seen: Any, spans: Any
) -> None:
    lines = [
        {**line, "type": "settings"},
        {**seen, "type": "settings_seen"},
        {"type": "compile", "time_ns": 5, "count": 1, "spent_ns": 1, "spans": spans},
    ]
    found = analyzer(tmp_path_factory.mktemp("run") / "run", lines)
    settings = read_settings(found.files)[0]
    assert settings.as_json()["rank"] == 0
    assert 0.0 <= settings.on_ratio("anomaly") <= 1.0
    assert differences({0: settings, 1: settings}) == []
    compile_intervals(found.files.ranks[0])


def test_rank_without_the_line_is_left_out(tmp_path: Path) -> None:
    found = analyzer(tmp_path / "run", [{"type": "settings", "cores": 2}], [])
    assert found.settings().keys() == {0}


@pytest.mark.parametrize(
    ("values", "odd"), [((2, 2, 2), {}), ((2, 2, 4), {2: 4}), ((2, 2, 4, 4), {}), ((2, 4), {0: 2})]
)
def test_few_ranks_with_another_value_differ(
    tmp_path: Path, values: tuple[int, ...], odd: dict[int, int]
) -> None:
    lines = [[{"type": "settings", "cpu_limit_cores": value}] for value in values]
    found = differences(analyzer(tmp_path / "run", *lines).settings())
    assert [dict(difference.others) for difference in found] == ([odd] if odd else [])


def test_switch_that_could_not_be_read_differs_from_nothing(tmp_path: Path) -> None:
    """As that of a rank which had ended its process group."""
    lines = [
        [{"type": "settings", "flags": {"distributed_debug": level}}]
        for level in ("OFF", None, "OFF", "DETAIL")
    ]
    (found,) = differences(analyzer(tmp_path / "run", *lines).settings())
    assert (found.usual, dict(found.others)) == ("OFF", {3: "DETAIL"})


def test_compilations_count_once_where_they_overlap(tmp_path: Path) -> None:
    line = {"type": "compile", "spans": [[1_000, 500], [1_200, 100], [3_000, 100], ["x", 1], 7]}
    row = analyzer(tmp_path / "run", [line]).ranks().row(0, named=True)
    assert (row["compile_ns"], row["eval_compile_ns"]) == (600_000, 0)
