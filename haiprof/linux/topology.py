"""Which NUMA node CPUs, GPUs and network adapters belong to, and what shares a PCIe switch."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.linux.cpu_sockets import parse_cpu_list
from haiprof.linux.sysfs import list_names, read_text
from haiprof.run_format.entities import plain_uuid

_NODE = re.compile(r"node(\d+)\Z")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device's place in the machine."""

    node: int | None
    """Its NUMA node; None where the firmware did not say (-1 in /sys)."""
    cpus: str | None
    """The CPUs local to it, as the kernel prints them."""
    bridges: tuple[str, ...]
    """The PCI addresses of the bridges above it, from the root port down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One InfiniBand or RoCE adapter."""

    name: str
    pci: PciDevice | None
    """None for one without a PCI device (soft RoCE)."""


def node_of_cpu(root: Path) -> dict[int, int]:
    """The NUMA node of each CPU; empty where the kernel has no NUMA."""
    nodes = {}
    folder = root / "sys/devices/system/node"
    for name in list_names(folder):
        match = _NODE.match(name)
        cpus = read_text(folder / name / "cpulist") if match else None
        if match and cpus:
            with contextlib.suppress(ValueError):
                nodes.update(dict.fromkeys(parse_cpu_list(cpus), int(match[1])))
    return nodes


def gpu_bus_id(root: Path, uuid: str) -> str | None:
    """The PCI address of an NVIDIA GPU, from the driver's files, without NVML.

    The driver shows a UUID once the GPU has been started; a MIG instance has one of its own, which
    is not there.
    """
    folder = root / "proc/driver/nvidia/gpus"
    for name in sorted(list_names(folder)):
        lines = (read_text(folder / name / "information") or "").splitlines()
        values = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
        if plain_uuid(values.get("GPU UUID", "")) == plain_uuid(uuid):
            return values.get("Bus Location", name).lower()
    return None


def pci_device(root: Path, bus_id: str) -> PciDevice | None:
    """Where the device with a PCI address sits; None where /sys does not show it."""
    return _device(root / "sys/bus/pci/devices" / bus_id)


def adapters(root: Path) -> list[Adapter]:
    """InfiniBand and RoCE adapters, by name."""
    folder = root / "sys/class/infiniband"
    return [Adapter(name=n, pci=_device(folder / n / "device")) for n in sorted(list_names(folder))]


def nearest_adapters(gpu: PciDevice, among: Sequence[Adapter]) -> set[str]:
    """Adapters that share the most bridges with a GPU (a PCIe switch), at least a root port."""
    shared = {a.name: _count_shared(gpu.bridges, a.pci.bridges) for a in among if a.pci is not None}
    most = max(shared.values(), default=0)
    return {name for name, count in shared.items() if count == most and count > 0}


def _device(folder: Path) -> PciDevice | None:
    if not folder.is_dir():
        return None
    parts = Path(os.path.realpath(folder)).parts
    node = read_text(folder / "numa_node")
    return PciDevice(
        node=int(node) if node is not None and node.isdigit() else None,
        cpus=read_text(folder / "local_cpulist") or None,
        bridges=tuple(part for part in parts[:-1] if _PCI_ADDRESS.match(part)),
    )


def _count_shared(left: Sequence[str], right: Sequence[str]) -> int:
    same = [a == b for a, b in zip(left, right, strict=False)]
    return same.index(False) if False in same else len(same)
