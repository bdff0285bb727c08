"""RDMA devices in /sys/class/infiniband: counters that wrap, stick, go away and return."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

MLX5_HARDWARE = (
    "np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "rp_cnp_ignored",
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
    "implied_nak_seq_err", "out_of_buffer", "duplicate_request", "roce_adp_retrans",
    "roce_slow_restart", "lifespan",
)  # fmt: skip
MANA_HARDWARE = (
    "requester_timeout", "requester_oos_nak", "requester_rnr_nak", "responder_oos",
    "responder_dup_request", "requester_implicit_nak", "received_cnps", "tx_bytes", "rx_bytes",
    "tx_packets", "rx_packets",
)  # fmt: skip
EFA_HARDWARE = ("tx_bytes", "rx_bytes", "tx_pkts", "rx_pkts", "rx_drops", "retrans_pkts")
RXE_HARDWARE = ("sent_pkts", "rcvd_pkts", "duplicate_request", "out_of_seq_request",
                "rcvd_rnr_err", "rcvd_seq_err")  # fmt: skip
NO_PMA = "N/A (no PMA)"

# Bits of the counters of a port in its performance management, which all stop at their end.
PMA_BITS = {
    "symbol_error": 16, "link_error_recovery": 8, "link_downed": 8, "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16, "port_xmit_discards": 16,
    "port_xmit_constraint_errors": 8, "port_rcv_constraint_errors": 8,
    "local_link_integrity_errors": 4, "excessive_buffer_overrun_errors": 4, "VL15_dropped": 16,
    "port_xmit_wait": 32, "port_xmit_data": 32, "port_rcv_data": 32, "port_xmit_packets": 32,
    "port_rcv_packets": 32,
}  # fmt: skip
EXTENDED = ("port_xmit_data", "port_rcv_data", "port_xmit_packets", "port_rcv_packets")


@dataclass
class FakePort:
    """One port; change what it has counted and `put` it again."""

    device: str = "mlx5_0"
    number: int = 1
    link_layer: str = "InfiniBand"
    state: str = "4: ACTIVE"
    rate: str = "400 Gb/sec (4X NDR)"
    numa_node: int = 1
    netdev: str | None = None
    driver: str = "mlx5_core"
    extended: bool = True
    """Whether data and packets have 64 bits."""
    pma: Mapping[str, int | str] | None = field(default_factory=dict)
    """True counts since the driver was loaded, or a text; None: no such counters at all."""
    hardware_names: tuple[str, ...] = MLX5_HARDWARE
    hardware_bits: int = 32
    hardware: Mapping[str, int] = field(default_factory=dict)

    def shown(self, name: str) -> str:
        """What the file says of a count."""
        assert self.pma is not None
        value = self.pma.get(name, 0)
        if isinstance(value, str):
            return value
        bits = 64 if self.extended and name in EXTENDED else PMA_BITS[name]
        return str(min(value, (1 << bits) - 1))


def mlx5_roce(device: str = "mlx5_1") -> FakePort:
    """A RoCE port."""
    return FakePort(device=device, link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", netdev="ens1")


def hfi1() -> FakePort:
    """An Omni-Path port: the files are there and say that there is nothing in them."""
    return FakePort(device="hfi1_0", driver="hfi1", pma=dict.fromkeys(PMA_BITS, NO_PMA),
                    hardware_names=())  # fmt: skip


def mana() -> FakePort:
    """A virtual function in Azure, with names of its own and 64 bits."""
    return FakePort(device="mana_0", driver="mana", link_layer="Ethernet", pma=None,
                    rate="200 Gb/sec (4X HDR)", hardware_names=MANA_HARDWARE,
                    hardware_bits=64)  # fmt: skip


def efa() -> FakePort:
    """An adapter in AWS."""
    return FakePort(device="rdmap0s31", driver="efa", link_layer="Unspecified", pma=None,
                    numa_node=-1, hardware_names=EFA_HARDWARE, hardware_bits=64)  # fmt: skip


def rxe() -> FakePort:
    """Soft-RoCE: neither bytes nor congestion notifications."""
    return FakePort(device="rxe0", driver="", link_layer="Ethernet", pma=None,
                    hardware_names=RXE_HARDWARE, hardware_bits=64)  # fmt: skip


class FakeRdma:
    """A root folder with RDMA devices."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._base = root / "sys/class/infiniband"
        self._removed = 0

    def put(self, port: FakePort) -> None:
        """A port with its present values; kept-open files go on being read."""
        device = self._base / port.device
        folder = device / "ports" / str(port.number)
        for name, text in (("state", port.state), ("rate", port.rate), ("link_layer",
                           port.link_layer), ("phys_state", "5: LinkUp")):  # fmt: skip
            write(folder / name, text)
        if port.netdev is not None:
            write(folder / "gid_attrs/ndevs/0", port.netdev)
        write(device / "device/numa_node", str(port.numa_node))
        driver = device / "device/driver"
        if port.driver and not driver.is_symlink():
            driver.symlink_to(f"../drivers/{port.driver}")
        if port.pma is not None:
            for name in PMA_BITS:
                write(folder / "counters" / name, port.shown(name))
        for name in port.hardware_names:
            value = port.hardware.get(name, 0) % (1 << port.hardware_bits)
            write(folder / "hw_counters" / name, str(10 if name == "lifespan" else value))

    def remove(self, device: str) -> None:
        """Unplugs a device. It is moved aside, so that its inodes are not used again."""
        aside = self.root / "removed"
        aside.mkdir(exist_ok=True)
        self._removed += 1
        (self._base / device).rename(aside / str(self._removed))

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        """As os.pread on sysfs: a file of a removed device no longer answers."""
        if f"{self.root}/removed/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return os.pread(fd, length, offset)


def write(path: Path, text: str) -> None:
    """One line, in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")
