"""Which CPU this is, its sockets and caches, and what is near to GPUs and adapters."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from haiprof.base.control_group_limits import parse_cpu_list
from haiprof.linux.procfs import list_names, read_text
from haiprof.run_format.entities import plain_uuid

_CPU = re.compile(r"cpu\d+\Z")
_NODE = re.compile(r"node(\d+)\Z")
_CORE_PMU = re.compile(r"cpu(_core|_atom)?\Z|armv[89]_.*|apple_.*")
_CPU_BYTES = 16 * 1024  # one CPU takes 3 KiB
PMU_FOLDER = "sys/bus/event_source/devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """A CPU model as /proc/cpuinfo names it."""

    vendor: str  # `GenuineIntel`, `AuthenticAMD`, or the implementer's code on ARM (`0x41`)
    family: int
    model: int  # on ARM the part number (0xd4f is Neoverse V2, in Grace)
    virtual: bool  # the hypervisor flag is set

    def __str__(self) -> str:
        return f"CPU {self.vendor} family {self.family} model {self.model}"


def read_cpu(root: Path) -> Cpu:
    """The first CPU of /proc/cpuinfo; zeros and empty text for what it does not state."""
    # Only its first entry is read: with hundreds of CPUs the file has hundreds of KiB, and the
    # kernel may ask each CPU for its frequency.
    try:
        with open(root / "proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(_CPU_BYTES).decode("ascii", errors="replace")
    except OSError:
        text = ""
    fields: dict[str, str] = {}
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    vendor = fields.get("vendor_id") or fields.get("CPU implementer", "")
    numbers = fields.get("cpu family", ""), fields.get("model") or fields.get("CPU part", "")
    family, model = map(_number, numbers)
    virtual = "hypervisor" in fields.get("flags", "").split()
    return Cpu(vendor=vendor, family=family, model=model, virtual=virtual)


def no_core_pmu(root: Path, cpu: Cpu) -> str:
    """Why there are no hardware counters at all; empty text where there are some."""
    if any(_CORE_PMU.match(name) for name in list_names(root / PMU_FOLDER)):
        return ""
    machine = "this virtual machine" if cpu.virtual else "this machine (a virtual one?)"
    return f"{machine} has no hardware PMU: no core PMU in {root / PMU_FOLDER}"


def socket_of_cpu(root: Path) -> dict[int, int]:
    """The socket (physical package) of each CPU that is online."""
    return dict(_cpu_numbers(root, "topology/physical_package_id"))


def socket_of_cache(root: Path, sockets: Mapping[int, int]) -> dict[int, int]:
    """The socket of each last-level cache, by the id that resctrl uses."""
    return {cache: sockets[cpu] for cpu, cache in _cpu_numbers(root, "cache/index3/id")
            if cpu in sockets}  # fmt: skip


def node_count(root: Path) -> int:
    """NUMA nodes of the machine."""
    return sum(map(bool, map(_NODE.match, list_names(root / "sys/devices/system/node"))))


def _cpu_numbers(root: Path, file: str) -> Iterator[tuple[int, int]]:
    folder = root / "sys/devices/system/cpu"
    for name in sorted(list_names(folder)):
        if _CPU.match(name):
            try:
                yield int(name[3:]), int((folder / name / file).read_text())
            except (OSError, ValueError):
                continue  # offline, or the firmware does not say


def _number(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text, 0)
    return 0


_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class PciDevice:
    """A PCI device's place in the machine."""

    node: int | None  # its NUMA node; None where the firmware did not say (-1 in /sys)
    cpus: str | None  # the CPUs local to it, as the kernel prints them
    bridges: tuple[str, ...]  # the PCI addresses of the bridges above it, from the root port down


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One InfiniBand or RoCE adapter."""

    name: str
    pci: PciDevice | None  # None for one without a PCI device (soft RoCE)


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
    """The PCI address of an NVIDIA GPU, from the driver's files, without NVML."""
    # The driver shows a UUID once the GPU has been started; a MIG instance has one of its own,
    # which is not there.
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
    own = {*gpu.bridges}  # in a tree, those of two devices are alike from the root on
    shared = {a.name: len(own & {*a.pci.bridges}) for a in among if a.pci is not None}
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
