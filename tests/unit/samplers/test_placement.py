from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from haiprof.agent.samplers.ranks import PlacementSampler, is_other_placement
from haiprof.agent.samplers.table import Node
from haiprof.linux.memory import draw_pages, move_pages
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import PLACEMENT
from tests.fake_topology import GPU_UUIDS, FakePages, FakeTopology, anonymous
from tests.fakes import FakeProcess, FakeTree
from tests.unit.samplers.records import Row, opened, rows

HOST = "node1"
ROOT = Path("/")


class Machine:
    """Two sockets, and rank 0 with GPU 0 as process 10."""

    def __init__(self, tmp_path: Path) -> None:
        (tmp_path / "root").mkdir()
        self.tree = FakeTree(tmp_path / "root")
        self.topology = FakeTopology(self.tree)
        self.pages = FakePages({10: [0, 0, 0, 1]})
        self.run = RunPaths(tmp_path / "run")
        self.rank = FakeProcess(pid=10, cpu=9, allowed_cpus="0-3,8", threads=20)
        self.put()
        self.topology.frequency(9, 3_400_000)
        self.report(0, 10, gpu_uuid=GPU_UUIDS["gpu0"])
        self.sampler = PlacementSampler(
            Node(run=self.run, host=HOST, root=self.tree.root), ask=self.pages
        )

    def put(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self.rank, name, value)
        self.tree.process(self.rank)
        anonymous(self.tree, 10)

    def report(self, rank: int, pid: int, *, gpu_uuid: str | None) -> None:
        folder = self.run.rank(rank)
        folder.root.mkdir(parents=True)
        content = {"pid": pid, "start_ticks": 1000, "host": HOST, "gpu_uuid": gpu_uuid}
        folder.report.write_text(json.dumps({"version": 2, "rank": rank, **content}))

    def row(self) -> Row:
        (row,) = rows(PLACEMENT, self.sampler.sample())
        return row

    def line(self) -> Mapping[str, Any] | None:
        """The placement line of one sample."""
        self.sampler.sample()
        lines = [line for line in self.sampler.drain_lines() if line["type"] == "placement"]
        assert len(lines) <= 1
        return lines[0] if lines else None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_placement_sample_says_where_a_rank_runs(machine: Machine) -> None:
    assert machine.sampler.open() == []
    row = machine.row()
    assert (row["pid"], row["start_ticks"]) == (10, 1000)
    assert (row["last_cpu"], row["cpu_node"], row["allowed_cpu_count"]) == (9, 0, 5)
    assert row["cpu_frequency_hz"] == 3_400_000_000
    assert row["sampled_page_count"] == 512
    assert row["local_page_ratio"] == pytest.approx(0.75, abs=0.08)  # 512 drawn: sigma 0.02


def test_placement_line_names_gpu_and_adapters_with_their_nodes(machine: Machine) -> None:
    line = machine.line()
    assert line is not None
    assert json.loads(json.dumps(line)) == line
    memory = line["memory_nodes"]
    assert memory.keys() == {"0", "1"}
    assert sum(memory.values()) == 512
    assert {name: value for name, value in line.items() if name != "memory_nodes"} == {
        "type": "placement",
        "pid": 10,
        "start_ticks": 1000,
        "allowed_cpus": "0-3,8",
        "thread_count": 20,
        "cpu_nodes": [0],
        "gpu_uuid": GPU_UUIDS["gpu0"],
        "gpu_bus_id": "0000:18:00.0",
        "gpu_node": 0,
        "gpu_cpus": "0-3,8-11",
        "nics": [
            {"name": "mlx5_0", "node": 0, "near_gpu": True},
            {"name": "mlx5_1", "node": 0, "near_gpu": False},
            {"name": "mlx5_2", "node": 1, "near_gpu": False},
        ],
    }


def test_placement_line_comes_again_only_when_something_changed(machine: Machine) -> None:
    assert machine.line() is not None
    assert machine.line() is None
    machine.put(cpu=2, threads=22)
    assert machine.line() is None
    machine.put(allowed_cpus="0-7")
    moved = machine.line()
    assert moved is not None
    assert moved["cpu_nodes"] == [0, 1]
    machine.put(threads=60)
    assert machine.line() is not None
    machine.pages.nodes[10] = [1, 1, 1, 0]  # its pages have been moved
    assert machine.line() is not None
    assert machine.row()["local_page_ratio"] == 1.0  # both nodes are near now
    assert machine.line() is None


def test_placement_pages_on_another_node_than_its_cpus(machine: Machine) -> None:
    machine.put(allowed_cpus="4-7", cpu=5)
    row = machine.row()
    assert row["cpu_node"] == 1
    assert row["local_page_ratio"] == pytest.approx(0.25, abs=0.08)
    assert row["cpu_frequency_hz"] is None  # no cpufreq folder of CPU 5
    (missing,) = machine.sampler.missing.drain()
    assert (missing.metric, missing.status) == ("cpu_frequency_hz", "absent")
    assert "virtual machines" in missing.reason


def test_placement_pages_of_another_user_are_null_with_a_remedy(machine: Machine) -> None:
    machine.pages.denied.add(10)
    row = machine.row()
    assert (row["sampled_page_count"], row["local_page_ratio"]) == (None, None)
    assert row["allowed_cpu_count"] == 5
    missing = machine.sampler.missing.drain()
    assert [m.metric for m in missing] == ["sampled_page_count", "local_page_ratio"]
    assert missing[0].status == "denied"
    assert missing[0].reason == "rank 0: move_pages(2): Operation not permitted"
    assert missing[0].remedy == "run haiprof as the user of the job"
    asked = len(machine.pages.asked)
    line = machine.line()
    assert line is not None
    assert line["memory_nodes"] is None
    assert len(machine.pages.asked) == asked  # asking again is no use


def test_placement_pages_behind_a_containers_filter_have_another_remedy(machine: Machine) -> None:
    machine.pages.filtered = True
    assert machine.row()["local_page_ratio"] is None
    missing = machine.sampler.missing.drain()[0]
    assert "seccomp" in missing.reason
    assert "SYS_NICE" in missing.remedy


def test_placement_unreadable_memory_map_is_null_with_the_reason(machine: Machine) -> None:
    machine.tree.remove("proc/10/maps")
    machine.tree.write("proc/10/maps/x", "")  # opening a folder fails, also for root
    assert machine.row()["local_page_ratio"] is None
    missing = machine.sampler.missing.drain()[0]
    assert missing.reason.endswith("proc/10/maps: Is a directory")


def test_placement_of_a_process_that_is_hardly_in_memory_has_no_share(machine: Machine) -> None:
    machine.pages.nodes[10] = [-1] * 999 + [0]
    row = machine.row()
    assert row["sampled_page_count"] in range(16)
    assert row["local_page_ratio"] is None
    (missing,) = machine.sampler.missing.drain()
    assert missing.reason == "rank 0: fewer than 16 of the sampled pages are in memory"
    machine.pages.nodes[10] = [-1, 1]  # one page in two
    row = machine.row()
    assert row["sampled_page_count"] == pytest.approx(256, abs=60)
    assert row["local_page_ratio"] == 0.0


def test_placement_rank_without_a_gpu_or_a_shown_one_is_null(machine: Machine) -> None:
    machine.tree.remove("proc/driver")
    line = machine.line()
    assert line is not None
    assert line["gpu_uuid"] == GPU_UUIDS["gpu0"]
    assert (line["gpu_bus_id"], line["gpu_node"], line["gpu_cpus"]) == (None, None, None)
    assert [nic["near_gpu"] for nic in line["nics"]] == [None, None, None]
    machine.topology.show_gpu("gpu0")
    later = machine.line()
    assert later is not None
    assert later["gpu_bus_id"] == "0000:18:00.0"


def test_placement_without_numa_in_the_kernel_is_null(machine: Machine) -> None:
    machine.tree.remove("sys/devices/system/node")
    row = machine.row()
    assert row["last_cpu"] == 9
    assert (row["cpu_node"], row["local_page_ratio"]) == (None, None)
    reasons = {m.metric: m.reason for m in machine.sampler.missing.drain()}
    assert "CONFIG_NUMA" in reasons["cpu_node"]


def test_placement_of_a_reused_pid_is_never_read(machine: Machine) -> None:
    assert machine.row()["pid"] == 10
    asked = len(machine.pages.asked)
    machine.put(start=5555)
    assert machine.sampler.sample() == b""
    assert len(machine.pages.asked) == asked
    machine.put(start=1000)
    assert machine.sampler.sample() == b""  # it was let go of
    assert machine.sampler.missing.drain() == []


def test_placement_rank_that_ends_during_a_sample_leaves_no_record(machine: Machine) -> None:
    machine.row()
    del machine.pages.nodes[10]
    assert machine.sampler.sample() == b""
    assert machine.sampler.missing.drain() == []


def test_placement_memory_shares_move_a_line_only_by_a_tenth() -> None:
    told: dict[str, Any] = {"thread_count": 8, "memory_nodes": {"0": 90, "1": 10}, "gpu_node": None}
    assert not is_other_placement(told, told | {"memory_nodes": {"0": 450, "1": 62}})
    assert is_other_placement(told, told | {"memory_nodes": {"0": 70, "1": 30}})
    assert is_other_placement(told, told | {"memory_nodes": None})
    assert is_other_placement(told, told | {"gpu_node": 1})


def test_pages_are_drawn_from_every_part_of_private_writable_memory() -> None:
    maps = (
        b"1000-3000 rw-p 00000000 00:00 0                          [heap]\n"
        b"5000-6000 r--p 00000000 00:00 0 \n"
        b"7000-9000 rw-p 00001000 fe:00 12 /usr/lib/libc.so.6\n"
        b"a000-b000 rw-p 00000000 00:00 0 \n"
        b"c000-d000 rw-s 00000000 00:05 9 /dev/shm/torch\n"
    )
    assert draw_pages(maps, random.Random(0)) == [0x1000, 0x2000, 0xA000]
    assert draw_pages(b"", random.Random(0)) == []
    big = b"100000-400000 rw-p 00000000 00:00 0 \n800000-900000 rw-p 00000000 00:00 0 \n"
    drawn = draw_pages(big, random.Random(0), 8)
    assert sum(0x100000 <= address < 0x400000 for address in drawn) == 6
    assert sum(0x800000 <= address < 0x900000 for address in drawn) == 2
    assert len(set(drawn)) == 8


def needs_move_pages() -> None:
    try:
        move_pages(0, ())
    except OSError as error:
        pytest.skip(f"move_pages(2): {error}")


def test_placement_live_own_process_agrees_with_psutil(tmp_path: Path) -> None:
    needs_move_pages()
    threads = [psutil.Process().num_threads()]
    sampler = opened(PlacementSampler(Node(run=RunPaths(tmp_path), host=HOST, pid=os.getpid())))
    threads.append(psutil.Process().num_threads())  # those of other tests end meanwhile
    states = {state.metric: state for state in sampler.states()}
    affinity = psutil.Process().cpu_affinity()
    assert states["allowed_cpu_count"].value == len(affinity)
    assert states["last_cpu"].value in affinity
    assert states["sampled_page_count"].value in range(100, 513)
    if not Path("/sys/devices/system/node/node1").exists():
        assert states["local_page_ratio"].value == 1.0
        assert states["cpu_node"].value == 0
    (line,) = [x for x in sampler.drain_lines() if x["type"] == "placement"]
    assert min(threads) <= line["thread_count"] <= max(threads)
    assert line["gpu_uuid"] is None
