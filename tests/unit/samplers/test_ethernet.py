"""Driver statistics: which of them count, on a kernel that answers the ioctl through memory."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from pathlib import Path

import pytest

from haiprof.agent.samplers.network import (
    COLUMNS,
    GSSET_INFO,
    GSTATS,
    GSTRINGS,
    SIOCETHTOOL,
    EthernetSampler,
    Ethtool,
)
from haiprof.agent.samplers.table import ALL_METRICS, Node
from haiprof.run_format.tables import ETHERNET
from tests.unit.samplers.records import Row, opened, rows

MLX5 = {
    "rx_packets": 1, "rx_prio0_pause": 2, "rx_prio3_pause": 40, "rx_prio3_pause_duration": 7,
    "rx_prio3_pause_transition": 999, "tx_global_pause": 3, "tx_global_pause_duration": 5,
    "rx_discards_phy": 11, "tx_pause_storm_warning_events": 1, "rx_out_of_buffer": 4,
    "rx0_out_of_buffer": 999, "rx_vport_rdma_unicast_bytes": 1 << 40,
    "tx_vport_rdma_unicast_bytes": (1 << 64) - 1,
}  # fmt: skip
BNXT = {"rx_pfc_ena_frames_pri3": 5, "rx_pause_frames": 1, "pfc_pri3_rx_duration_us": 2,
        "rx_stat_discard": 6}  # fmt: skip


class FakeKernel:
    """Interfaces in /sys/class/net and the kernel's side of SIOCETHTOOL."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.net = root / "sys/class/net"
        self.statistics: dict[str, dict[str, int]] = {}
        self.calls: list[tuple[str, int]] = []
        self.checks_room = False
        """As kernels from 2026 on: no values when the caller expects another number."""

    def put(
        self, name: str, index: int, statistics: dict[str, int], *, driver: str = "mlx5_core"
    ) -> None:
        folder = self.net / name
        (folder / "device").mkdir(parents=True, exist_ok=True)
        for file, text in (("ifindex", index), ("type", 1), ("phys_port_name", "p0")):
            (folder / file).write_text(f"{text}\n")
        if not (folder / "device/driver").is_symlink():
            (folder / "device/driver").symlink_to(f"../drivers/{driver}")
        self.statistics[name] = statistics

    def ioctl(self, fd: int, request: int, argument: bytes) -> None:
        assert request == SIOCETHTOOL
        assert len(argument) == 40
        raw_name, address = struct.unpack_from("=16sQ", argument)
        name = raw_name.rstrip(b"\0").decode()
        (command,) = struct.unpack("=I", ctypes.string_at(address, 4))
        self.calls.append((name, command))
        if name not in self.statistics:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        known = self.statistics[name]
        if command == GSSET_INFO:
            mask = 2 if known else 0
            answer = struct.pack("=IIQI", command, 0, mask, len(known))
        elif command == GSTRINGS:
            cut = [key.encode()[:32].ljust(32, b"\0") for key in known]
            answer = struct.pack("=III", command, 1, len(known)) + b"".join(cut)
        else:
            assert command == GSTATS
            (expected,) = struct.unpack("=I", ctypes.string_at(address + 4, 4))
            count = 0 if self.checks_room and expected != len(known) else len(known)
            answer = struct.pack(f"=II{count}Q", command, count, *list(known.values())[:count])
        ctypes.memmove(address, answer, len(answer))


@pytest.fixture
def kernel(tmp_path: Path) -> FakeKernel:
    return FakeKernel(tmp_path)


def sampler_on(kernel: FakeKernel) -> EthernetSampler:
    return EthernetSampler(Node(root=kernel.root), ioctl=kernel.ioctl)


def samples(sampler: EthernetSampler) -> dict[float | None, Row]:
    return {row["interface_index"]: row for row in rows(ETHERNET, sampler.sample())}


def test_ethernet_adds_up_priorities_in_base_units(kernel: FakeKernel) -> None:
    kernel.put("ens1", 7, MLX5)
    sampler = sampler_on(kernel)
    missing = {m.metric: m for m in sampler.open()}
    row = samples(sampler)[7]
    assert {k: v for k, v in row.items() if k in COLUMNS and v is not None} == {
        "receive_pause_count": 42, "transmit_pause_count": 3, "receive_pause_ns": 7000,
        "transmit_pause_ns": 5000, "pause_storm_warning_count": 1, "receive_discard_count": 11,
        "out_of_buffer_count": 4, "rdma_receive_bytes": 1 << 40,
    }  # fmt: skip
    assert missing["pause_storm_error_count"].status == "unsupported"
    assert "rdma_transmit_bytes" in missing  # beyond 63 bits: damage, not a number


def test_ethernet_knows_other_drivers_names(kernel: FakeKernel) -> None:
    kernel.put("ens2", 3, BNXT, driver="bnxt_en")
    sampler = opened(sampler_on(kernel))
    assert sampler.header() == {"entities": [{"key": [3], "name": "ens2", "driver": "bnxt_en"}]}
    row = samples(sampler)[3]
    assert row["receive_pause_count"] == 6
    assert row["receive_pause_ns"] == 2000
    assert row["receive_discard_count"] == 6
    assert row["transmit_pause_count"] is None


def test_ethernet_asks_only_drivers_that_count_something_of_it(kernel: FakeKernel) -> None:
    kernel.put("eth0", 2, {"rx_queue_0_packets": 5}, driver="virtio_net")
    kernel.put("ens1", 7, MLX5)
    sampler = sampler_on(kernel)
    missing = {m.metric: m.reason for m in sampler.open()}
    assert "virtio_net counts neither" in missing["eth0"]
    assert list(samples(sampler)) == [7]
    assert ("eth0", GSTATS) not in kernel.calls


@pytest.mark.parametrize("statistics", [{}, {"rx_queue_0_packets": 5}])
def test_ethernet_that_counts_nothing_of_it_is_no_sampler(
    kernel: FakeKernel, statistics: dict[str, int]
) -> None:
    kernel.put("eth0", 2, statistics, driver="virtio_net")
    sampler = sampler_on(kernel)
    (missing,) = sampler.open()
    assert (missing.metric, missing.status) == (ALL_METRICS, "unsupported")
    assert "eth0" in missing.reason


def test_ethernet_without_hardware_is_absent(kernel: FakeKernel) -> None:
    (kernel.net / "lo").mkdir(parents=True)
    (kernel.net / "lo/ifindex").write_text("1\n")
    sampler = sampler_on(kernel)
    (missing,) = sampler.open()
    assert (missing.metric, missing.status) == (ALL_METRICS, "absent")


@pytest.mark.parametrize("checks_room", [False, True])
def test_ethernet_list_that_grows_costs_one_sample(kernel: FakeKernel, checks_room: bool) -> None:
    kernel.checks_room = checks_room
    kernel.put("ens1", 7, MLX5)
    sampler = opened(sampler_on(kernel))
    kernel.statistics["ens1"] = {"rx63_packets": 9, **MLX5, "rx_prio3_pause": 50}
    assert samples(sampler)[7]["receive_pause_count"] is None
    assert samples(sampler)[7]["receive_pause_count"] == 52


def test_ethernet_device_that_is_plugged_in_again_has_another_key(kernel: FakeKernel) -> None:
    kernel.put("ens1", 7, MLX5)
    kernel.put("ens2", 8, MLX5)
    sampler = opened(sampler_on(kernel))
    kernel.put("ens1", 9, {**MLX5, "rx_discards_phy": 500})
    seen = samples(sampler)
    assert seen.keys() == {8, 9}
    assert seen[9]["receive_discard_count"] == 500
    assert [(line["key"], line["name"]) for line in sampler.drain_lines()] == [([9], "ens1")]


def test_ethernet_interface_that_fails_leaves_the_others(kernel: FakeKernel) -> None:
    kernel.put("ens1", 7, MLX5)
    kernel.put("ens2", 8, MLX5)
    sampler = opened(sampler_on(kernel))
    del kernel.statistics["ens1"]  # gone, but still listed
    seen = samples(sampler)
    assert seen[7]["receive_pause_count"] is None
    assert seen[8]["receive_pause_count"] == 42


def test_ethernet_columns_are_the_tables() -> None:
    assert [c.name for c in ETHERNET.metrics] == list(COLUMNS)


def test_ethtool_on_this_machine_reads_each_value_beside_its_name() -> None:
    ethtool = Ethtool()
    with pytest.raises(OSError, match="No such device"):
        ethtool.names("nonesuch0")
    read = {}
    for folder in Path("/sys/class/net").iterdir():
        if (folder / "device").exists():
            names = ethtool.names(folder.name)
            values = ethtool.values(folder.name, len(names))
            read[folder.name] = dict(zip(names, values, strict=True))
    ethtool.close()
    for known in read.values():
        if "rx_kicks" in known:  # virtio_net: the sum over its queues, which stand beside it
            queues = [v for k, v in known.items() if re.fullmatch(r"rx\d+_kicks", k)]
            assert sum(queues) == known["rx_kicks"] > 0
