from __future__ import annotations

import re
from pathlib import Path

import pytest

from haiprof.agent.samplers.host import NumaSampler
from haiprof.agent.samplers.table import Node
from haiprof.run_format.tables import NUMA
from tests.fakes import FakeTree
from tests.unit.samplers.records import Row, opened, rows


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


def node(tree: FakeTree, number: int, *, hit: int = 1000, free_kib: int = 2048) -> None:
    folder = f"sys/devices/system/node/node{number}"
    memory = f"Node {number} MemTotal:  4096 kB\nNode {number} MemFree:  {free_kib} kB\n"
    tree.write(f"{folder}/meminfo", "\n" + memory + f"Node {number} MemUsed:  1 kB\n")
    names = ("miss", "foreign", "interleave_hit")
    lines = [f"numa_hit {hit}", *(f"numa_{name} {number + 1}" for name in names[:2])]
    lines += ["interleave_hit 9", f"local_node {hit - 10}", "other_node 10"]
    tree.write(f"{folder}/numastat", "\n".join(lines) + "\n")


def sampled(sampler: NumaSampler) -> list[Row]:
    return rows(NUMA, sampler.sample())


def test_numa_sample_has_one_record_per_node_in_base_units(tree: FakeTree) -> None:
    node(tree, 0)
    node(tree, 1, hit=77)
    node(tree, 10)
    tree.write("sys/devices/system/node/online", "0-1,10\n")
    clock = iter(range(0, 1000, 10))
    sampler = NumaSampler(Node(root=tree.root, clock=lambda: next(clock)))
    assert sampler.open() == []
    first, second, third = sampled(sampler)
    assert sampler.header()["entities"] == [
        {"key": [0], "name": "node 0"},
        {"key": [1], "name": "node 1"},
        {"key": [10], "name": "node 10"},
    ]
    assert first == {
        "time_ns": 60, "read_ns": 10, "node": 0, "memory_total_bytes": 4096 * 1024,
        "memory_free_bytes": 2048 * 1024, "hit_page_count": 1000, "miss_page_count": 1,
        "foreign_page_count": 1, "local_page_count": 990, "other_page_count": 10,
    }  # fmt: skip
    assert (second["node"], second["hit_page_count"], third["node"]) == (1, 77, 10)


def test_numa_counters_advance_and_a_damaged_file_is_null(tree: FakeTree) -> None:
    node(tree, 0)
    node(tree, 1)
    sampler = opened(NumaSampler(Node(root=tree.root)))
    node(tree, 0, hit=5000, free_kib=1)
    tree.write("sys/devices/system/node/node1/numastat", "numa_hit many\n")
    first, second = sampled(sampler)
    sampler.close()
    assert (first["hit_page_count"], first["memory_free_bytes"]) == (5000, 1024)
    assert second["hit_page_count"] is None
    assert second["memory_free_bytes"] == 2048 * 1024
    assert {each.status for each in sampler.missing.drain()} == {"unsupported"}


def test_numa_kernel_without_some_counter_lacks_that_alone(tree: FakeTree) -> None:
    node(tree, 0)
    tree.write("sys/devices/system/node/node0/numastat", "numa_hit 5\nlocal_node 5\n")
    sampler = NumaSampler(Node(root=tree.root))
    missing = {each.metric for each in sampler.open()}
    (row,) = sampled(sampler)
    assert missing == {"miss_page_count", "foreign_page_count", "other_page_count"}
    assert row["hit_page_count"] == 5
    assert row["miss_page_count"] is None


def test_numa_machine_without_nodes_says_so(tree: FakeTree) -> None:
    (missing,) = NumaSampler(Node(root=tree.root)).open()
    assert (missing.metric, missing.status) == ("all", "absent")
    assert "CONFIG_NUMA" in missing.reason


def test_numa_on_this_machine_agrees_with_the_files() -> None:
    folder = Path("/sys/devices/system/node/node0")
    if not folder.is_dir():
        pytest.skip("this kernel shows no NUMA nodes")
    sampler = NumaSampler(Node())
    assert sampler.open() == []
    before = hits(folder)
    row = sampled(sampler)[0]
    after = hits(folder)
    total = re.search(r"MemTotal:\s+(\d+) kB", (folder / "meminfo").read_text())
    assert total is not None
    assert row["memory_total_bytes"] == int(total[1]) * 1024
    assert before <= (row["hit_page_count"] or 0) <= after


def hits(folder: Path) -> int:
    return int((folder / "numastat").read_text().split()[1])
