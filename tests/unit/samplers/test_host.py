from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import psutil
import pytest

from haiprof.agent.samplers.host import HostSampler
from haiprof.agent.samplers.table import Node
from haiprof.linux.procfs import PAGE_BYTES, TICK_NS
from haiprof.run_format.tables import HOST
from tests.fakes import FakeTree, fail_reads_of_removed_files
from tests.unit.samplers.records import Row, opened, rows


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    return FakeTree(tmp_path)


def one(sampler: HostSampler) -> Row:
    (row,) = rows(HOST, sampler.sample())
    return row


def test_host_sample_has_every_column_in_base_units(tree: FakeTree) -> None:
    clock = iter(range(1000, 2000, 10))
    sampler = HostSampler(Node(root=tree.root, clock=lambda: next(clock)))
    assert sampler.open() == []
    row = one(sampler)
    assert row == {
        "time_ns": 1020, "read_ns": 10, "cpu_user_ns": 100 * TICK_NS, "cpu_nice_ns": 10 * TICK_NS,
        "cpu_system_ns": 50 * TICK_NS, "cpu_idle_ns": 0, "cpu_iowait_ns": 0,
        "cpu_irq_ns": 3 * TICK_NS, "cpu_softirq_ns": 2 * TICK_NS, "cpu_steal_ns": TICK_NS,
        "cpu_count": 4, "context_switch_count": 5, "task_running_count": 4, "task_blocked_count": 2,
        "memory_total_bytes": 16384000 * 1024, "memory_available_bytes": 8192000 * 1024,
        "memory_free_bytes": 1024000 * 1024, "memory_cached_bytes": 4096000 * 1024,
        "memory_shared_bytes": 300000 * 1024, "memory_dirty_bytes": 512 * 1024,
        "memory_huge_bytes": 4096 * 1024, "swap_total_bytes": 2048000 * 1024,
        "swap_used_bytes": 48000 * 1024, "huge_page_total_bytes": 16 << 20,
        "huge_page_free_bytes": 12 << 20, "page_fault_count": 1000, "major_page_fault_count": 20,
        "oom_kill_count": 1, "compaction_stall_count": 2, "numa_hint_fault_count": 7,
        "numa_page_migration_count": 5, "swap_in_bytes": 3 * PAGE_BYTES,
        "swap_out_bytes": 4 * PAGE_BYTES, "disk_read_bytes": 2100 * 512,
        "disk_write_bytes": 4200 * 512, "disk_read_count": 550, "disk_write_count": 770,
        "disk_busy_ns": 550_000_000, "disk_count": 2, "network_receive_bytes": 123456789012 + 1000,
        "network_transmit_bytes": 2030, "network_receive_packet_count": 11,
        "network_transmit_packet_count": 11, "network_receive_error_count": 0,
        "network_transmit_error_count": 0, "network_receive_drop_count": 0,
        "network_transmit_drop_count": 0, "tcp_transmit_segment_count": 5000,
        "tcp_retransmit_segment_count": 135, "tcp_timeout_count": 3, "tcp_listen_drop_count": 2,
        "pressure_cpu_some_ns": 7000, "pressure_memory_some_ns": 8000,
        "pressure_memory_full_ns": 3000, "pressure_io_some_ns": 9000, "pressure_io_full_ns": 3000,
        "cpu_energy_joules": 2.0, "memory_energy_joules": 2.0,
    }  # fmt: skip


def test_energy_goes_on_where_a_package_begins_to_count_anew(tree: FakeTree) -> None:
    sampler = opened(HostSampler(Node(root=tree.root)))
    found = []
    for first, second, memory in ((9, 1, 1), (9, 4, 2), (2, 4, 3)):
        tree.energy("intel-rapl:0", "package-0", first * 1_000_000)
        tree.energy("intel-rapl-mmio:0", "package-0", first * 1_000_000)
        tree.energy("intel-rapl:1", "package-1", second * 1_000_000)
        tree.energy("intel-rapl:0:2", "dram", memory * 1_000_000)
        row = one(sampler)
        found.append((row["cpu_energy_joules"], row["memory_energy_joules"]))
    assert found == [(10.0, 2.0), (13.0, 3.0), (16.0, 4.0)]


def test_energy_that_only_root_may_read_is_missing_with_what_helps(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_text

    def denied(path: Path, *args: object, **words: object) -> str:
        if path.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "read_text", denied)
    missing = HostSampler(Node(root=tree.root)).open()
    assert {(m.metric, m.status) for m in missing} == {
        ("cpu_energy_joules", "denied"), ("memory_energy_joules", "denied"),
    }  # fmt: skip
    assert all("chmod a+r" in str(m.remedy) for m in missing)


def test_machine_without_rapl_or_without_its_memory_says_so(tree: FakeTree) -> None:
    for zone in ("intel-rapl:0:2", "intel-rapl:1:2"):
        tree.remove(f"sys/class/powercap/{zone}")
    sampler = HostSampler(Node(root=tree.root))
    assert [m.metric for m in sampler.open()] == ["memory_energy_joules"]
    assert one(sampler)["cpu_energy_joules"] == 2.0
    tree.remove("sys/class/powercap")
    missing = HostSampler(Node(root=tree.root)).open()
    assert {(m.metric, m.status) for m in missing} == {
        ("cpu_energy_joules", "absent"), ("memory_energy_joules", "absent"),
    }  # fmt: skip
    assert "virtual machine" in missing[0].reason


def test_host_idle_that_steps_back_is_held(tree: FakeTree) -> None:
    sampler = opened(HostSampler(Node(root=tree.root)))
    seen = []
    for idle, iowait in ((100, 50), (99, 48), (101, 51)):
        tree.cpu(user=9, idle=idle, iowait=iowait)
        row = one(sampler)
        seen.append((row["cpu_idle_ns"], row["cpu_iowait_ns"]))
    assert seen == [(t * TICK_NS, w * TICK_NS) for t, w in ((100, 50), (100, 50), (101, 51))]


def test_host_idle_is_not_held_when_all_modes_are_set_back(tree: FakeTree) -> None:
    sampler = opened(HostSampler(Node(root=tree.root)))
    tree.cpu(user=500, idle=100, iowait=50)
    one(sampler)
    tree.cpu(user=3, idle=2, iowait=1)
    row = one(sampler)
    assert (row["cpu_idle_ns"], row["cpu_iowait_ns"]) == (2 * TICK_NS, TICK_NS)


def test_host_names_where_the_kernel_wrote_more_lines_later(tree: FakeTree) -> None:
    sampler = opened(HostSampler(Node(root=tree.root)))
    text = (tree.root / "proc/vmstat").read_text()
    tree.write("proc/vmstat", "new_first_line 1\n" + text.replace("oom_kill 1\n", ""))
    row = one(sampler)
    sampler.close()
    assert row["major_page_fault_count"] == 20
    assert row["oom_kill_count"] is None
    assert [m.metric for m in sampler.missing.drain()] == ["oom_kill_count"]


def test_host_kernel_before_the_stall_of_all_lacks_that_alone(tree: FakeTree) -> None:
    tree.write("proc/pressure/io", "some avg10=0.00 avg60=0.10 avg300=0.00 total=4\n")
    sampler = HostSampler(Node(root=tree.root))
    assert [m.metric for m in sampler.open()] == ["pressure_io_full_ns"]
    assert one(sampler)["pressure_io_some_ns"] == 4000


def test_host_disk_that_wraps_comes_or_goes_is_no_step_in_the_sum(tree: FakeTree) -> None:
    tree.disks(sda=(100, 10, (1 << 32) - 5), sdb=(1000, 10, 40))
    sampler = opened(HostSampler(Node(root=tree.root)))
    first = one(sampler)
    tree.disks(sda=(110, 10, (1 << 32) + 20), sdb=(1002, 10, 41))
    wrapped = one(sampler)
    tree.disks(sda=(111, 10, (1 << 32) + 21), sdc=(999, 0, 999))
    changed = one(sampler)
    tree.disks(sda=(112, 10, (1 << 32) + 22), sdc=(1009, 0, 1000))
    last = one(sampler)
    sampler.close()
    assert growth(first, wrapped) == (12 * 512, 26_000_000)
    assert growth(wrapped, changed) == (512, 1_000_000)
    assert growth(changed, last) == (11 * 512, 2_000_000)
    assert sampler.missing.drain() == []


def growth(before: Row, after: Row) -> tuple[float, float]:
    names = ("disk_read_bytes", "disk_busy_ns")
    read, busy = ((after[name] or 0) - (before[name] or 0) for name in names)
    return read, busy


def test_host_disk_that_was_set_back_is_a_gap_with_its_name(tree: FakeTree) -> None:
    tree.disks(sda=(100, 10, 5), sdb=(1000, 10, 40))
    sampler = opened(HostSampler(Node(root=tree.root)))
    first = one(sampler)
    tree.disks(sda=(3, 1, 1), sdb=(1000, 10, 40))
    assert one(sampler)["disk_read_bytes"] is None
    assert all("sda" in m.reason and "set back" in m.reason for m in sampler.missing.drain())
    tree.disks(sda=(4, 1, 1), sdb=(1000, 10, 40))
    assert growth(first, one(sampler)) == (512, 0)


def test_host_nvme_paths_count_and_their_head_does_not(tree: FakeTree) -> None:
    tree.disks(nvme0c0n1=(100, 10, 5), nvme0n1=(100, 10, 5), nvme1n1=(7, 1, 1))
    sampler = opened(HostSampler(Node(root=tree.root)))
    row = one(sampler)
    assert (row["disk_read_bytes"], row["disk_count"]) == (107 * 512, 2)


def test_host_interface_that_comes_with_a_past_is_no_step_in_the_sum(tree: FakeTree) -> None:
    tree.interfaces(eth0=(1000, 2000), ifb0=(500, 500))
    sampler = opened(HostSampler(Node(root=tree.root)))
    first = one(sampler)
    tree.interfaces(eth0=(1001, 2002), eth9=(1 << 40, 1 << 40))
    second = one(sampler)
    assert (first["network_receive_bytes"], first["network_transmit_drop_count"]) == (1000, 4)
    assert (second["network_receive_bytes"], second["network_transmit_bytes"]) == (1001, 2002)


def test_host_without_pressure_is_null_with_the_reason_once(tree: FakeTree) -> None:
    tree.remove("proc/pressure")
    sampler = HostSampler(Node(root=tree.root))
    missing = sampler.open()
    assert [m.metric for m in missing] == [
        c.name for c in HOST.columns if c.name.startswith("pressure")
    ]
    assert all("No such file" in m.reason and "CONFIG_PSI" in m.remedy for m in missing)
    row = one(sampler)
    assert row["pressure_io_some_ns"] is None
    assert row["cpu_user_ns"] is not None
    assert sampler.missing.drain() == []


def test_host_source_that_vanishes_and_returns_leaves_a_gap(
    tree: FakeTree, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_reads_of_removed_files(monkeypatch)
    sampler = opened(HostSampler(Node(root=tree.root)))
    tree.remove("proc/meminfo")
    assert one(sampler)["memory_total_bytes"] is None
    missing = [m.metric for m in sampler.missing.drain()]
    assert {"memory_total_bytes", "memory_available_bytes", "swap_used_bytes"} <= set(missing)
    tree.write("proc/meminfo", "MemTotal: 10 kB\nMemAvailable: 5 kB\n")
    assert one(sampler)["memory_total_bytes"] == 10240


@pytest.mark.parametrize("content", ["", "nonsense", "cpu 1 2\n", "cpu a b c d e f g h\n"])
def test_host_damaged_source_is_null_and_the_others_go_on(tree: FakeTree, content: str) -> None:
    sources = ("stat", "meminfo", "vmstat", "diskstats", "pressure/cpu")
    for path in (*sources, "net/dev", "net/snmp", "net/netstat"):
        tree.write(f"proc/{path}", content)
    sampler = HostSampler(Node(root=tree.root))
    metrics = {m.metric for m in sampler.open()}
    row = one(sampler)
    assert {"cpu_user_ns", "cpu_count", "memory_total_bytes", "pressure_cpu_some_ns"} <= metrics
    assert {name for name, value in row.items() if value is None} == metrics
    assert row["pressure_io_some_ns"] == 9000


def test_host_old_kernel_lacks_available_memory_alone(tree: FakeTree) -> None:
    text = (tree.root / "proc/meminfo").read_text()
    tree.write("proc/meminfo", text.replace("MemAvailable", "MemSomething"))
    sampler = HostSampler(Node(root=tree.root))
    (missing,) = sampler.open()
    assert missing.metric == "memory_available_bytes"
    assert one(sampler)["memory_total_bytes"] == 16384000 * 1024


def test_host_with_no_disk_or_network_says_so_instead_of_zero(tree: FakeTree) -> None:
    tree.write("proc/diskstats", "   7       0 loop0 11 0 900 0 0 0 0 0 0 0 0\n")
    tree.write("proc/net/dev", "Inter-|\n face |\n    lo: 9 9 0 0 0 0 0 0 9 9 0 0 0 0 0 0\n")
    sampler = HostSampler(Node(root=tree.root))
    reasons = {m.metric: m.reason for m in sampler.open()}
    row = one(sampler)
    assert row["disk_read_bytes"] is None
    assert row["network_receive_bytes"] is None
    assert "no whole disk" in reasons["disk_read_bytes"]
    assert "beyond lo" in reasons["network_transmit_bytes"]


def test_host_without_sys_tells_disks_by_name(tree: FakeTree) -> None:
    tree.remove("sys/block")
    sampler = opened(HostSampler(Node(root=tree.root)))
    assert one(sampler)["disk_read_bytes"] == 2100 * 512


def test_host_bridge_ports_of_containers_are_not_counted_twice(tree: FakeTree) -> None:
    line = " {}: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0\n"
    text = "Inter-|\n face |\n" + "".join(map(line.format, ("eth0", "br0", "veth1")))
    tree.write("proc/net/dev", text)
    for name in ("eth0/brport", "br0/lower_eth0", "br0/lower_veth1", "veth1/brport"):
        (tree.root / "sys/class/net" / name).mkdir(parents=True)
    sampler = opened(HostSampler(Node(root=tree.root)))
    assert one(sampler)["network_receive_bytes"] == 100


def test_host_bridge_whose_first_port_comes_later_is_not_counted_twice(tree: FakeTree) -> None:
    for name in ("eth0/device", "docker0"):
        (tree.root / "sys/class/net" / name).mkdir(parents=True, exist_ok=True)
    tree.interfaces(eth0=(1000, 0), docker0=(0, 0))
    sampler = opened(HostSampler(Node(root=tree.root)))
    assert one(sampler)["network_receive_bytes"] == 1000
    for name in ("docker0/lower_veth1", "veth1/brport"):
        (tree.root / "sys/class/net" / name).mkdir(parents=True)
    tree.interfaces(eth0=(1500, 0), docker0=(500, 0), veth1=(500, 0))
    assert one(sampler)["network_receive_bytes"] == 1500


ROUTES = (
    "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "{0}\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    "cali1\t0200000A\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n"
)


@pytest.mark.parametrize(("links", "outward", "counted"), [
    (("eth0/device",), "eth0", 1000),  # the host: cali1 is another container's end
    (("eth0/device", "bond0/lower_eth0"), "bond0", 1000),
    (("cali1/device",), "eth0", 1700),  # a container with an adapter of its own
    (("eth0/device",), "nowhere", 1700),
])  # fmt: skip
def test_host_ends_of_containers_that_are_routed_are_not_counted_twice(
    tmp_path: Path, links: tuple[str, ...], outward: str, counted: int
) -> None:
    tree = FakeTree(tmp_path)
    tree.interfaces(eth0=(1000, 0), cali1=(700, 0))
    shutil.rmtree(tree.root / "sys/class/net", ignore_errors=True)
    for link in ("eth0/statistics", "cali1/statistics", *links):
        (tree.root / "sys/class/net" / link).mkdir(parents=True)
    tree.write("proc/net/route", ROUTES.format(outward))
    sampler = opened(HostSampler(Node(root=tree.root)))
    assert one(sampler)["network_receive_bytes"] == counted


def test_host_count_without_room_costs_itself_alone(tree: FakeTree) -> None:
    sampler = opened(HostSampler(Node(root=tree.root)))
    was = one(sampler)
    path = tree.root / "proc/vmstat"
    words = re.sub(r"(?m)^pgmajfault \d+$", f"pgmajfault {(1 << 64) - 3}", path.read_text())
    path.write_text(words)
    now = one(sampler)
    sampler.close()
    assert now["major_page_fault_count"] is None
    assert {n for n in now if now[n] is None} - {n for n in was if was[n] is None} == {
        "major_page_fault_count"
    }
    (said,) = sampler.missing.drain()
    assert said.metric == "major_page_fault_count"
    assert "beyond 63 bits" in said.reason


def test_host_on_this_machine_agrees_with_psutil() -> None:
    sampler = opened(HostSampler(Node()))
    before = psutil.cpu_times()
    row = one(sampler)
    after, memory, nics = psutil.cpu_times(), psutil.virtual_memory(), psutil.net_io_counters(True)
    for mode in ("user", "nice", "system", "irq", "softirq", "steal"):
        least, most = getattr(before, mode), getattr(after, mode)
        assert least - 0.02 <= seconds(row[f"cpu_{mode}_ns"]) <= most + 0.02
    assert seconds(row["cpu_idle_ns"]) == pytest.approx(after.idle, abs=0.5)
    assert row["memory_total_bytes"] == memory.total
    assert row["memory_available_bytes"] == pytest.approx(memory.available, rel=0.1)
    shared = pytest.approx(memory.shared, rel=0.1, abs=64 << 20)  # other programs take it meanwhile
    assert row["memory_shared_bytes"] == shared
    assert row["swap_total_bytes"] == psutil.swap_memory().total
    assert row["cpu_count"] == psutil.cpu_count()
    received = sum(nic.bytes_recv for name, nic in nics.items() if name != "lo")
    assert (row["network_receive_bytes"] or 0) <= received
    assert (row["context_switch_count"] or 0) <= psutil.cpu_stats().ctx_switches


def test_host_on_this_machine_sees_a_file_written_through(tmp_path: Path) -> None:
    sampler = opened(HostSampler(Node()))
    before = one(sampler)["disk_write_bytes"]
    if before is None:
        pytest.skip("no whole disk is visible here")
    with open(tmp_path / "written", "wb") as file:
        file.write(os.urandom(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    after = one(sampler)["disk_write_bytes"]
    assert after is not None
    if after == before:
        pytest.skip("the temporary folder is not on a local disk")
    assert after - before >= 8 << 20


def seconds(ns: float | None) -> float:
    assert ns is not None
    return ns / 1e9
