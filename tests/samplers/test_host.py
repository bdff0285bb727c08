from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from haiprof.rundir.tables.host import HOST
from haiprof.samplers.host import HostSampler
from haiprof.samplers.procfs import TICK_NS
from tests.fakes import FakeTree
from tests.samplers.records import Row, rows


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


def one(sampler: HostSampler) -> Row:
    (row,) = rows(HOST, sampler.sample())
    return row


def test_host_sample_has_every_column_in_base_units(tree: FakeTree) -> None:
    clock = iter(range(1000, 2000, 10))
    sampler = HostSampler(root=tree.root, clock=lambda: next(clock))
    assert sampler.open() == []
    row = one(sampler)
    sampler.close()
    assert row == {
        "time_ns": 1020,
        "read_ns": 10,
        "cpu_user_ns": 110 * TICK_NS,
        "cpu_system_ns": 55 * TICK_NS,
        "cpu_idle_ns": 0,
        "cpu_iowait_ns": 0,
        "cpu_steal_ns": TICK_NS,
        "cpu_count": 4,
        "memory_total_bytes": 16384000 * 1024,
        "memory_available_bytes": 8192000 * 1024,
        "disk_read_bytes": 2100 * 512,
        "disk_write_bytes": 4200 * 512,
        "network_receive_bytes": 123456789012 + 1000,
        "network_transmit_bytes": 2030,
        "pressure_cpu_some_ns": 7000,
        "pressure_memory_some_ns": 8000,
        "pressure_io_some_ns": 9000,
    }


def test_host_kept_files_show_new_values(tree: FakeTree) -> None:
    sampler = HostSampler(root=tree.root)
    sampler.open()
    tree.cpu(user=200)
    assert one(sampler)["cpu_user_ns"] == 210 * TICK_NS
    sampler.close()


def test_host_idle_that_steps_back_is_held(tree: FakeTree) -> None:
    sampler = HostSampler(root=tree.root)
    seen = []
    for idle, iowait in ((100, 50), (99, 48), (101, 51)):
        tree.cpu(idle=idle, iowait=iowait)
        row = one(sampler)
        seen.append((row["cpu_idle_ns"], row["cpu_iowait_ns"]))
    sampler.close()
    assert seen == [(t * TICK_NS, w * TICK_NS) for t, w in ((100, 50), (100, 50), (101, 51))]


def test_host_without_pressure_is_null_with_the_reason_once(tree: FakeTree) -> None:
    tree.remove("proc/pressure")
    sampler = HostSampler(root=tree.root)
    missing = sampler.open()
    assert [m.metric for m in missing] == [c.name for c in HOST.columns[-3:]]
    assert all("No such file" in m.reason and "CONFIG_PSI" in m.reason for m in missing)
    row = one(sampler)
    assert row["pressure_io_some_ns"] is None
    assert row["cpu_user_ns"] is not None
    assert sampler.drain_missing() == []
    sampler.close()


def test_host_source_that_vanishes_and_returns_leaves_a_gap(tree: FakeTree) -> None:
    sampler = HostSampler(root=tree.root)
    assert sampler.open() == []
    sampler.close()  # as after an error on the kept file
    tree.remove("proc/meminfo")
    assert one(sampler)["memory_total_bytes"] is None
    assert [m.metric for m in sampler.drain_missing()] == [
        "memory_total_bytes",
        "memory_available_bytes",
    ]
    tree.write("proc/meminfo", "MemTotal: 10 kB\nMemAvailable: 5 kB\n")
    assert one(sampler)["memory_total_bytes"] == 10240
    sampler.close()


@pytest.mark.parametrize("content", ["", "nonsense", "cpu 1 2\n", "cpu a b c d e f g h\n"])
def test_host_damaged_source_is_null_and_the_others_go_on(tree: FakeTree, content: str) -> None:
    for path in ("stat", "meminfo", "diskstats", "net/dev", "pressure/cpu"):
        tree.write(f"proc/{path}", content)
    sampler = HostSampler(root=tree.root)
    metrics = {m.metric for m in sampler.open()}
    row = one(sampler)
    sampler.close()
    assert {"cpu_user_ns", "cpu_count", "memory_total_bytes", "pressure_cpu_some_ns"} <= metrics
    assert {name for name, value in row.items() if value is None} == metrics
    assert row["pressure_io_some_ns"] == 9000


def test_host_old_kernel_lacks_available_memory_alone(tree: FakeTree) -> None:
    tree.write("proc/meminfo", "MemTotal: 10 kB\nMemFree: 5 kB\n")
    sampler = HostSampler(root=tree.root)
    (missing,) = sampler.open()
    assert missing.metric == "memory_available_bytes"
    assert one(sampler)["memory_total_bytes"] == 10240
    sampler.close()


def test_host_with_no_disk_or_network_says_so_instead_of_zero(tree: FakeTree) -> None:
    tree.write("proc/diskstats", "   7       0 loop0 11 0 900 0 0 0 0 0 0 0 0\n")
    tree.write("proc/net/dev", "Inter-|\n face |\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n")
    sampler = HostSampler(root=tree.root)
    reasons = {m.metric: m.reason for m in sampler.open()}
    row = one(sampler)
    sampler.close()
    assert row["disk_read_bytes"] is None
    assert row["network_receive_bytes"] is None
    assert "no whole disk" in reasons["disk_read_bytes"]
    assert "beyond lo" in reasons["network_transmit_bytes"]


def test_host_without_sys_tells_disks_by_name(tree: FakeTree) -> None:
    tree.remove("sys/block")
    sampler = HostSampler(root=tree.root)
    assert one(sampler)["disk_read_bytes"] == 2100 * 512
    sampler.close()


def test_host_bridge_ports_of_containers_are_not_counted_twice(tree: FakeTree) -> None:
    line = " {}: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
    text = "Inter-|\n face |\n" + "".join(map(line.format, ("eth0", "br0", "veth1")))
    tree.write("proc/net/dev", text)
    for name in ("eth0/brport", "br0/lower_eth0", "br0/lower_veth1", "veth1/brport"):
        (tree.root / "sys/class/net" / name).mkdir(parents=True)
    sampler = HostSampler(root=tree.root)
    assert one(sampler)["network_receive_bytes"] == 100
    sampler.close()


def test_host_on_this_machine_agrees_with_psutil() -> None:
    sampler = HostSampler()
    sampler.open()
    before = psutil.cpu_times()
    row = one(sampler)
    after, memory, nics = psutil.cpu_times(), psutil.virtual_memory(), psutil.net_io_counters(True)
    sampler.close()
    assert before.user + before.nice - 0.02 <= seconds(row["cpu_user_ns"])
    assert seconds(row["cpu_user_ns"]) <= after.user + after.nice + 0.02
    assert seconds(row["cpu_idle_ns"]) == pytest.approx(after.idle, abs=0.5)
    assert row["memory_total_bytes"] == memory.total
    assert row["memory_available_bytes"] == pytest.approx(memory.available, rel=0.1)
    assert row["cpu_count"] == psutil.cpu_count()
    received = sum(nic.bytes_recv for name, nic in nics.items() if name != "lo")
    assert (row["network_receive_bytes"] or 0) <= received


def test_host_on_this_machine_sees_a_file_written_through(tmp_path: Path) -> None:
    sampler = HostSampler()
    sampler.open()
    before = one(sampler)["disk_write_bytes"]
    if before is None:
        pytest.skip("no whole disk is visible here")
    with open(tmp_path / "written", "wb") as file:
        file.write(os.urandom(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = one(sampler)["disk_write_bytes"]
    sampler.close()
    assert after is not None
    if after == before:
        pytest.skip("the temporary folder is not on a local disk")
    assert after - before >= 8 << 20


def seconds(ns: float | None) -> float:
    assert ns is not None
    return ns / 1e9
