from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from haiprof.agent.samplers.memory_traffic import MemoryBandwidthSampler
from haiprof.agent.samplers.table import Missing, Node
from haiprof.run_format.tables import MEMORY_BANDWIDTH
from tests.fake_pmu import FakePerf, cpu, pmu, sockets
from tests.fakes import FakeTree
from tests.unit.samplers.records import Row, opened, rows

UMC_FORMATS = {"event": "config:0-7", "rdwrmask": "config:8-9"}
DF_FORMATS = {"event": "config:0-7,32-37", "umask": "config:8-15,24-27"}
MIB_64 = {"scale": "6.103515625e-5", "unit": "MiB"}


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    tree = FakeTree(tmp_path)
    tree.write("proc/sys/kernel/perf_event_paranoid", "0\n")
    tree.write("sys/bus/event_source/devices/cpu/type", "4\n")
    sockets(tree, {0: range(4), 1: range(4, 8)})
    cpu(tree, "GenuineIntel", 6, 143)
    return tree


def sampler_of(tree: FakeTree, perf: FakePerf | None = None) -> MemoryBandwidthSampler:
    return MemoryBandwidthSampler(Node(root=tree.root), kernel=perf or FakePerf(tree))


def opened_on(tree: FakeTree) -> tuple[MemoryBandwidthSampler, FakePerf]:
    perf = FakePerf(tree)
    return opened(sampler_of(tree, perf)), perf


def sampled(sampler: MemoryBandwidthSampler) -> list[Row]:
    return rows(MEMORY_BANDWIDTH, sampler.sample())


def values(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ("time_ns", "read_ns")}


def names(sampler: MemoryBandwidthSampler) -> list[object]:
    entities = sampler.header()["entities"]
    assert isinstance(entities, list)
    return [each["name"] for each in entities]


def reasons(missing: list[Missing]) -> dict[str, str]:
    return {each.metric: each.reason for each in missing}


def monitored(
    tree: FakeTree, total: Mapping[int, object], local: Mapping[int, object], group: str = ""
) -> None:
    """Puts the counts of a control group in place, by cache."""
    for cache in total:
        folder = f"sys/fs/resctrl/{group}mon_data/mon_L3_{cache:02}"
        tree.write(f"{folder}/mbm_total_bytes", f"{total[cache]}\n")
        tree.write(f"{folder}/mbm_local_bytes", f"{local[cache]}\n")
        tree.write(f"{folder}/llc_occupancy", "5\n")
    tree.write("sys/fs/resctrl/info/L3_MON/mon_features", "mbm_total_bytes\n")


def test_resctrl_gives_total_and_remote_traffic_of_each_socket(tree: FakeTree) -> None:
    monitored(tree, {0: 1000, 1: 500}, {0: 900, 1: 500})
    sampler = sampler_of(tree)
    missing = sampler.open()
    assert {each.metric for each in missing} == {"read_bytes", "write_bytes"}
    assert all("reads from writes" in each.reason for each in missing)
    monitored(tree, {0: 9000, 1: 700}, {0: 5000, 1: 600})
    first, second = sampled(sampler)
    assert names(sampler) == ["socket 0 (resctrl)", "socket 1 (resctrl)"]
    assert values(first) == {
        "domain": 0, "read_bytes": None, "write_bytes": None, "total_bytes": 9000,
        "remote_bytes": 4000, "counted_ratio": 1.0,
    }  # fmt: skip
    assert (second["domain"], second["total_bytes"], second["remote_bytes"]) == (1, 700, 100)


def test_resctrl_sums_the_caches_of_a_socket(tree: FakeTree) -> None:
    for number in range(8):  # as on AMD: a cache for every two CPUs
        tree.write(f"sys/devices/system/cpu/cpu{number}/cache/index3/id", f"{number // 2}\n")
    monitored(tree, {0: 1, 1: 20, 2: 300, 3: 4000}, {0: 1, 1: 20, 2: 300, 3: 4000})
    sampler, _ = opened_on(tree)
    assert [row["total_bytes"] for row in sampled(sampler)] == [21, 4300]


def test_resctrl_counts_all_control_groups(tree: FakeTree) -> None:
    monitored(tree, {0: 1000}, {0: 1000})
    monitored(tree, {0: 50}, {0: 40}, group="job/")
    tree.write("sys/fs/resctrl/mon_groups/mine/mon_data/mon_L3_00/mbm_total_bytes", "7\n")
    sampler, _ = opened_on(tree)
    (row,) = sampled(sampler)
    assert (row["total_bytes"], row["remote_bytes"]) == (1050, 10)
    monitored(tree, {0: 300}, {0: 300}, group="new/")  # what it counted before is not this job's
    monitored(tree, {0: 1100}, {0: 1100})
    assert sampled(sampler)[0]["total_bytes"] == 1150
    monitored(tree, {0: 310}, {0: 310}, group="new/")
    assert sampled(sampler)[0]["total_bytes"] == 1160


@pytest.mark.parametrize("what", ["reset", "group removed"])
def test_resctrl_count_that_is_lost_shows_as_a_reset(tree: FakeTree, what: str) -> None:
    monitored(tree, {0: 1000}, {0: 400})
    monitored(tree, {0: 1000}, {0: 400}, group="job/")
    sampler, _ = opened_on(tree)
    assert [sampled(sampler)[0][name] for name in ("total_bytes", "remote_bytes")] == [2000, 1200]
    if what == "reset":
        monitored(tree, {0: 10}, {0: 5}, group="job/")
    else:
        tree.remove("sys/fs/resctrl/job")
    monitored(tree, {0: 99_000}, {0: 400})
    assert [sampled(sampler)[0][name] for name in ("total_bytes", "remote_bytes")] == [0, 0]
    monitored(tree, {0: 99_500}, {0: 500})
    assert [sampled(sampler)[0][name] for name in ("total_bytes", "remote_bytes")] == [500, 400]


def test_resctrl_remote_traffic_does_not_go_back_by_what_passes_between_two_reads(
    tree: FakeTree,
) -> None:
    monitored(tree, {0: 1000}, {0: 900})
    sampler, _ = opened_on(tree)
    monitored(tree, {0: 2000}, {0: 1905})
    assert sampled(sampler)[0]["remote_bytes"] == 100


def test_resctrl_word_in_place_of_a_number_is_null_with_that_word(tree: FakeTree) -> None:
    monitored(tree, {0: 1000}, {0: "Unassigned"})
    sampler = sampler_of(tree)
    assert "Unassigned (no hardware counter" in reasons(sampler.open())["remote_bytes"]
    (row,) = sampled(sampler)
    assert (row["total_bytes"], row["remote_bytes"]) == (1000, None)
    monitored(tree, {0: "Unavailable"}, {0: "Error"})
    assert sampled(sampler)[0]["total_bytes"] is None
    assert "Unavailable" in reasons(sampler.missing.drain())["total_bytes"]
    monitored(tree, {0: 1500}, {0: 1400})
    (row,) = sampled(sampler)
    assert (row["total_bytes"], row["remote_bytes"]) == (1500, 100)


def test_resctrl_without_a_readable_total_gives_way_to_uncore(tree: FakeTree) -> None:
    monitored(tree, {0: "Unassigned"}, {0: "Unassigned"})
    pmu(tree, "uncore_imc_0", 20)
    sampler, _ = opened_on(tree)
    assert names(sampler) == ["socket 0 (uncore)", "socket 1 (uncore)"]


def intel(tree: FakeTree, channel_count: int = 2, events: Mapping[str, str] | None = None) -> None:
    for channel in range(channel_count):
        pmu(tree, f"uncore_imc_{channel}", 20 + channel, events=events)
    pmu(tree, "uncore_imc_free_running_0", 60)
    for link in range(3):
        pmu(tree, f"uncore_upi_{link}", 40 + link)


def test_uncore_sums_channels_and_links_per_socket(tree: FakeTree) -> None:
    intel(tree)
    perf = FakePerf(tree)
    sampler = sampler_of(tree, perf)
    assert sampler.open() == []
    for channel in (20, 21):
        perf.traffic(0xCF05, 100, type_=channel, cpu=0)
        perf.traffic(0xF005, 10, type_=channel, cpu=0)
        perf.traffic(0xCF05, 7, type_=channel, cpu=4)
    for link in (40, 41, 42):
        perf.traffic(0x0F02, 9, type_=link, cpu=4)
    first, second = sampled(sampler)
    sampler.close()
    assert values(first) == {
        "domain": 0, "read_bytes": 200 * 64, "write_bytes": 20 * 64, "total_bytes": 220 * 64,
        "remote_bytes": 0, "counted_ratio": 1.0,
    }  # fmt: skip
    assert (second["read_bytes"], second["remote_bytes"]) == (14 * 64, 3 * 64)
    assert perf.events == {}


def test_uncore_prefers_the_kernels_own_events_and_scale(tree: FakeTree) -> None:
    events = {"cas_count_read": "event=0x99,umask=0x01", "cas_count_write": "event=0x98"}
    scales = {f"{name}.{part}": text for name in events for part, text in MIB_64.items()}
    intel(tree, 1, events={**events, **scales, "cas_count_write.scale": "0.5"})
    sampler, perf = opened_on(tree)
    perf.traffic(0x0199, 10, type_=20, cpu=0)
    perf.traffic(0x0098, 3, type_=20, cpu=0)
    row = sampled(sampler)[0]
    assert (row["read_bytes"], row["write_bytes"]) == (640, 3 << 19)


def test_uncore_event_with_an_unknown_unit_is_not_used(tree: FakeTree) -> None:
    cpu(tree, "GenuineIntel", 6, 999)
    events = {"cas_count_read": "event=0x04", "cas_count_read.scale": "2"}
    intel(tree, 1, events={**events, "cas_count_read.unit": "furlong"})
    (missing,) = sampler_of(tree).open()
    assert missing.status == "unsupported"
    assert "describes no event for read_bytes" in missing.reason


def test_uncore_of_ice_lake_does_not_trust_old_kernels_masks(tree: FakeTree) -> None:
    cpu(tree, "GenuineIntel", 6, 106)
    wrong = {"cas_count_read": "event=0x04,umask=0x03", "cas_count_write": "event=0x04,umask=0x0c"}
    scales = {f"{name}.{part}": text for name in wrong for part, text in MIB_64.items()}
    intel(tree, 1, events={**wrong, **scales})
    sampler, perf = opened_on(tree)
    perf.traffic(0x0F04, 10, type_=20, cpu=0)
    perf.traffic(0x3004, 20, type_=20, cpu=0)
    row = sampled(sampler)[0]
    assert (row["read_bytes"], row["write_bytes"]) == (640, 1280)


def test_uncore_of_granite_rapids_adds_both_subchannels(tree: FakeTree) -> None:
    cpu(tree, "GenuineIntel", 6, 173)
    intel(tree, 1)
    sampler, perf = opened_on(tree)
    perf.traffic(0xCF05, 10, type_=20, cpu=0)
    perf.traffic(0xCF06, 5, type_=20, cpu=0)
    assert sampled(sampler)[0]["read_bytes"] == 15 * 64


def test_uncore_counter_that_took_turns_is_a_marked_estimate(tree: FakeTree) -> None:
    intel(tree, 1)
    sampler, perf = opened_on(tree)
    perf.traffic(0xCF05, 100, type_=20, cpu=0, share=0.5)
    first, second = sampled(sampler)
    assert (first["read_bytes"], first["counted_ratio"]) == (6400, 0.5)
    assert second["counted_ratio"] == 1.0
    perf.traffic(0xCF05, 100, type_=20, cpu=0, share=0)
    (row, _) = sampled(sampler)
    assert (row["read_bytes"], row["total_bytes"]) == (None, None)
    assert row["write_bytes"] == 0
    assert "no hardware counter was free" in reasons(sampler.missing.drain())["read_bytes"]
    perf.traffic(0xCF05, 100, type_=20, cpu=0)
    assert sampled(sampler)[0]["read_bytes"] == 6400 + 12800


def test_uncore_links_that_are_missing_leave_dram_traffic(tree: FakeTree) -> None:
    pmu(tree, "uncore_imc_0", 20)
    sampler = sampler_of(tree)
    assert "shows no PMU uncore_upi" in reasons(sampler.open())["remote_bytes"]
    row = sampled(sampler)[0]
    assert (row["total_bytes"], row["remote_bytes"]) == (0, None)


def test_uncore_of_one_socket_has_no_other(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path)
    tree.write("proc/sys/kernel/perf_event_paranoid", "0\n")
    cpu(tree, "GenuineIntel", 6, 143)
    sockets(tree, {0: range(8)})
    pmu(tree, "uncore_imc_0", 20, cpumask="0")
    sampler = sampler_of(tree)
    assert reasons(sampler.open()) == {
        "remote_bytes": "socket 0 (uncore): there is no other socket"
    }


def test_uncore_pmu_that_is_not_on_every_socket_is_no_zero(tree: FakeTree) -> None:
    intel(tree, 1)
    pmu(tree, "uncore_imc_0", 20, cpumask="0")
    perf = FakePerf(tree)
    (missing,) = sampler_of(tree, perf).open()
    assert "not on every socket" in missing.reason
    assert perf.events == {}


def test_uncore_event_that_does_not_fit_the_pmu_is_unsupported(tree: FakeTree) -> None:
    pmu(tree, "uncore_imc_0", 20, formats={"event": "config:0-1", "umask": "config:8-15"})
    (missing,) = sampler_of(tree).open()
    assert "does not fit" in missing.reason
    assert missing.status == "unsupported"


@pytest.mark.parametrize(
    ("family", "model", "link", "link_count"), [(25, 17, 0xB5F, 8), (26, 2, 0xD5F, 6)]
)
def test_uncore_of_epyc_counts_bursts_and_link_beats(
    tree: FakeTree, family: int, model: int, link: int, link_count: int
) -> None:
    cpu(tree, "AuthenticAMD", family, model)
    pmu(tree, "amd_umc_0", 30, cpumask="0", formats=UMC_FORMATS)
    pmu(tree, "amd_umc_1", 31, cpumask="4", formats=UMC_FORMATS)
    pmu(tree, "amd_df", 32, formats=DF_FORMATS)
    perf = FakePerf(tree)
    sampler = sampler_of(tree, perf)
    assert sampler.open() == []
    perf.traffic(0x010A, 10, type_=30, cpu=0)
    perf.traffic(0x020A, 4, type_=31, cpu=4)
    for number in range(link_count):
        event = link + 0x40 * number
        config = (event & 0xFF) | (event >> 8) << 32 | 0x3E << 8 | 0xF << 24
        perf.traffic(config, 2, type_=32, cpu=4)
    first, second = sampled(sampler)
    assert (first["read_bytes"], first["write_bytes"], first["remote_bytes"]) == (640, 0, 0)
    assert second["write_bytes"] == 256
    assert second["remote_bytes"] == 2 * 64 * link_count


def test_uncore_of_older_epyc_gives_the_total_where_a_socket_is_one_node(tree: FakeTree) -> None:
    cpu(tree, "AuthenticAMD", 25, 1)
    pmu(tree, "amd_df", 32, formats={"event": "config:0-7,32-35", "umask": "config:8-15"})
    for node in (0, 1):
        tree.write(f"sys/devices/system/node/node{node}/meminfo", "")
    perf = FakePerf(tree)
    sampler = sampler_of(tree, perf)
    missing = reasons(sampler.open())
    assert set(missing) == {"read_bytes", "write_bytes", "remote_bytes"}
    perf.traffic(0x3807, 10, type_=32, cpu=0)
    perf.traffic(0x38C7 | 1 << 32, 5, type_=32, cpu=0)  # channel 7: event 0x1c7
    row = sampled(sampler)[0]
    assert (row["total_bytes"], row["read_bytes"]) == (15 * 64, None)
    tree.write("sys/devices/system/node/node2/meminfo", "")
    (missing_all,) = sampler_of(tree).open()
    assert "NPS1" in missing_all.reason


def test_uncore_of_grace_counts_beats_and_bytes(tree: FakeTree) -> None:
    text = "processor\t: 0\nFeatures\t: sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd4f\n\n"
    tree.write("proc/cpuinfo", text)
    events = {
        "cmem_rd_data": "event=0x1a5", "cmem_wr_total_bytes": "event=0x1db",
        "remote_socket_rd_data": "event=0x1a2", "remote_socket_wr_total_bytes": "event=0x1a1",
    }  # fmt: skip
    for socket in (0, 1):
        pmu(tree, f"nvidia_scf_pmu_{socket}", 50 + socket, cpumask=str(4 * socket),
            formats={"event": "config:0-31"}, events=events)  # fmt: skip
    perf = FakePerf(tree)
    sampler = sampler_of(tree, perf)
    assert sampler.open() == []
    for config, count in ((0x1A5, 10), (0x1DB, 100), (0x1A2, 1), (0x1A1, 5)):
        perf.traffic(config, count, type_=51, cpu=4)
    first, second = sampled(sampler)
    assert first["total_bytes"] == 0
    assert (second["read_bytes"], second["write_bytes"], second["remote_bytes"]) == (320, 100, 37)


def test_bandwidth_that_is_denied_names_the_sysctl_and_both_remedies(tree: FakeTree) -> None:
    tree.write("proc/sys/kernel/perf_event_paranoid", "2\n")
    intel(tree)
    (tree.root / "sys/fs/resctrl").mkdir(parents=True)
    perf = FakePerf(tree)
    (missing,) = sampler_of(tree, perf).open()
    assert (missing.metric, missing.status) == ("all", "denied")
    assert "kernel.perf_event_paranoid is 2" in missing.reason
    assert "sysctl kernel.perf_event_paranoid=0, or CAP_PERFMON" in missing.remedy
    assert "mount -t resctrl" in missing.remedy
    assert perf.events == {}
    assert sampler_of(tree, FakePerf(tree, privileged=True)).open() == []


def test_bandwidth_without_open_files_left_leaves_none_open(tree: FakeTree) -> None:
    intel(tree)
    perf = FakePerf(tree, open_limit=3)
    (missing,) = sampler_of(tree, perf).open()
    assert "no file descriptor is left" in missing.reason
    assert perf.events == {}


def test_bandwidth_of_an_unknown_cpu_says_which(tree: FakeTree) -> None:
    cpu(tree, "HygonGenuine", 24, 1)
    (missing,) = sampler_of(tree).open()
    assert missing.status == "unsupported"
    assert "HygonGenuine family 24 model 1" in missing.reason


def test_bandwidth_in_a_virtual_machine_is_missing_for_that_reason(tmp_path: Path) -> None:
    tree = FakeTree(tmp_path)
    cpu(tree, "AuthenticAMD", 25, 17, flags="fpu hypervisor")
    sockets(tree, {0: range(2)})
    (missing,) = sampler_of(tree).open()
    assert "this virtual machine has no hardware PMU" in missing.reason
    assert missing.status in ("absent", "unsupported")
